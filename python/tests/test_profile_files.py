"""Profiles are valid files, and models that have none are refused."""

from __future__ import annotations

import resource
import signal
from typing import Any

import numpy as np
import pytest
import tomllib
import torch
from torch import nn

import racksum
import racksum.torch
from racksum.torch import Estimate, Profile
from racksum.torch.profile import ProfiledTensor


def of(*tensors: ProfiledTensor, **fields: Any) -> Profile:
    given: Any = {"name": "net", "device": "cpu", "times": "measured", **fields}
    return Profile(tensors=list(tensors) or [tensor()], **given)


def tensor(**fields: Any) -> ProfiledTensor:
    given: Any = {
        "name": "front",
        "elements": 3,
        "element_bytes": 4,
        "forward_us": 0.000001,
        "backward_us": 1e13,
        "update_us": 0.0,
        **fields,
    }
    return ProfiledTensor(**given)


AWKWARD = "a\"b\\c\n\t\x00\x1f\x7f \u2028 é 🚀 ' ]]"


def test_the_file_has_the_documented_keys_and_reads_back(tmp_path):
    made = of(tensor(name=AWKWARD), tensor(), name=AWKWARD, device=AWKWARD, comment=AWKWARD)
    made.save(tmp_path / "net.toml")
    with open(tmp_path / "net.toml", "rb") as file:
        read = tomllib.load(file)
    assert list(read) == ["name", "device", "times", "tensors"]
    assert (read["name"], read["device"], read["times"]) == (AWKWARD, AWKWARD, "measured")
    assert read["tensors"] == [
        {
            "name": name,
            "elements": 3,
            "element_bytes": 4,
            "forward_us": 0.000001,
            "backward_us": 1e13,
            "update_us": 0.0,
        }
        for name in (AWKWARD, "front")
    ]
    assert [type(value) for value in read["tensors"][0].values()] == [str, int, int, *[float] * 3]


def test_numbers_of_numpy_are_written_as_numbers():
    made = of(tensor(elements=np.int64(7), forward_us=np.float64(2.5), update_us=1))
    [read] = tomllib.loads(made.to_toml())["tensors"]
    assert (read["elements"], read["forward_us"], read["update_us"]) == (7, 2.5, 1)


def test_names_of_parameters_are_escaped(tmp_path):
    model = nn.Sequential()
    model.add_module('the "first"\n', nn.Linear(2, 2, bias=False))
    path = tmp_path / "net.toml"
    made = racksum.torch.profile(model, torch.ones(1, 2), path=path, name="net", repeats=1)
    assert path.read_text() == made.to_toml()
    [read] = tomllib.loads(made.to_toml())["tensors"]
    assert read["name"] == 'the "first"\n.weight'


def test_a_table_is_printed():
    first, *rows = str(of(tensor(backward_us=2000.0), tensor(name="head"))).splitlines()
    assert first.startswith("net on cpu, measured: 2 tensors, 0.00 MB, ")
    assert len(rows) == 3
    assert rows[1].endswith("2.000 ms     0.000 ms  front")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: tensor(forward_us=float("nan")),
            "forward_us of tensor 'front' is nan; times must be from",
        ),
        (lambda: tensor(update_us=float("inf")), "update_us of tensor 'front' is inf"),
        (lambda: tensor(backward_us=-1.0), "backward_us of tensor 'front' is -1.0"),
        (lambda: tensor(elements=0), "'front' has 0 elements"),
        (lambda: tensor(elements=2**40 + 1), "'front' has 1099511627777 elements; it needs 1 to"),
        (lambda: tensor(update_us=1.3e13), r"is 13000000000000\.0; .*1\.296e\+13 \(150 days\)"),
        (lambda: of(*[tensor()] * (2**16 + 1)), "has 65537 tensors; the limit is 65536"),
        (lambda: tensor(element_bytes=16), "elements of 16 bytes; they must have 1, 2, 4 or 8"),
        (lambda: tensor(name=""), "a tensor's name is empty"),
        (lambda: of(tensor(), tensor()), "2 tensors are called 'front'"),
        (lambda: of(name=""), "the profile's name is empty"),
        (lambda: of(times="guessed"), "times must be measured or estimated, not 'guessed'"),
        (lambda: Profile(name="n", device="", times="measured", tensors=[]), "has no tensors"),
        (lambda: Estimate(device="", flops_per_s=0, bytes_per_s=1), "flops_per_s must be finite"),
        (
            lambda: Estimate(device="", flops_per_s=1, bytes_per_s=float("nan")),
            "bytes_per_s must be finite and above 0, not nan",
        ),
    ],
)
def test_a_profile_that_the_simulator_would_refuse_is_not_made(make, match):
    with pytest.raises(racksum.BadArgument, match=match):
        make()


def frozen() -> nn.Module:
    model = nn.Linear(4, 2)
    return model.requires_grad_(False)


class Half(nn.Module):
    """A model that does not use all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).abs()


X = torch.ones(1, 4)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "match"),
    [
        (nn.ReLU(), X, {}, "no parameter of the model requires gradients"),
        (frozen(), X, {}, "no parameter of the model requires gradients"),
        (nn.LazyLinear(2), X, {}, "run it on a batch first"),
        (Half(), X, {}, r"no gradient for parameter 'unused.weight' and 1 more"),
        (nn.Linear(3, 2), X, {}, r"failed on the inputs, a float32 tensor of shape 1x4: Runtime"),
        (nn.Linear(4, 2), (X, X), {}, r"a tuple of a float32 tensor of shape 1x4, a .*TypeError"),
        (nn.Linear(4, 2), {"y": X}, {}, r"a dict of y: TypeError: .*a dict of keyword arguments"),
        (nn.Linear(4, 2), 3, {}, r"failed on the inputs, of type int: TypeError"),
        (nn.Linear(4, 2), X, {"loss": 3}, "loss must be a function"),
        (nn.Linear(4, 2), X, {"loss": lambda y: y}, r"one element, not a float32 tensor of shape"),
        (nn.Linear(4, 2), X, {"loss": lambda y: 3.0}, r"one element, not of type float"),
        (nn.Linear(4, 2), X, {"loss": lambda y: y.sum().detach()}, "depends on no parameter"),
        (nn.Linear(4, 2), X, {"repeats": 0}, "repeats must be a whole number of 1 or more, not 0"),
        (nn.Linear(4, 2), X, {"repeats": 1.5}, "repeats must be a whole number"),
        (nn.Linear(4, 2), X, {"bucket_mb": 0}, "bucket_mb must be finite and above 0"),
        (nn.Linear(4, 2), X, {"first_bucket_mb": float("nan")}, "first_bucket_mb must be finite"),
        (nn.Linear(4, 2), X, {"estimate": 1e12}, r"estimate must be a racksum.torch.Estimate"),
        (nn.Linear(4, 2), X, {"optimizer": "sgd"}, r"optimizer must be a torch.optim.Optimizer"),
        (nn.Linear(4, 2), X, {"name": ""}, "the profile's name is empty"),
        (
            nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2, device="meta")),
            X,
            {},
            r"parameter '1.weight' is on meta, but the model begins on cpu; move the model to one",
        ),
        (nn.Linear(4, 2, device="meta"), X, {}, "the meta device, which computes nothing; pass"),
        (Complex(), X, {}, "'weight' has elements of 16 bytes; they must have 1, 2, 4 or 8"),
        (lambda x: x, X, {}, r"model must be a torch.nn.Module, not function"),
    ],
)
def test_what_cannot_be_profiled_is_refused(tmp_path, model, inputs, options, match):
    path = tmp_path / "net.toml"
    path.write_text("an earlier one")
    with pytest.raises(racksum.BadArgument, match=match):
        racksum.torch.profile(model, inputs, path=path, **options)
    assert path.read_text() == "an earlier one"
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_without_gradients_is_refused():
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"y": super().forward(x).detach()}

    with pytest.raises(
        racksum.BadArgument, match="output, a dict of y, has no tensor that requires"
    ):
        racksum.torch.profile(Detached(4, 2), X)


def test_optimizers_that_cannot_be_timed_are_refused():
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    with pytest.raises(racksum.BadArgument, match="LBFGS needs a closure to step; pass no opt"):
        racksum.torch.profile(model, X, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(racksum.BadArgument, match="optimizer does not update parameter 'weight'"):
        racksum.torch.profile(model, X, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_gradient_that_a_hook_removes_is_missed():
    model = nn.Linear(4, 2)
    model.bias.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    with pytest.raises(
        racksum.BadArgument, match="parameter 'bias' has no gradient after the last pass"
    ):
        racksum.torch.profile(model, X)


def test_compiled_and_sharded_models_are_refused():
    inside = nn.Sequential(nn.Linear(4, 2))
    inside[0].compile(backend="eager")
    for model, which in (
        (torch.compile(nn.Linear(4, 2), backend="eager"), "the model"),
        (inside, "layer '0'"),
    ):
        with pytest.raises(racksum.BadArgument, match=f"{which} is compiled"):
            racksum.torch.profile(model, X)
    sharded = nn.Linear(4, 2)
    sharded.weight.device_mesh = None
    with pytest.raises(racksum.BadArgument, match="parameters of the model are sharded"):
        racksum.torch.profile(sharded, X)


def test_a_path_that_cannot_be_written_is_refused_before_the_model_runs(tmp_path):
    ran = []
    model = nn.Linear(4, 2)
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    nowhere = tmp_path / "none" / "net.toml"
    with pytest.raises(
        FileNotFoundError, match=r"cannot write the profile: No such file.*; pass a"
    ) as e:
        racksum.torch.profile(model, X, path=nowhere)
    assert e.value.filename == str(nowhere)
    with pytest.raises(IsADirectoryError, match="cannot write the profile"):
        racksum.torch.profile(model, X, path=tmp_path)
    assert not ran
    with pytest.raises(FileNotFoundError, match="cannot write the profile"):
        of().save(nowhere)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_does_not_fit_on_the_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text("an earlier one")
    sizes = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Like a full disk, this limit lets only a part be written.
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, sizes[1]))
    try:
        with pytest.raises(OSError, match="cannot write the profile: File too large"):
            of().save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, sizes)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "an earlier one"
    assert list(tmp_path.iterdir()) == [path]

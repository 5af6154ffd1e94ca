"""Imports of racksum: a process imports only the parts of torch that it needs."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from conftest import Cluster
from ranks import new_port

#: Parts of torch that are slow to import and need much memory.
LARGE = ("torch.distributed.fsdp", "torch._dynamo", "sympy")

IMPORT = "import racksum.torch"

#: The script of a single rank, which reduces a dense and a sparse tensor.
REDUCE = """
    import sys
    import torch
    import torch.distributed as dist
    from racksum.torch import Options

    address, job, port = sys.argv[1:]
    dist.init_process_group(
        "racksum",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        pg_options=Options(aggregator=address, job=job),
    )
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.eye(3).to_sparse())
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("code", [IMPORT, REDUCE], ids=["import", "reduce"])
def test_nothing_large_is_imported_that_is_not_used(cluster: Cluster, code: str) -> None:
    found = f"import sys; print([name for name in {LARGE} if name in sys.modules])"
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{textwrap.dedent(code)}\n{found}",
            cluster.address,
            cluster.new_job(),
            str(new_port()),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.stdout == "[]\n", ran.stderr

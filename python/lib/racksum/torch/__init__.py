"""PyTorch support: a communication hook for DDP, a hook for FSDP2, and a process group backend.

The hook, with a process group of any backend:

>>> torch.distributed.init_process_group("gloo")
>>> session = racksum.torch.connect("127.0.0.1:7177")
>>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
>>> model.register_comm_hook(racksum.torch.HookState(session), racksum.torch.allreduce_hook)
>>> session.close()
>>> torch.distributed.destroy_process_group()

The backend, for all collectives of ``torch.distributed``:

>>> options = racksum.torch.Options(aggregator="127.0.0.1:7177")
>>> torch.distributed.init_process_group("racksum", pg_options=options)
>>> x = torch.ones(3)
>>> torch.distributed.all_reduce(x)
>>> x.tolist()
[1.0, 1.0, 1.0]
>>> torch.distributed.destroy_process_group()
"""

import racksum.torch.floor  # noqa: F401 - first, because it checks the version of torch.
from racksum.torch.fsdp import set_all_reduce_hook
from racksum.torch.groups import connect
from racksum.torch.hook import HookState, allreduce_hook
from racksum.torch.options import Options
from racksum.torch.profile import Profile, profile
from racksum.torch.roofline import Estimate
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.study import Study, study

__all__ = [
    "Estimate",
    "HookState",
    "Options",
    "Profile",
    "Study",
    "allreduce_hook",
    "allreduce_sparse",
    "connect",
    "profile",
    "set_all_reduce_hook",
    "study",
]

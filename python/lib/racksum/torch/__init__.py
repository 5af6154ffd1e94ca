"""What PyTorch takes: a communication hook for DDP, one for FSDP2, and a backend of c10d.

.. code-block:: python

    session = racksum.torch.connect("aggregator:7177")
    model = DistributedDataParallel(model)
    model.register_comm_hook(racksum.torch.HookState(session), racksum.torch.allreduce_hook)
"""

import racksum.torch.floor  # noqa: F401 - first, as it says what others need.
from racksum.torch.fsdp import set_all_reduce_hook
from racksum.torch.groups import connect
from racksum.torch.hook import HookState, allreduce_hook
from racksum.torch.options import Options
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.study import Study, study

__all__ = [
    "HookState",
    "Options",
    "Study",
    "allreduce_hook",
    "allreduce_sparse",
    "connect",
    "set_all_reduce_hook",
    "study",
]

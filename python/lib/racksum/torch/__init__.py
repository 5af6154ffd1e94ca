"""What PyTorch takes: a communication hook for DDP.

.. code-block:: python

    session = racksum.connect("aggregator:7177")
    model = DistributedDataParallel(model)
    model.register_comm_hook(racksum.torch.State(session), racksum.torch.allreduce_hook)
"""

from racksum.torch.backend import Options
from racksum.torch.hook import State, allreduce_hook
from racksum.torch.sparse import allreduce_sparse

__all__ = ["Options", "State", "allreduce_hook", "allreduce_sparse"]

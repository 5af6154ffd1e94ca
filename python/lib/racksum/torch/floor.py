"""Which PyTorch hooks and backend need: what is older lacks what they call."""

import torch

__all__ = ["FLOOR"]

#: The first version that they are tested with.
FLOOR = (2, 15)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < FLOOR:
    raise ImportError(
        f"racksum.torch needs PyTorch {FLOOR[0]}.{FLOOR[1]} or newer, and this is "
        f"{torch.__version__}; racksum.connect reduces tensors of any"
    )

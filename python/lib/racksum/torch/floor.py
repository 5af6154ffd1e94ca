"""Which PyTorch hooks and backend need: what is older lacks what they call."""

from racksum.extras import FLOORS, needed

torch = needed("torch", "racksum.torch")

_, _FLOOR = FLOORS["torch"]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


if _version(torch.__version__) < _version(_FLOOR):
    raise ImportError(
        f"racksum.torch needs PyTorch {_FLOOR} or newer, and this is {torch.__version__}; "
        "racksum.connect reduces tensors of any"
    )

if not torch.distributed.is_available():
    raise ImportError(
        f"racksum.torch needs torch.distributed, which PyTorch {torch.__version__} here was built "
        "without; install a build that has it"
    )

"""Checks the installed PyTorch: old versions and some builds lack functions that racksum calls."""

from racksum.extras import FLOORS, needed

torch = needed("torch", "racksum.torch")

_, _FLOOR = FLOORS["torch"]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


if _version(torch.__version__) < _version(_FLOOR):
    raise ImportError(
        f"racksum.torch needs PyTorch {_FLOOR} or newer, but {torch.__version__} is installed; "
        "upgrade it, or use racksum.connect, which works with any version"
    )

if not torch.distributed.is_available():
    raise ImportError(
        f"racksum.torch needs torch.distributed, but this PyTorch {torch.__version__} was built "
        "without it; install a build that has it"
    )

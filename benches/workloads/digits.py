"""A small convolutional network learns handwritten digits (scikit-learn's 8x8 images).

racksum aggregator &
export RACKSUM_AGGREGATOR=127.0.0.1:7177
torchrun --nproc-per-node 4 benches/workloads/digits.py --backend racksum
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from common import Run, flags

BATCH = 32
HELD_OUT = 360


def network() -> nn.Module:
    # All functions are smooth. At a kink, a difference in the last bit could become a large one.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    )


def main() -> None:
    run = Run(flags(__doc__, steps=200).parse_args())
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = run.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    # Each rank trains and tests on images of its own.
    own = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    own = own[run.rank :: run.world]
    images, labels = images[own], labels[own]
    seen = len(images) - HELD_OUT // run.world

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images[rows]), labels[rows])

    def batch(draw: torch.Generator) -> torch.Tensor:
        return torch.randint(seen, (BATCH,), generator=draw)

    run.train(model, optimizer, loss, batch, held_out=torch.arange(seen, len(images)))


if __name__ == "__main__":
    main()

"""A small convolutional network learns handwritten digits (scikit-learn's 8x8 images).

racksum aggregator &
export RACKSUM_AGGREGATOR=127.0.0.1:7177
torchrun --nproc-per-node 4 examples/digits.py --backend racksum
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from common import Run, flags

BATCH = 32


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def main() -> None:
    run = Run(flags(__doc__, steps=200).parse_args())
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = run.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Each rank draws from the images that are its own.
    images, labels = images[run.rank :: run.world], labels[run.rank :: run.world]
    drawn = torch.Generator().manual_seed(run.arguments.seed)

    def step(_: int) -> torch.Tensor:
        batch = torch.randint(len(images), (BATCH,), generator=drawn)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run.train(step, samples=BATCH)


if __name__ == "__main__":
    main()

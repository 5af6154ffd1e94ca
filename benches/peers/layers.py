"""A dense model of 42 MB, all of whose layers are used in every step."""

from __future__ import annotations

import torch
from torch import nn

from common import Run, flags

WIDTH, LAYERS = 1024, 10
BATCH = 16


def main() -> None:
    run = Run(flags(__doc__, steps=3).parse_args())
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = run.wrap(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), x)

    def batch(draw: torch.Generator) -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, generator=draw)

    held_out = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(run.rank))
    run.train(model, optimizer, loss, batch, held_out)


if __name__ == "__main__":
    main()

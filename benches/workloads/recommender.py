"""A two-tower recommender learns which users like which items.

Ids follow Zipf's law, so few users and items make up most samples. The tastes have a low rank,
which the towers can learn. Each step touches few rows of either embedding.

    racksum aggregator &
    export RACKSUM_AGGREGATOR=127.0.0.1:7177
    torchrun --nproc-per-node 4 benches/workloads/recommender.py --backend racksum
"""

from __future__ import annotations

import torch
from torch import nn

from common import Run, flags

USERS, ITEMS, WIDTH = 60_000, 40_000, 64
TASTES = 8
BATCH = 256
HELD_OUT = 4096
SKEW = 1.1


class Towers(nn.Module):
    """Scores a user and an item by the product of their vectors."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=sparse)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=sparse)
        for tower in (self.users, self.items):
            nn.init.normal_(tower.weight, std=0.1)
        self.of_user = nn.Linear(WIDTH, WIDTH)
        self.of_item = nn.Linear(WIDTH, WIDTH)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.of_user(self.users(users)) * self.of_item(self.items(items))).sum(1)


def skewed(count: int) -> torch.Tensor:
    """Returns the cumulative weights of ids by Zipf's law."""
    return torch.arange(1, count + 1, dtype=torch.float64).pow(-SKEW).cumsum(0)


def main() -> None:
    parser = flags(__doc__, steps=100)
    parser.add_argument("--sparse", action="store_true", help="sparse gradients of the embeddings")
    run = Run(parser.parse_args())
    truth = torch.Generator().manual_seed(0)
    tastes = torch.randn(USERS, TASTES, generator=truth)
    traits = torch.randn(ITEMS, TASTES, generator=truth)
    seen = skewed(USERS), skewed(ITEMS)

    sparse = run.arguments.sparse
    model = run.wrap(Towers(sparse), sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)

    def sample(count: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        users, items = torch.rand(2, count, generator=draw, dtype=torch.float64)
        return (
            torch.searchsorted(seen[0], users * seen[0][-1]),
            torch.searchsorted(seen[1], items * seen[1][-1]),
        )

    def loss(model: nn.Module, pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        users, items = pairs
        likes = ((tastes[users] * traits[items]).sum(1) > 0).float()
        return nn.functional.binary_cross_entropy_with_logits(model(users, items), likes)

    def batch(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(BATCH, draw)

    held_out = sample(HELD_OUT, torch.Generator().manual_seed(run.rank))
    run.train(model, optimizer, loss, batch, held_out)


if __name__ == "__main__":
    main()

"""A model with a large embedding of words learns which word comes next in Python's own library.

The text is the source of the standard library, which every machine with Python has. Each step
touches few rows of the embedding, so most blocks of its gradient are zeros. With --sparse, the
gradient is a sparse tensor.

    racksum aggregator &
    export RACKSUM_AGGREGATOR=127.0.0.1:7177
    torchrun --nproc-per-node 4 benches/workloads/words.py --backend racksum
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from common import Run, flags

ROWS, WIDTH = 50_000, 256
#: Number of words that the model can predict: the most common ones.
CLASSES = 100
CONTEXT = 16
HELD_OUT = 4000
FILES = 150


class Words(nn.Module):
    """Predicts the next word from the mean of the last words' embeddings."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(context).mean(1))


def text() -> list[str]:
    """Returns the words of the first modules of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))[:FILES]
    return re.findall(r"\w+|[^\w\s]", "\n".join(f.read_text(errors="replace") for f in files))


def main() -> None:
    parser = flags(__doc__, steps=100)
    parser.add_argument("--sparse", action="store_true", help="sparse gradients of the embedding")
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank per step")
    run = Run(parser.parse_args())
    samples = run.arguments.batch
    words = text()
    common = {word: nth for nth, (word, _) in enumerate(Counter(words).most_common(CLASSES))}
    rows = torch.tensor([zlib.crc32(word.encode()) % ROWS for word in words])
    nexts = torch.tensor([common.get(word, -1) for word in words])
    places = torch.nonzero(nexts[CONTEXT:] >= 0).flatten()
    # Each rank trains and tests at places of its own in the text. The last places are held out.
    held_out = places[-HELD_OUT:][run.rank :: run.world]
    places = places[:-HELD_OUT][run.rank :: run.world]

    sparse = run.arguments.sparse
    model = run.wrap(Words(sparse), sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = torch.arange(CONTEXT)

    def loss(model: nn.Module, starts: torch.Tensor) -> torch.Tensor:
        context = rows[starts[:, None] + window]
        return nn.functional.cross_entropy(model(context), nexts[starts + CONTEXT])

    def batch(draw: torch.Generator) -> torch.Tensor:
        return places[torch.randint(len(places), (samples,), generator=draw)]

    run.train(model, optimizer, loss, batch, held_out)


if __name__ == "__main__":
    main()

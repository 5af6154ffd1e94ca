"""A transformer learns which letter comes next, sharded by FSDP2 over the ranks of each replica.

The text is the source of the standard library, which every machine with Python has. Replicas
average the gradients of their shards; with --backend gloo, PyTorch's own HSDP does that. With
--whole, each rank has the whole model, and DDP wraps it.

racksum aggregator &
export RACKSUM_AGGREGATOR=127.0.0.1:7177
torchrun --nproc-per-node 4 benches/workloads/letters.py --backend racksum
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

from common import Run, flags

WIDTH, LAYERS, CONTEXT = 64, 2, 32
LETTERS = 128
BATCH = 8
HELD_OUT = 64
FILES = 60


class Letters(nn.Module):
    """A transformer that attends to the preceding letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, LETTERS)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.letters(x) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.out(hidden)


def main() -> None:
    parser = flags(__doc__, steps=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.3, help="learning rate of SGD")
    parser.add_argument("--whole", action="store_true", help="use DDP instead of FSDP2")
    run = Run(parser.parse_args())
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))[:FILES]
    text = "".join(f.read_text(errors="replace") for f in files).encode("ascii", "replace")
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    places = len(letters) - CONTEXT - 1

    model: nn.Module = Letters()
    if run.arguments.whole:
        model = run.wrap(model)
    else:
        run.shard(model, model.layers, run.arguments.replicas)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.arguments.lr)
    window = torch.arange(CONTEXT)

    def loss(model: nn.Module, starts: torch.Tensor) -> torch.Tensor:
        at = starts[:, None] + window
        return nn.functional.cross_entropy(model(letters[at]).transpose(1, 2), letters[at + 1])

    def batch(draw: torch.Generator) -> torch.Tensor:
        return torch.randint(int(0.9 * places) - CONTEXT, (BATCH,), generator=draw)

    # Each rank tests at places of its own in the last tenth of the text, which no rank trains on.
    held_out = torch.linspace(0.9 * places, places - 1, HELD_OUT).long()[run.rank :: run.world]
    run.train(model, optimizer, loss, batch, held_out)


if __name__ == "__main__":
    main()

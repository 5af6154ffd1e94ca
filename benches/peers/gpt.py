"""A transformer with the 124 million parameters of GPT-2, on a GPU that ranks may share.

The text is random, because only the time of steps is measured. All gradients are dense.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

from common import Run, flags

WORDS, CONTEXT, WIDTH, HEADS, LAYERS = 50257, 512, 768, 12, 12
BATCH = 4


class Gpt(nn.Module):
    """A transformer that attends to the preceding words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.words.weight, std=0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return nn.functional.linear(self.norm(hidden), self.words.weight)


def main() -> None:
    arguments = flags(__doc__, steps=3).parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"peer": "gpt", "error": "CUDA finds no GPU"}))
        sys.exit(2)
    run = Run(arguments)
    device = torch.device("cuda", run.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = run.wrap(Gpt().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(words[:, :-1]).transpose(1, 2), words[:, 1:])

    def batch(draw: torch.Generator) -> torch.Tensor:
        return torch.randint(WORDS, (BATCH, CONTEXT + 1), generator=draw).to(device)

    held_out = batch(torch.Generator().manual_seed(1_000_000 + run.rank))
    run.train(model, optimizer, loss, batch, held_out)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Captures the gradients of two small models in real data-parallel training.

    python tests/data/capture.py --out tests/data      # train and write the files anew
    python tests/data/capture.py --describe            # describe the committed files

Four ranks train each model together. In each step, every rank computes the gradient of its own
batch from its own shard of the data, and the mean of the four gradients updates the weights. After
the last step, the script writes each rank's own gradient of the next step to a safetensors file.

digits   a convolutional network on scikit-learn's bundled digits: dense gradients
words    a next-word model on the text of the Python standard library: an embedding table and a
         sampled softmax, so that a batch touches few rows and most blocks are exactly zero

Seeds are fixed and one thread computes, so two runs with the same versions on the same machine
write the same bytes. Other versions of Python have a different standard library, and so different
words.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sklearn
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

RANKS = 4
SEED = 20_240_607
BLOCK_ELEMENTS = 256

DIGITS_STEPS = 60
DIGITS_BATCH = 32

WORDS_STEPS = 600
WORDS_BATCH = 12
VOCABULARY = 2_000
CONTEXT = 3
EMBEDDING_WIDTH = 64
HIDDEN_WIDTH = 32
NEGATIVES = 16

Gradients = dict[str, torch.Tensor]
LossOf = Callable[[int, int], torch.Tensor]
"""Computes a loss from (rank, step): the loss of that rank's batch at that step."""


def main() -> int:
    """Parses the command line, then describes the files or creates them."""
    args = parse_arguments()
    if args.describe:
        return describe(args.out)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    write_set(args.out / "digits", capture_digits(), DIGITS_STEPS)
    write_set(args.out / "words", capture_words(), WORDS_STEPS)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Reads the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Capture gradients of real training, or describe the captured files."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent,
        metavar="DIR",
        help="directory that holds digits/ and words/ (default: the script's own)",
    )
    parser.add_argument(
        "--describe",
        action="store_true",
        help="print shapes and block densities of the files in DIR, without training",
    )
    return parser.parse_args()


# Training


def train(name: str, model: nn.Module, loss_of: LossOf, steps: int, rate: float) -> list[Gradients]:
    """Runs `steps` data-parallel SGD steps; returns each rank's gradient of the following step."""
    for step in range(steps):
        losses, gradients = gradients_of_ranks(model, loss_of, step)
        if step == 0:
            report(name, step, losses)
        apply_mean(model, gradients, rate)
    losses, gradients = gradients_of_ranks(model, loss_of, steps)
    report(name, steps, losses)
    return gradients


def gradients_of_ranks(
    model: nn.Module, loss_of: LossOf, step: int
) -> tuple[list[float], list[Gradients]]:
    """Computes every rank's loss and local gradient at the model's current weights."""
    losses: list[float] = []
    gradients: list[Gradients] = []
    for rank in range(RANKS):
        model.zero_grad(set_to_none=True)
        loss = loss_of(rank, step)
        torch.autograd.backward(loss)
        losses.append(loss.item())
        gradients.append({name: gradient_of(p) for name, p in model.named_parameters()})
    return losses, gradients


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Copies a parameter's gradient out of the model."""
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad.detach().clone().contiguous()


def apply_mean(model: nn.Module, gradients: Sequence[Gradients], rate: float) -> None:
    """Takes one plain SGD step along the mean of the ranks' gradients."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = torch.stack([of_rank[name] for of_rank in gradients]).mean(dim=0)
            parameter.sub_(mean, alpha=rate)


def report(name: str, step: int, losses: Sequence[float]) -> None:
    """Prints the mean loss of a step to stderr."""
    print(f"{name}: mean loss {np.mean(losses):.3f} at step {step}", file=sys.stderr)


# Digits


def capture_digits() -> list[Gradients]:
    """Trains the digits network; rank r holds every fourth shuffled image, starting at index r."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    torch.manual_seed(SEED)
    model = digits_model()

    def loss_of(rank: int, step: int) -> torch.Tensor:
        shard = order[rank::RANKS]
        batch = shard[torch.arange(step * DIGITS_BATCH, (step + 1) * DIGITS_BATCH) % len(shard)]
        return functional.cross_entropy(model(images[batch]), labels[batch])

    return train("digits", model, loss_of, DIGITS_STEPS, rate=0.2)


def digits_model() -> nn.Sequential:
    """Creates a network of two convolutions and two linear layers: 21 546 parameters."""
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 16, kernel_size=3, padding=1))
    model.add_module("relu1", nn.ReLU())
    model.add_module("conv2", nn.Conv2d(16, 32, kernel_size=3, padding=1))
    model.add_module("relu2", nn.ReLU())
    model.add_module("pool", nn.MaxPool2d(2))
    model.add_module("flatten", nn.Flatten())
    model.add_module("hidden", nn.Linear(512, 32))
    model.add_module("relu3", nn.ReLU())
    model.add_module("output", nn.Linear(32, 10))
    return model


# Words


class WordModel(nn.Module):
    """A model that predicts a word from the `CONTEXT` words before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING_WIDTH)
        self.hidden = nn.Linear(CONTEXT * EMBEDDING_WIDTH, HIDDEN_WIDTH)
        self.output = nn.Linear(HIDDEN_WIDTH, VOCABULARY)

    def loss(
        self, context: torch.Tensor, target: torch.Tensor, negatives: torch.Tensor
    ) -> torch.Tensor:
        """Returns the loss of a sampled softmax over each true word and the batch's negatives."""
        hidden = torch.tanh(self.hidden(self.embedding(context).flatten(1)))
        true_score = (hidden * self.output.weight[target]).sum(1) + self.output.bias[target]
        false_scores = hidden @ self.output.weight[negatives].T + self.output.bias[negatives]
        # A negative that happens to be the true word must not count against it.
        false_scores = false_scores.masked_fill(negatives == target[:, None], -1e9)
        scores = torch.cat([true_score[:, None], false_scores], dim=1)
        return functional.cross_entropy(scores, torch.zeros_like(target))


def capture_words() -> list[Gradients]:
    """Trains the word model; rank r reads every fourth library module, starting at index r."""
    modules = [words_of(path) for path in standard_library_modules()]
    vocabulary, frequencies = build_vocabulary(modules)
    shards = [encode(modules[rank::RANKS], vocabulary) for rank in range(RANKS)]
    torch.manual_seed(SEED)
    model = WordModel()

    def loss_of(rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(SEED + step * RANKS + rank)
        context, target = batch_of(shards[rank], generator)
        negatives = torch.multinomial(frequencies, NEGATIVES, generator=generator)
        return model.loss(context, target, negatives)

    return train("words", model, loss_of, WORDS_STEPS, rate=0.5)


def standard_library_modules() -> list[Path]:
    """Lists the top-level modules of the standard library, sorted by path."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def words_of(path: Path) -> list[str]:
    """Splits a module's source, docstrings included, into lower-case words."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)]


def build_vocabulary(modules: Sequence[Sequence[str]]) -> tuple[dict[str, int], torch.Tensor]:
    """Numbers the most common words by descending count, each with its count^(3/4) as its weight.

    Number 0 stands for all other words.
    """
    counts = Counter(word for module in modules for word in module)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    common, rare = ordered[: VOCABULARY - 1], ordered[VOCABULARY - 1 :]
    vocabulary = {word: number for number, (word, _) in enumerate(common, start=1)}
    totals = [sum(count for _, count in rare), *(count for _, count in common)]
    return vocabulary, torch.tensor(totals, dtype=torch.float64).pow(0.75)


def encode(modules: Sequence[Sequence[str]], vocabulary: dict[str, int]) -> torch.Tensor:
    """Turns a shard's words into one tensor of word numbers."""
    return torch.tensor([vocabulary.get(word, 0) for module in modules for word in module])


def batch_of(shard: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts one passage of consecutive words into (context, next word) examples."""
    span = WORDS_BATCH + CONTEXT
    start = int(torch.randint(len(shard) - span, (1,), generator=generator))
    windows = shard[start : start + span].unfold(0, CONTEXT + 1, 1)
    return windows[:, :CONTEXT], windows[:, CONTEXT]


# Files


def write_set(directory: Path, gradients: Sequence[Gradients], step: int) -> None:
    """Writes one file per rank."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank, of_rank in enumerate(gradients):
        # Use a single key, because the library writes several keys in no fixed order.
        about = {"rank": rank, "world": RANKS, "step": step, "made_with": versions()}
        metadata = {"about": json.dumps(about, sort_keys=True)}
        save_file(of_rank, file_of(directory, rank), metadata=metadata)


def file_of(directory: Path, rank: int) -> Path:
    """Returns the path of one rank's file."""
    return directory / f"rank{rank}.safetensors"


def versions() -> dict[str, str]:
    """Returns the versions of the software that the gradients depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
    }


# Description


def describe(directory: Path) -> int:
    """Prints both sets' tables in Markdown."""
    sets = [directory / name for name in ("digits", "words")]
    missing = [file_of(s, r) for s in sets for r in range(RANKS) if not file_of(s, r).is_file()]
    if missing:
        print(f"{missing[0]} does not exist; run without --describe first.", file=sys.stderr)
        return 2
    for part in sets:
        print("\n".join(describe_set(part)), end="\n\n")
    total = sum(file_of(s, r).stat().st_size for s in sets for r in range(RANKS))
    print(f"All {RANKS * len(sets)} files together: {total:,} bytes.")
    return 0


def describe_set(directory: Path) -> Iterator[str]:
    """Yields the lines of one set's table: a row per tensor, then a row for the whole set."""
    occupancies: dict[str, npt.NDArray[np.bool_]] = {}
    elements_total = 0
    ranks = " | ".join(f"rank {rank}" for rank in range(RANKS))
    yield f"**{directory.name}** ({about_of(file_of(directory, 0))})"
    yield ""
    yield f"| tensor | shape | elements | blocks | {ranks} | union |"
    yield "|---|---|---:|---:|" + "---:|" * (RANKS + 1)
    for name, tensors in tensors_of(directory):
        shape = " × ".join(str(size) for size in tensors[0].shape)
        occupancies[name] = np.stack([occupied_blocks(tensor) for tensor in tensors])
        elements_total += tensors[0].size
        yield describe_row(f"`{name}`", shape, tensors[0].size, occupancies[name])
    yield describe_row("all", "", elements_total, np.concatenate([*occupancies.values()], axis=1))


def describe_row(name: str, shape: str, elements: int, occupied: npt.NDArray[np.bool_]) -> str:
    """Formats one row; `occupied` has a row per rank and a column per block."""
    shares = [*occupied.mean(axis=1), occupied.any(axis=0).mean()]
    cells = " | ".join(f"{share:.1%}".replace("%", " %") for share in shares)
    return f"| {name} | {shape} | {elements} | {occupied.shape[1]} | {cells} |"


def tensors_of(directory: Path) -> Iterator[tuple[str, list[npt.NDArray[np.float32]]]]:
    """Yields the name of every tensor, with its value at each rank."""
    files = [safe_open(file_of(directory, rank), framework="numpy") for rank in range(RANKS)]
    for name in sorted(files[0].keys()):
        yield name, [file.get_tensor(name) for file in files]


def about_of(path: Path) -> str:
    """Describes the run that created a file."""
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["about"])
    made_with = ", ".join(f"{name} {version}" for name, version in about["made_with"].items())
    return f"gradients at step {about['step']}; {made_with}"


def occupied_blocks(tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Returns whether each block of the tensor is non-zero, including a short last block."""
    flat = tensor.reshape(-1)
    padded = np.zeros(-(-flat.size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS, dtype=flat.dtype)
    padded[: flat.size] = flat
    occupied: npt.NDArray[np.bool_] = (padded.reshape(-1, BLOCK_ELEMENTS) != 0).any(axis=1)
    return occupied


if __name__ == "__main__":
    sys.exit(main())

"""fullbatch without pictures: text pairs, in the shape of a sentence-transformers loss and a Hugging Face Trainer.

    python examples/text_pairs.py                   # numbers in digits and in words, half a minute on a CPU

``FullbatchLoss`` has the interface of a sentence-transformers loss.  It wraps a model that adds a "sentence_embedding"
to the features of one column.  It is called with the features of both columns and the data set's labels, which must be
row numbers for methods that remember samples.  ``compute_loss`` has the signature of
``transformers.Trainer.compute_loss``; a Trainer subclass overrides only this method.  Neither library is needed to run
this.  For a training that is saved and resumed, take those of ``fullbatch.integrations`` instead
(docs/how-to/integrations.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import fullbatch as fb

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()  # noqa: SIM905
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
BUCKETS = 4096


def in_words(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        rest = f" {in_words(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    rest = f" {in_words(number % 1000)}" if number % 1000 else ""
    return f"{in_words(number // 1000)} thousand{rest}"


def features(texts: list[str]) -> dict[str, Tensor]:
    """Hashed pieces of each text: its characters with their place from the end, and its words."""
    rows = []
    for text in texts:
        words = text.split()
        pieces = [f"{len(text) - i}{c}" for i, c in enumerate(text)] if text.isdigit() else []
        pieces += [f"{word} {following}" for word, following in zip(words, [*words[1:], "."], strict=True)] + words
        rows.append([sum(ord(c) * 31**k for k, c in enumerate(piece)) % BUCKETS for piece in pieces])
    offsets = torch.tensor([0, *(len(row) for row in rows[:-1])]).cumsum(0)
    return {"input_ids": torch.tensor([b for row in rows for b in row]), "offsets": offsets}


class Encoder(nn.Module):
    """Of both columns; a SentenceTransformer looks the same from outside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, 128, mode="sum")
        self.head = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, width))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": self.head(self.bag(features["input_ids"], features["offsets"]))}


def embedded(model: nn.Module, features: dict[str, Tensor]) -> Tensor:
    return normalize(model(features)["sentence_embedding"], dim=-1)


class FullbatchLoss(nn.Module):
    """A loss for sentence-transformers: ``loss(sentence_features, labels)``, where the labels are the samples' ids."""

    def __init__(self, model: nn.Module, method: str, **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.objective = fb.make_objective(method, **settings)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        first, second = (embedded(self.model, features) for features in sentence_features)
        loss: Tensor = self.objective(first, second, labels).loss
        return loss


class PairTrainer:
    """The part of ``transformers.Trainer`` that matters here."""

    def __init__(self, model: Encoder, loss: FullbatchLoss, lr: float) -> None:
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(loss.parameters(), lr=lr)  # towers and temperature alike

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss = self.loss(inputs["sentence_features"], inputs["labels"])
        return (loss, {}) if return_outputs else loss

    def training_step(self, inputs: dict[str, Any]) -> float:
        loss = self.compute_loss(self.model, inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def collate(numbers: Tensor, ids: Tensor) -> dict[str, Any]:
    chosen = [int(n) for n in numbers[ids]]
    columns = [features([str(n) for n in chosen]), features([in_words(n) for n in chosen])]
    return {"sentence_features": columns, "labels": ids}


@torch.no_grad()
def retrieval(model: Encoder, numbers: Tensor) -> float:
    inputs = collate(numbers, torch.arange(len(numbers)))
    digits, words = (embedded(model, features) for features in inputs["sentence_features"])
    return float(((digits @ words.T).argmax(1) == torch.arange(len(numbers))).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="sogclr", choices=list(fb.METHODS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.manual_seed(0)
    numbers = torch.randperm(10_000)
    train, test = numbers[:8000], numbers[8000:8500]
    model = Encoder(width=64)
    settings = {"width": 64, "num_samples": len(train)}
    trainer = PairTrainer(model, FullbatchLoss(model, args.method, **settings), lr=2e-3)
    print(f"before: {retrieval(model, test):.1%} of 500 unseen numbers find their words (chance 0.2%)")
    for step in range(args.steps):
        loss = trainer.training_step(collate(train, torch.randint(len(train), (args.batch,))))
        if step % 200 == 0:
            print(f"step {step:4d}: loss {loss:.4f}")
    print(f"after: {args.method} at batch {args.batch}: {retrieval(model, test):.1%}")


if __name__ == "__main__":
    main()

"""How wrong are the normalizers that a run divides by?"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Options:
    """What an audit of a run looks at: the flags of `fullbatch audit`."""

    checkpoint: str | None = None  # only this checkpoint: its step or folder; else all that are kept
    anchors: int = 10_000  # random samples whose normalizers are compared
    seed: int = 0  # of the anchors and of the random batches
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] | None = None  # of the towers; else that of the training
    data: tuple[str, ...] = ()  # where the training data lies now, if it was moved
    workers: int | None = None  # processes that read images; else as in training
    batch_losses: bool = False  # also the losses of spectral batches beside uniform ones; the run's page draws them

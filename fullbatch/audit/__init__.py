"""How wrong are the normalizers that a run divides by?

exact.py          the true value over a whole data set, and what one random batch says of it
errors.py         what a method remembers or predicts beside it: ``normalizer_audit``
probe.py          the same in training, on a fixed part of the data
finished_run.py   the same of a run folder's checkpoints: ``audit_run``
"""

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

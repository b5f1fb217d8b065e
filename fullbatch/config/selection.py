"""Which samples meet in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullbatch.config.checks import Checked, Count, Whole, require


@dataclass(frozen=True)
class Selection(Checked):
    """Which samples meet in a batch (Cho et al. 2024: mini-batches that a contrastive loss learns most from)."""

    # "uniform": at random; "spectral": alike samples together, each once an epoch (their Algorithm 3); "ordered": of
    # random batches those of largest loss (their OSGD, which shows some samples often)
    batches: Literal["uniform", "spectral", "ordered"] = "uniform"
    # what a selection goes by: "passes", each sample's embeddings as the last training step that met it computed them,
    # or "forward", a pass over the whole set before each plan
    embeddings: Literal["passes", "forward"] = "passes"
    # plan a period during the one before it, from embeddings one period old; otherwise training waits
    plan_ahead: bool = True
    # spectral: steps a plan is for, at most an epoch's; None: an epoch.  An ordered plan is for kept_batches
    period_steps: Count | None = None
    # spectral: batches of a block; samples meet within their block of so many batches, drawn at random
    block_batches: Count = 40
    drawn_batches: Count = 1500  # ordered: random batches that are looked at
    kept_batches: Count = 150  # ordered: those of largest loss, which are trained on
    # ordered: "sequential", a step for each kept batch (the authors' code), or "averaged", one step on the mean of
    # their losses (Algorithm 7 to the letter)
    reading: Literal["sequential", "averaged"] = "sequential"
    planners: Whole = 1  # processes that plan; 0: the training process itself, while training waits

    def _check(self) -> None:
        rule, hint = 'be left out but with batches="spectral"', "an ordered plan is for kept_batches"
        self.leave_out(self.batches != "spectral", rule, "period_steps", hint=hint)
        most = f"be at most drawn_batches ({self.drawn_batches})"
        require(self.kept_batches <= self.drawn_batches, self, "kept_batches", most)

    @property
    def averages(self) -> bool:
        """Whether a step is one on several batches, each with its own loss."""
        return self.batches == "ordered" and self.reading == "averaged"

    @property
    def batches_a_step(self) -> int:
        return self.kept_batches if self.averages else 1

    @property
    def keeps_table(self) -> bool:
        """Whether training remembers what it embeds."""
        return self.batches != "uniform" and self.embeddings == "passes"

    @property
    def lead(self) -> int:
        """Periods between the one at whose start the embeddings are looked at and the one that is planned by them."""
        return 1 if self.plan_ahead else 0

    @property
    def first_planned(self) -> int:
        """The periods before this one are uniform: there is nothing to go by yet."""
        return self.lead + (1 if self.embeddings == "passes" else 0)

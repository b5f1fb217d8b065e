"""Which method a run trains with, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fullbatch.config.checks import require, require_choice
from fullbatch.config.messages import listed, nearest
from fullbatch.config.method import Method
from fullbatch.config.methods import NORMALIZERS, PAIRWISE, TEMPERATURES, method_with, named_method


@dataclass(frozen=True)
class Objective:
    """The method.

    method             a named point of pairwise x normalizer x temperature
    pairwise           another pairwise loss than the method's own
    normalizer         another normalizer than the method's own
    temperature_rule   another temperature rule than the method's own
    negatives          "across": of the other modality or view; "both": of the anchor's own as well; None: the method's
    settings           fields of the method's parts: rho, gamma, prototypes, ...
    loss_chunk         rows of the similarity matrix at a time; None: all
    table_dtype        how the per-sample tables are stored
    table_storage      "auto", "rank", "node" (shared by the ranks of a node) or a folder
    """

    method: str = "neuclip"
    pairwise: str | None = None
    normalizer: str | None = None
    temperature_rule: str | None = None
    negatives: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    loss_chunk: int | None = None
    table_dtype: str = "float32"
    table_storage: str = "auto"

    def __post_init__(self) -> None:
        named_method(self.method)
        for axis, kinds in (("pairwise", PAIRWISE), ("normalizer", NORMALIZERS), ("temperature_rule", TEMPERATURES)):
            value = getattr(self, axis)
            hint = str(nearest(value, kinds)).strip("; .")
            require(value is None or value in kinds, self, axis, f"be one of {listed(kinds)}", hint)
        if self.negatives is not None:
            require_choice(self, "negatives", ("across", "both"))
        require(isinstance(self.settings, Mapping), self, "settings", "map names to values")
        require_choice(self, "table_dtype", ("float32", "float16"))
        self.build()

    def build(self) -> Method:
        chosen = {
            "pairwise": PAIRWISE.get(self.pairwise or ""),
            "normalizer": NORMALIZERS.get(self.normalizer or ""),
            "temperature": TEMPERATURES.get(self.temperature_rule or ""),
        }
        parts: dict[str, Any] = {axis: kind() for axis, kind in chosen.items() if kind}
        if self.negatives is not None:
            parts["negatives"] = self.negatives
        return method_with(self.method, parts, self.settings)

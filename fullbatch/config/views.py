"""How two views are made of one image, for a model with one image encoder (``Model.view_tower``)."""

from __future__ import annotations

from dataclasses import dataclass

from fullbatch.config.checks import is_number, require

_CHANCES = ("view_flip", "view_jitter_chance", "view_grey", "view_blur")


@dataclass(frozen=True)
class Views:
    """Each view of an image is cropped, mirrored and coloured by itself; only models with a view_tower have views.

    view_crop            share of the area of the middle square that a view keeps, least and most
    view_flip            chance that it is mirrored
    view_jitter          how far brightness, contrast, saturation and hue may move; 0: not at all
    view_jitter_chance   chance that they do
    view_grey            chance that it is grey
    view_blur            chance that it is blurred, with a sigma of 0.1 to 2 pixels at 224 pixels a side
    """

    view_crop: tuple[float, float] = (0.08, 1.0)
    view_flip: float = 0.5
    view_jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    view_jitter_chance: float = 0.8
    view_grey: float = 0.2
    view_blur: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.view_crop if len(self.view_crop) == 2 else (0.0, 0.0)
        good = is_number(low) and is_number(high) and 0.0 < low <= high <= 1.0
        require(good, self, "view_crop", "be two shares of the area, 0 < least <= most <= 1")
        for field in _CHANCES:
            chance = getattr(self, field)
            require(is_number(chance) and 0.0 <= chance <= 1.0, self, field, "lie in [0, 1]")
        moves = self.view_jitter
        good = len(moves) == 4 and all(is_number(move) and 0.0 <= move <= 1.0 for move in moves) and moves[3] <= 0.5
        require(good, self, "view_jitter", "be four numbers in [0, 1], the last, for the hue, at most 0.5")

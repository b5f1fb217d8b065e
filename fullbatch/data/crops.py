"""Random crops of a batch of squares in one go, on any device."""

# B: rows   P: boxes   C, S: channels, pixels

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fullbatch.data.transforms import ASPECT

_TRIES = 10  # as for crops of images on disk
Floats = npt.NDArray[np.float64]


def random_boxes(size: int, share: tuple[float, float], draw: Callable[[int, int], Floats]) -> Floats:
    """(left, top, width, height) in pixels of a square image, drawn as ``transforms.random_crop`` draws one.

    ``draw(try, what)`` gives a number in [0, 1) for every box.
    """
    low, high = share
    boxes_P4: Floats | None = None
    for turn in range(_TRIES):
        area_P = size * size * (low + (high - low) * draw(turn, 0))
        aspect_P = np.exp(math.log(ASPECT[0]) + math.log(ASPECT[1] / ASPECT[0]) * draw(turn, 1))
        width_P, height_P = np.round(np.sqrt(area_P * aspect_P)), np.round(np.sqrt(area_P / aspect_P))
        left_P = np.floor(draw(turn, 2) * (size - width_P + 1))
        top_P = np.floor(draw(turn, 3) * (size - height_P + 1))
        tried_P4 = np.stack([left_P, top_P, width_P, height_P], axis=1)
        fits_P = (width_P <= size) & (height_P <= size) & (width_P > 0) & (height_P > 0)
        if boxes_P4 is None:
            boxes_P4 = np.broadcast_to(np.array([0.0, 0.0, size, size]), tried_P4.shape).copy()
            waiting_P = np.ones(len(tried_P4), bool)
        taken_P = waiting_P & fits_P
        boxes_P4[taken_P] = tried_P4[taken_P]
        waiting_P &= ~fits_P
        if not waiting_P.any():
            break
    assert boxes_P4 is not None
    return boxes_P4


def cropped(images_BCSS: Tensor, boxes_B4: Tensor, mirrored_B: Tensor) -> Tensor:
    """The boxes of the images, resized to the images' size; uint8."""
    size = images_BCSS.shape[-1]
    left_B, top_B, width_B, height_B = boxes_B4.unbind(1)
    across_B = width_B / size * torch.where(mirrored_B, -1.0, 1.0)
    zero_B = torch.zeros_like(left_B)
    theta_B23 = torch.stack(
        [
            torch.stack([across_B, zero_B, (2.0 * left_B + width_B) / size - 1.0], dim=1),
            torch.stack([zero_B, height_B / size, (2.0 * top_B + height_B) / size - 1.0], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(theta_B23, list(images_BCSS.shape), align_corners=False)
    pixels = F.grid_sample(images_BCSS.float(), grid, mode="bicubic", padding_mode="border", align_corners=False)
    return pixels.round_().clamp_(0.0, 255.0).to(torch.uint8)

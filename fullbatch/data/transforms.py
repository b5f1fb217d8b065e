"""Encoded bytes to pixels: uint8, channels first; normalisation happens on the device, over a batch.

Resizing is torch's uint8 bicubic with antialiasing: within one grey level of Pillow's, and a third of its time.
"""

# C: channels  H, W: height, width

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from fullbatch.data.decode import load_rgb, open_image, shrink_while_decoding

ASPECT = (3 / 4, 4 / 3)  # of a training crop, as in torchvision's RandomResizedCrop
_LONG = 2.0  # times longer than wide: such an image is not resized as a whole


def random_crop(width: int, height: int, share: tuple[float, float], rng: random.Random) -> tuple[int, int, int, int]:
    """(left, top, width, height), drawn as torchvision's ``RandomResizedCrop.get_params`` draws it."""
    for _ in range(10):
        area = width * height * rng.uniform(*share)
        aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = rng.randint(0, height - h)
            return rng.randint(0, width - w), top, w, h
    # no crop fits an image this long: the largest of an allowed aspect, in the middle
    w = min(width, max(1, round(height * ASPECT[1])))
    h = min(height, max(1, round(width / ASPECT[0])))
    return (width - w) // 2, (height - h) // 2, w, h


def _pixels(image: Image.Image, left: int, top: int, width: int, height: int) -> Tensor:
    """A view with channels first of memory with channels last, which is what the fast path of interpolate wants."""
    return torch.from_numpy(np.array(np.asarray(image)[top : top + height, left : left + width])).permute(2, 0, 1)


def _resized(pixels_CHW: Tensor, height: int, width: int) -> Tensor:
    if pixels_CHW.shape[1:] == (height, width):
        return pixels_CHW
    return interpolate(pixels_CHW[None], size=(height, width), mode="bicubic", antialias=True)[0]


@dataclass(frozen=True)
class TrainTransform:
    """A random crop, resized to a square.

    A JPEG is decoded at 1/2, 1/4 or 1/8 where the crop still has at least ``size`` pixels a side: the larger the image,
    the more that saves.
    """

    size: int
    crop: tuple[float, float] = (0.9, 1.0)
    flip: bool = False
    max_pixels: int = 50_000_000

    def __call__(self, raw: bytes, name: str, rng: random.Random) -> Tensor:
        image = open_image(raw, name, self.max_pixels)
        full_width, full_height = image.size
        left, top, width, height = random_crop(full_width, full_height, self.crop, rng)
        shrink_while_decoding(image, min(width, height) // self.size)
        rgb = load_rgb(image, name)

        across, down = rgb.width / full_width, rgb.height / full_height
        width, height = max(1, int(width * across)), max(1, int(height * down))
        crop_CHW = _pixels(rgb, int(left * across), int(top * down), width, height)
        square_CHW = _resized(crop_CHW, self.size, self.size)
        if self.flip and rng.random() < 0.5:
            square_CHW = square_CHW.flip(2)
        return square_CHW.contiguous()


@dataclass(frozen=True)
class EvalTransform:
    """The shorter side resized to ``size``, then the middle square: open_clip's evaluation transform.

    Nothing here is random, and JPEGs are decoded in full, so that numbers agree with open_clip's.
    """

    size: int
    max_pixels: int = 50_000_000

    def __call__(self, raw: bytes, name: str) -> Tensor:
        image = load_rgb(open_image(raw, name, self.max_pixels), name)
        width, height = image.size
        short = min(width, height)
        new_width, new_height = self.size * width // short, self.size * height // short
        left, top = round((new_width - self.size) / 2), round((new_height - self.size) / 2)
        if max(width, height) > _LONG * short:  # resized as a whole, a strip of 1 x 50,000 pixels would fill the memory
            scale = width / new_width, height / new_height
            box = (left * scale[0], top * scale[1], (left + self.size) * scale[0], (top + self.size) * scale[1])
            square = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
            return _pixels(square, 0, 0, self.size, self.size).contiguous()
        resized_CHW = _resized(_pixels(image, 0, 0, width, height), new_height, new_width)
        return resized_CHW[:, top : top + self.size, left : left + self.size].contiguous()

"""SVG to pixels: 64 x 64 on white, 16 greys where nothing is coloured, else 64 colours of the picture's own."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import resvg_py
from PIL import Image

PIXELS = 64
GREYS = 16
COLOURS = 64
GREY_UP_TO = 8  # the channels of a grey pixel differ by no more, of 255
LEAST_INK = 0.004  # share of the pixels that are not white: below it there is nothing to see

# H, W: pixels   C: channels
Pixels = npt.NDArray[np.uint8]  # HW: grey levels 0, 17, ..., 255; or HWC: colours


@dataclass(frozen=True)
class Drawing:
    pixels: Pixels

    @property
    def is_grey(self) -> bool:
        return self.pixels.ndim == 2

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()[:24]

    def thumbnail(self) -> Pixels:
        """16 x 16 greys, to compare by."""
        grey_HW = self.pixels if self.is_grey else self.pixels.mean(axis=2)
        blocks = grey_HW.reshape(16, PIXELS // 16, 16, PIXELS // 16).mean(axis=(1, 3))
        small: Pixels = blocks.astype(np.uint8)
        return small


def reduced(image: Image.Image) -> Pixels:
    rgb_HWC = np.asarray(image.convert("RGB"))
    if (np.ptp(rgb_HWC, axis=2) <= GREY_UP_TO).all():
        step = 255 // (GREYS - 1)
        grey_HW: Pixels = ((rgb_HWC[..., 1].astype(np.uint16) + step // 2) // step * step).astype(np.uint8)
        return grey_HW
    few = image.convert("RGB").quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    return np.asarray(few.convert("RGB"))


def draw(svg: str) -> Drawing | None:
    """None where the SVG cannot be drawn, or shows nothing on white."""
    try:
        png = bytes(resvg_py.svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True))
    except ValueError:
        return None
    pixels = reduced(Image.open(io.BytesIO(png)))
    ink_HW = pixels < 224 if pixels.ndim == 2 else (pixels < 224).any(axis=2)
    return Drawing(pixels) if ink_HW.mean() > LEAST_INK else None

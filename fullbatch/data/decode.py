"""Encoded bytes to an RGB image.  The bytes come from the web: nothing is believed before it is checked.

The format's reader is chosen by the first bytes, not by ``PIL.Image.open``: fewer parsers meet hostile bytes (none of
them starts another program), and PIL's process-wide pixel limit stays as its other users have set it.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, JpegImagePlugin

from fullbatch.data.sample import BadSample

_READERS = {  # what a file begins with, PIL's module and class
    rb"\xff\xd8\xff": ("JpegImagePlugin", "JpegImageFile"),
    rb"\x89PNG\r\n\x1a\n": ("PngImagePlugin", "PngImageFile"),
    rb"RIFF.{4}WEBP": ("WebPImagePlugin", "WebPImageFile"),
    rb"GIF8[79]a": ("GifImagePlugin", "GifImageFile"),
    rb"BM": ("BmpImagePlugin", "BmpImageFile"),
    rb"II\*\0|MM\0\*": ("TiffImagePlugin", "TiffImageFile"),
    rb".{4}ftypavi[fs]": ("AvifImagePlugin", "AvifImageFile"),
}


@contextmanager
def _bad_where_it_fails(name: str) -> Iterator[None]:
    """PIL raises errors of every kind on broken bytes, and warns of what is not ours to mend."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            yield
    except BadSample:
        raise
    except Exception as error:
        raise BadSample(name, f"the image cannot be decoded: {error or type(error).__name__}") from None


@functools.cache
def _reader(module: str, name: str) -> type[Image.Image] | None:
    try:
        found: type[Image.Image] = getattr(importlib.import_module(f"PIL.{module}"), name)
    except ImportError:  # AVIF came with Pillow 11.3
        return None
    return found


def open_image(raw: bytes, name: str, max_pixels: int) -> Image.Image:
    """An image whose header has been read and whose size has been checked; its pixels are not decoded yet."""
    with _bad_where_it_fails(name):
        for start, module_and_class in _READERS.items():
            if re.match(start, raw, re.DOTALL):
                reader = _reader(*module_and_class)
                break
        else:
            reader = None
        if reader is None:
            raise BadSample(name, f"not a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF image: it begins with {raw[:12]!r}")
        image = reader(io.BytesIO(raw))  # type: ignore[call-arg]
        width, height = image.size
        if width * height > max_pixels:
            raise BadSample(name, f"the image has {width} x {height} pixels, more than max_pixels={max_pixels:,}")
        if width < 1 or height < 1:
            raise BadSample(name, f"the image has {width} x {height} pixels")
        return image


def load_rgb(image: Image.Image, name: str) -> Image.Image:
    """The decoded pixels as RGB: transparency on white, 16 bits cut to 8, EXIF orientation ignored as in open_clip."""
    with _bad_where_it_fails(name):
        image.load()
        if image.mode == "RGB" and "transparency" not in image.info:
            return image
        if image.mode == "F":
            raise BadSample(name, "the image has floating-point pixels, whose range is unknown")
        if image.mode.startswith("I"):
            values = np.asarray(image)
            high = 8 if image.mode.startswith("I;16") or values.max() > 255 else 0
            return Image.fromarray((values >> high).clip(0, 255).astype(np.uint8)).convert("RGB")
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            seen = image.convert("RGBA")
            white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, seen).convert("RGB")
        return image.convert("RGB")


def decode(raw: bytes, name: str, max_pixels: int) -> Image.Image:
    """An RGB image, or BadSample: broken, unknown, or of more than ``max_pixels`` pixels by its header."""
    return load_rgb(open_image(raw, name, max_pixels), name)


def shrink_while_decoding(image: Image.Image, factor: int) -> None:
    """Let libjpeg decode at 1/2, 1/4 or 1/8, the least that is no smaller than 1/factor; other formats stay."""
    if factor >= 2 and isinstance(image, JpegImagePlugin.JpegImageFile):
        image.draft(None, (image.width // factor, image.height // factor))

"""Encoded bytes to pixels: uint8, channels first; normalisation happens on the device, over a batch.  The bytes come
from the web: nothing is believed before it is checked.  The first bytes choose the format's reader, not
``PIL.Image.open``: fewer parsers meet hostile bytes (none of them starts another program), and PIL's process-wide pixel
limit stays as its other users have set it.  Resizing is torch's uint8 bicubic with antialiasing: within one grey level
of Pillow's, and a sixth of its time."""

# B: rows   P: boxes, places of an epoch   K: numbers that make a view   C: channels   H, W, S: pixels of a side

from __future__ import annotations

import functools
import importlib
import io
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import interpolate

from fullbatch.config.data import Views
from fullbatch.data.order import Ints, key_of, uniforms
from fullbatch.data.sample import BadSample

try:
    import simplejpeg
except ImportError:  # the extra ``jpeg``
    simplejpeg = None

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
            raise BadSample(name, f"the image has {width} x {height} pixels, more than the limit of {max_pixels:,}")
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


# -- pixels of one image -----------------------------------------------------------------------------------------------


ASPECT = (3 / 4, 4 / 3)  # of a training crop, as in torchvision's RandomResizedCrop
_LONG = 2.0  # times longer than wide: such an image is not resized as a whole
_FINER = 2  # times as large as the square: what a JPEG decoded at reduced size leaves of the crop at least


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


def _jpeg_pixels(image: Image.Image, raw: bytes) -> npt.NDArray[np.uint8] | None:
    """Pillow's pixels in three quarters of the time; None where Pillow is to judge: not a JPEG in three colours, or one
    with damage."""
    if simplejpeg is None or not isinstance(image, JpegImageFile) or image.mode != "RGB":
        return None
    with suppress(ValueError):
        pixels_HWC: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(raw, min_height=image.height, min_width=image.width)
        if pixels_HWC.shape == (image.height, image.width, 3):
            return pixels_HWC
    return None


def _pixels(image: Image.Image, raw: bytes, name: str, left: int, top: int, width: int, height: int) -> Tensor:
    """A view with channels first of memory with channels last, which is what the fast path of interpolate wants."""
    pixels_HWC = _jpeg_pixels(image, raw)
    if pixels_HWC is None:
        pixels_HWC = np.asarray(load_rgb(image, name))
    return torch.from_numpy(np.array(pixels_HWC[top : top + height, left : left + width])).permute(2, 0, 1)


def _resized(pixels_CHW: Tensor, height: int, width: int) -> Tensor:
    if pixels_CHW.shape[1:] == (height, width):
        return pixels_CHW
    return interpolate(pixels_CHW[None], size=(height, width), mode="bicubic", antialias=True)[0]


@dataclass(frozen=True)
class TrainTransform:
    """A random crop, resized to a square.  A large JPEG is decoded at 1/2, 1/4 or 1/8 if that leaves a crop twice as
    large as the square, and the crop then begins and ends with a decoded pixel.  Beside the same crop of an image that
    is decoded in full, pixels differ by up to 1 of 255 in the mean: half of what keeping it as JPEG 95 would change."""

    size: int
    crop: tuple[float, float] = (0.9, 1.0)
    flip: bool = False
    max_pixels: int = 50_000_000

    def __call__(self, raw: bytes, name: str, rng: random.Random) -> Tensor:
        image = open_image(raw, name, self.max_pixels)
        full_width = image.width
        left, top, width, height = random_crop(*image.size, self.crop, rng)
        factor = min(width, height) // (_FINER * self.size)
        if factor >= 2 and isinstance(image, JpegImageFile):
            image.draft(None, (image.width // factor, image.height // factor))  # libjpeg decodes at 1/2, 1/4 or 1/8
        scale = round(full_width / image.width)
        crop_CHW = _pixels(image, raw, name, left // scale, top // scale, width // scale, height // scale)
        square_CHW = _resized(crop_CHW, self.size, self.size)
        if self.flip and rng.random() < 0.5:
            square_CHW = square_CHW.flip(2)
        return square_CHW.contiguous()


@dataclass(frozen=True)
class EvalTransform:
    """open_clip's evaluation transform, with nothing random: the shorter side resized to ``size``, then the middle
    square; views are cut from it too.  JPEGs are decoded in full, so that published numbers can be had again; only one
    of more than ``full_pixels`` is decoded at 1/2, 1/4 or 1/8."""

    size: int
    max_pixels: int = 50_000_000
    full_pixels: int | None = None

    def __call__(self, raw: bytes, name: str, rng: random.Random | None = None) -> Tensor:
        return self.picture(open_image(raw, name, self.max_pixels), name, raw)

    def picture(self, image: Image.Image, name: str, raw: bytes = b"") -> Tensor:
        """The same of an image that is open; its bytes, where they are known, may be decoded faster."""
        factor = min(image.size) // (_FINER * self.size)
        is_large = self.full_pixels is not None and math.prod(image.size) > self.full_pixels
        if raw and is_large and factor >= 2:  # without its bytes the image is somebody else's
            image.draft(None, (image.width // factor, image.height // factor))  # of other formats it changes nothing
        width, height = image.size
        short = min(width, height)
        new_width, new_height = self.size * width // short, self.size * height // short
        left, top = round((new_width - self.size) / 2), round((new_height - self.size) / 2)
        if max(width, height) > _LONG * short:  # resized as a whole, a strip of 1 x 50,000 pixels would fill the memory
            scale = width / new_width, height / new_height
            box = (left * scale[0], top * scale[1], (left + self.size) * scale[0], (top + self.size) * scale[1])
            square = load_rgb(image, name).resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
            return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()
        resized_CHW = _resized(_pixels(image, raw, name, 0, 0, width, height), new_height, new_width)
        return resized_CHW[:, top : top + self.size, left : left + self.size].contiguous()


# -- crops of a batch of squares ---------------------------------------------------------------------------------------


_TRIES = 10  # as for crops of images on disk
Floats = npt.NDArray[np.float64]


def random_boxes(size: int, share: tuple[float, float], draw: Callable[[int, int], Floats]) -> Floats:
    """(left, top, width, height) in pixels of a square image, drawn as ``random_crop`` draws one; ``draw(try, what)``
    gives a number in [0, 1) for every box."""
    low, high = share
    boxes_P4, waiting_P = np.empty((0, 4)), np.empty(0, bool)
    for turn in range(_TRIES):
        area_P = size * size * (low + (high - low) * draw(turn, 0))
        aspect_P = np.exp(math.log(ASPECT[0]) + math.log(ASPECT[1] / ASPECT[0]) * draw(turn, 1))
        width_P, height_P = np.round(np.sqrt(area_P * aspect_P)), np.round(np.sqrt(area_P / aspect_P))
        left_P = np.floor(draw(turn, 2) * (size - width_P + 1))
        top_P = np.floor(draw(turn, 3) * (size - height_P + 1))
        tried_P4 = np.stack([left_P, top_P, width_P, height_P], axis=1)
        fits_P = (width_P <= size) & (height_P <= size) & (width_P > 0) & (height_P > 0)
        if turn == 0:  # where nothing fits, all of it
            boxes_P4, waiting_P = np.tile([0.0, 0.0, size, size], (len(tried_P4), 1)), np.ones(len(tried_P4), bool)
        taken_P = waiting_P & fits_P
        boxes_P4[taken_P] = tried_P4[taken_P]
        waiting_P &= ~fits_P
        if not waiting_P.any():
            break
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


# -- two views of each image: crop, mirror, colour and blur a batch of squares at once, on any device ------------------
# What happens to a view is a row of numbers drawn from (seed, epoch, place, view), so that it is the same in a worker
# process, in the device's memory, on any number of ranks and after a resume; the pixels then agree to one grey level.


EVALUATION = -1  # the epoch of views that are not trained on; their places are the samples' numbers
_TAG = 5  # keeps these draws apart from those of order, crops and captions
_GREY = (0.299, 0.587, 0.114)  # luma of ITU-R 601, as Pillow's
_SIGMA = (0.1, 2.0)  # pixels of an image of ...
_SIGMA_AT = 224  # ... this side
_SHARP = 1e-3  # a sigma that blurs nothing
_ELEMENTS = 1 << 24  # numbers augmented at a time

# what the K numbers are; the first four place the crop: centre and half width (negative: mirrored), centre and half
# height, where the image reaches from -1 to 1
_CROP, _BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _COLOUR, _BLUR = slice(0, 4), 4, 5, 6, 7, 8, 9


def no_tokens(captions: list[str]) -> Tensor:
    """In place of a tokenizer: captions are read past."""
    return torch.zeros((len(captions), 0), dtype=torch.int64)


@dataclass(frozen=True)
class ViewMaker:
    """How a run makes its views; it pickles, so that workers can hold one."""

    settings: Views
    seed: int

    def __call__(self, images_BCSS: Tensor, epoch: int, places_B: Ints) -> tuple[Tensor, Tensor]:
        """Two views of each image; both uint8, as the images are."""
        drawn_2BK = self.drawn(epoch, places_B, images_BCSS.shape[-1])
        return self.made(images_BCSS, torch.from_numpy(drawn_2BK).to(images_BCSS.device))

    def drawn(self, epoch: int, places_P: Ints, size: int) -> npt.NDArray[np.float32]:
        """What happens at these places of an epoch, for both views: (2, P, K)."""
        return np.stack([self._drawn(epoch, view, places_P, size) for view in range(2)])

    def made(self, images_BCSS: Tensor, drawn_2BK: Tensor) -> tuple[Tensor, Tensor]:
        """Both views in one go: at a small batch a GPU's time goes into starting kernels."""
        rows = len(images_BCSS)
        made = augmented(images_BCSS.repeat(2, 1, 1, 1), drawn_2BK.flatten(0, 1), self.settings)
        return made[:rows], made[rows:]

    def _drawn(self, epoch: int, view: int, places_P: Ints, size: int) -> npt.NDArray[np.float32]:
        def draw(*tags: int) -> Floats:
            return uniforms(places_P, key_of(self.seed, epoch, _TAG, view, *tags))

        settings = self.settings
        boxes_P4 = random_boxes(size, settings.view_crop, lambda turn, what: draw(0, turn, what))
        left_P, top_P, width_P, height_P = boxes_P4.T / size
        sign_P = np.where(draw(1) < settings.view_flip, -1.0, 1.0)
        jittered_P = draw(2) < settings.view_jitter_chance
        moves_P4 = [
            np.where(jittered_P, move * (2.0 * draw(3, what) - 1.0), 0.0)
            for what, move in enumerate(settings.view_jitter)
        ]
        low, high = (sigma * size / _SIGMA_AT for sigma in _SIGMA)
        sigma_P = np.where(draw(5) < settings.view_blur, low + (high - low) * draw(6), _SHARP)
        numbers = (
            2.0 * left_P + width_P - 1.0,
            sign_P * width_P,
            2.0 * top_P + height_P - 1.0,
            height_P,
            *(1.0 + move_P for move_P in moves_P4[:3]),
            moves_P4[3],
            draw(4) >= settings.view_grey,
            sigma_P,
        )
        return np.stack(numbers, axis=1).astype(np.float32)


@torch.no_grad()
def augmented(images_BCSS: Tensor, drawn_BK: Tensor, settings: Views) -> Tensor:
    """A view of each uint8 image, as its row of numbers says; ``settings`` only tell what never happens."""
    if not len(images_BCSS):  # a rank's last batch of an evaluation
        return images_BCSS
    size = images_BCSS.shape[-1]
    rows = max(1, _ELEMENTS // (3 * size * size))
    if len(images_BCSS) > rows:  # float copies of large images would fill a worker's memory
        pieces = zip(torch.split(images_BCSS, rows), torch.split(drawn_BK, rows), strict=True)
        return torch.cat([augmented(images, drawn, settings) for images, drawn in pieces])
    pixels = cut_out(images_BCSS.float() / 255.0, drawn_BK[:, _CROP])
    column = drawn_BK[:, :, None, None, None].unbind(1)  # K of B111
    if settings.view_jitter_chance > 0.0:
        brightness, contrast, saturation, hue = settings.view_jitter
        if brightness:
            pixels = (pixels * column[_BRIGHTNESS]).clamp_(0.0, 1.0)
        if contrast:
            pixels = blended(pixels, grey(pixels).mean((1, 2, 3), keepdim=True), column[_CONTRAST])
        if saturation:
            pixels = blended(pixels, grey(pixels), column[_SATURATION])
        if hue:
            pixels = turned(pixels, column[_HUE])
    if settings.view_grey > 0.0:
        pixels = blended(pixels, grey(pixels), column[_COLOUR])
    if settings.view_blur > 0.0:
        pixels = blurred(pixels, drawn_BK[:, _BLUR], math.ceil(3.0 * _SIGMA[1] * size / _SIGMA_AT))
    return (pixels * 255.0).round_().clamp_(0.0, 255.0).to(torch.uint8)


def cut_out(pixels_BCSS: Tensor, crop_B4: Tensor) -> Tensor:
    """The crops, enlarged bilinearly to the size of the images."""
    count, _, size, _ = pixels_BCSS.shape
    middles_S = (2.0 * torch.arange(size, device=crop_B4.device, dtype=crop_B4.dtype) + 1.0) / size - 1.0
    centre_B1, across_B1, middle_B1, down_B1 = torch.split(crop_B4, 1, dim=1)
    x_BS, y_BS = torch.addcmul(centre_B1, across_B1, middles_S), torch.addcmul(middle_B1, down_B1, middles_S)
    square = (count, size, size)
    grid_BSS2 = torch.stack([x_BS[:, None, :].expand(square), y_BS[:, :, None].expand(square)], dim=3)
    return F.grid_sample(pixels_BCSS, grid_BSS2, mode="bilinear", padding_mode="border", align_corners=False)


def grey(pixels_B3SS: Tensor) -> Tensor:
    """(B, 1, S, S)"""
    red, green, blue = pixels_B3SS.unbind(1)
    return (_GREY[0] * red).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2]).unsqueeze(1)


def blended(pixels: Tensor, other: Tensor, share_B111: Tensor) -> Tensor:
    """share * pixels + (1 - share) * other; a share above 1 goes beyond the pixels."""
    return torch.lerp(other.expand_as(pixels), pixels, share_B111).clamp_(0.0, 1.0)


def turned(pixels_B3SS: Tensor, turns_B111: Tensor) -> Tensor:
    """The hue moved by a part of a turn of the colour circle, value and saturation (HSV) kept."""
    high, low = pixels_B3SS.amax(1, keepdim=True), pixels_B3SS.amin(1, keepdim=True)
    chroma = high - low
    red, green, blue = (channel.unsqueeze(1) for channel in pixels_B3SS.unbind(1))
    some = chroma.clamp(min=1e-9)  # where there is none the differences are 0 as well
    hue = torch.where(high == green, 2.0 + (blue - red) / some, 4.0 + (red - green) / some)
    hue = torch.where(high == red, (green - blue) / some, hue) + 6.0 * turns_B111  # in sixths of a turn
    # where red, green and blue stand on the circle; arange, since a copy of a list to a GPU would wait for the host
    starts_311 = 5.0 - 2.0 * torch.arange(3, device=pixels_B3SS.device, dtype=pixels_B3SS.dtype).view(3, 1, 1)
    place = (hue + starts_311) % 6.0
    return high - chroma * torch.minimum(place, 4.0 - place).clamp_(0.0, 1.0)


def blurred(pixels_BCSS: Tensor, sigma_B: Tensor, radius: int) -> Tensor:
    """A Gaussian of its own width for every image, cut off at ``radius``."""
    count, channels, size, _ = pixels_BCSS.shape
    steps_T = torch.arange(-radius, radius + 1, device=pixels_BCSS.device, dtype=pixels_BCSS.dtype)
    kernel_BT = torch.softmax(-0.5 * (steps_T / sigma_B[:, None]).square(), dim=1)
    kernel = kernel_BT.repeat_interleave(channels, 0)[:, None, None, :]
    planes = F.pad(pixels_BCSS.reshape(1, count * channels, size, size), [radius] * 4, mode="reflect")
    planes = F.conv2d(planes, kernel, groups=count * channels)
    planes = F.conv2d(planes, kernel.transpose(2, 3), groups=count * channels)
    return planes.view(count, channels, size, size)

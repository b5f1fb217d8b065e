"""Two views of each image: crop, mirror, colour and blur a batch of squares at once, on any device.  What happens to a
view is a row of numbers drawn from (seed, epoch, place, view), so that it is the same in a worker process, in the
device's memory, on any number of ranks and after a resume; the pixels then agree to one grey level.  Views are cut from
the middle square at the model's own size."""

# B: images   P: places of an epoch   K: numbers that make a view   C, S: channels, pixels

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fullbatch.config.data import Views
from fullbatch.data.images import Floats, random_boxes
from fullbatch.data.order import Ints, key_of, uniforms

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
            1.0 + moves_P4[0],
            1.0 + moves_P4[1],
            1.0 + moves_P4[2],
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

"""Fog, frost, snow and spatter as CIFAR-10-C has them at severity 1, and the fields they are made of.

Two things differ from Hendrycks and Dietterich's code.  Frost is a texture made here (ridges of two noise fields) in
place of their photographs, which are not ours to pass on; and the rims of the drops in ``spatter`` are those of the
mask, in place of Canny's edges, which are nearly the same where a drop is a step from 0 to 178 levels and more.
"""

# N: images   H, W: pixels, H = W = S   C: channels   L: grey levels

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fullbatch.data.order import key_of

Floats = npt.NDArray[np.float32]

_FAINT = 1e-4  # of the strongest: what a streak fades to before it is cut, a hundredth of a grey level


@dataclass(frozen=True)
class Draws:
    """Random numbers for a batch of images, each image's from a stream of its own: they do not depend on the batch."""

    key: int
    ids: tuple[int, ...]

    def _each(self, what: int, draw: Any) -> Floats:
        """``what`` tells the fields of one corruption apart."""
        streams = (np.random.Generator(np.random.Philox(key=key_of(self.key, number, what))) for number in self.ids)
        return np.stack([np.asarray(draw(stream, place), np.float32) for place, stream in enumerate(streams)])

    def uniform(self, low: float, high: float, *shape: int, what: int = 0) -> Floats:
        return self._each(what, lambda stream, place: stream.uniform(low, high, shape))

    def normal(self, mean: float, deviation: float, *shape: int, what: int = 0) -> Floats:
        return self._each(what, lambda stream, place: stream.normal(mean, deviation, shape))

    def whole(self, low: int, high: int, *shape: int, what: int = 0) -> npt.NDArray[np.int64]:
        """In [low, high)."""
        return np.floor(self.uniform(low, high, *shape, what=what)).astype(np.int64).clip(low, high - 1)

    def poisson(self, mean_N: Floats, what: int = 0) -> Floats:
        return self._each(what, lambda stream, place: stream.poisson(mean_N[place]))


def streaked(x_NHWC: Floats, radius: float, sigma: float, degrees_N: Floats) -> Floats:
    """Motion blur: half a Gaussian along each image's own direction, from pixel to pixel, edges drawn out.

    ImageMagick's rule, which CIFAR-10-C was made with; its tail is cut where it is ``_FAINT``.
    """
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2.0 * sigma**2))
    steps = steps[weights >= _FAINT]
    weights = (weights[steps] / weights[steps].sum()).astype(np.float32)
    count, height, width, _ = x_NHWC.shape
    angle_N11 = np.deg2rad(degrees_N)[:, None, None]
    image, row, column = np.ogrid[:count, :height, :width]
    found = np.zeros_like(x_NHWC)
    for step, weight in zip(steps, weights, strict=True):
        down = np.ceil(step * np.sin(angle_N11) - 0.5).astype(np.int64)
        across = np.ceil(step * np.cos(angle_N11) - 0.5).astype(np.int64)
        found += weight * x_NHWC[image, (row + down).clip(0, height - 1), (column + across).clip(0, width - 1)]
    return found


def plasma(draws: Draws, size: int, decay: float, what: int = 0) -> Floats:
    """A cloudy field in [0, 1] for each image, (N, S, S), by the diamond-square rule on a torus.

    A point is the mean of its four neighbours plus noise, which shrinks by ``decay`` squared from one grid to the next
    finer one.
    """
    side = 1 << max(1, (size - 1).bit_length())
    noise_NSS = draws.uniform(-1.0, 1.0, side, side, what=what)
    field_NSS = np.zeros_like(noise_NSS)
    step, wobble = side, 100.0
    while step >= 2:
        half = step // 2
        corner, middle = slice(0, side, step), slice(half, side, step)
        corners = field_NSS[:, corner, corner]
        rows = corners + np.roll(corners, -1, axis=1)
        squares = (rows + np.roll(rows, -1, axis=2)) / 4.0
        field_NSS[:, middle, middle] = squares + wobble**2 * noise_NSS[:, middle, middle]
        centres = field_NSS[:, middle, middle]
        beside = (centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=2)) / 4.0
        above = (centres + np.roll(centres, 1, axis=2) + corners + np.roll(corners, -1, axis=1)) / 4.0
        field_NSS[:, corner, middle] = beside + wobble**2 * noise_NSS[:, corner, middle]
        field_NSS[:, middle, corner] = above + wobble**2 * noise_NSS[:, middle, corner]
        step, wobble = half, wobble / decay
    return _stretched(field_NSS)[:, :size, :size]


def _stretched(field_NSS: Floats) -> Floats:
    """Each image's values from 0 to 1; 0 where all are equal."""
    low = field_NSS.min(axis=(1, 2), keepdims=True)
    range_N11 = field_NSS.max(axis=(1, 2), keepdims=True) - low
    return np.asarray((field_NSS - low) / np.maximum(range_N11, 1e-12), np.float32)


def fog(x_NHWC: Floats, draws: Draws) -> Floats:
    """A fifth of a cloud, made so that the brightest stays as bright."""
    brightest = x_NHWC.max(axis=(1, 2, 3), keepdims=True)
    cloud_NHW1 = plasma(draws, x_NHWC.shape[1], decay=3.0)[..., None]
    return np.asarray((x_NHWC + 0.2 * cloud_NHW1) * brightest / (brightest + 0.2), np.float32)


def frost(x_NHWC: Floats, draws: Draws) -> Floats:
    """The image and a fifth of a texture of bright, bluish ridges."""
    size = x_NHWC.shape[1]
    ridges = [1.0 - np.abs(2.0 * plasma(draws, size, decay=1.7, what=what) - 1.0) for what in (0, 1)]
    crystals_NHW1 = _stretched(np.maximum(*ridges) ** 2)[..., None]
    return np.asarray(x_NHWC + 0.2 * crystals_NHW1 * np.array([0.8, 0.9, 1.0]), np.float32)


def snow(x_NHWC: Floats, draws: Draws) -> Floats:
    """Flakes are the few high values of a noise field, blown about; the image pales a little."""
    size = x_NHWC.shape[1]
    flakes = draws.normal(0.1, 0.2, size, size)
    flakes = np.where(flakes < 0.6, 0.0, flakes.clip(0.0, 1.0)).astype(np.float32)[..., None]
    flakes = streaked(flakes, radius=8, sigma=3, degrees_N=draws.uniform(-135.0, -45.0, what=1))
    grey_NHW1 = (x_NHWC @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    pale = 0.95 * x_NHWC + 0.05 * np.maximum(x_NHWC, 1.5 * grey_NHW1 + 0.5)
    return np.asarray(pale + flakes + flakes[:, ::-1, ::-1], np.float32)


def spatter(x_NHWC: Floats, draws: Draws) -> Floats:
    """Drops of pale turquoise, lit from one side: the embossed distance from their rims."""
    from scipy import ndimage  # here, since few runs need it

    size = x_NHWC.shape[1]
    liquid = ndimage.gaussian_filter(draws.normal(0.62, 0.1, size, size), (0, 0.7, 0.7), mode="nearest")
    drops = liquid >= 0.7
    across = ndimage.generate_binary_structure(3, 1)
    across[0, 1, 1] = across[2, 1, 1] = False  # within an image
    rims = drops & ~ndimage.binary_erosion(drops, across, border_value=1)
    # images lie 1000 apart, so that none sees another's rims
    distance = ndimage.distance_transform_edt(~rims, sampling=(1000.0, 1.0, 1.0))
    relief = np.floor(_blurred(np.minimum(distance, 20.0).astype(np.float32)))
    emboss = np.array([[[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]], np.float32)
    lit = ndimage.correlate(_equalized(relief), emboss, mode="mirror").clip(0.0, 255.0)
    water = np.where(drops, np.floor(liquid * 255.0), 0.0) * _blurred(lit)
    water = water / np.maximum(water.max(axis=(1, 2), keepdims=True), 1e-12)
    turquoise = np.array([175, 238, 238], np.float32) / 255.0
    return np.asarray(x_NHWC + 0.5 * water[..., None] * turquoise, np.float32)


def _blurred(field_NSS: Floats) -> Floats:
    from scipy import ndimage  # here, since few runs need it

    return np.asarray(ndimage.uniform_filter(field_NSS, (0, 3, 3), mode="mirror"), np.float32)


def _equalized(level_NSS: Floats) -> Floats:
    """Whole levels spread over 0 ... 255 so that as many pixels lie below each as its value says."""
    levels = int(level_NSS.max()) + 1
    numbers_NSS = level_NSS.astype(np.int64)
    count, total = len(numbers_NSS), numbers_NSS[0].size
    flat = numbers_NSS.reshape(count, -1) + levels * np.arange(count)[:, None]
    below_NL = np.bincount(flat.ravel(), minlength=count * levels).reshape(count, levels).cumsum(axis=1)
    lowest_N1 = np.take_along_axis(below_NL, (below_NL > 0).argmax(axis=1)[:, None], axis=1)
    table_NL = np.rint((below_NL - lowest_N1) / np.maximum(total - lowest_N1, 1) * 255.0).clip(0.0, 255.0)
    spread = np.take_along_axis(table_NL, numbers_NSS.reshape(count, -1), axis=1)
    return spread.reshape(level_NSS.shape).astype(np.float32)

"""The 19 corruptions of CIFAR-10-C at severity 1 (Hendrycks and Dietterich 2019), for square images of any size.

The parameters are those of their code for 32 pixels.  The code is ours, over a batch at a time; what becomes of an
image depends on the seed, its number and the kind alone.  Results are rounded to whole levels, where theirs are cut.

Two corruptions differ from theirs.  Frost is a texture made here (ridges of two noise fields) in place of their
photographs, which are not ours to pass on.  The rims of the drops in ``spatter`` are those of the mask, in place of
Canny's edges, which are nearly the same where a drop is a step from 0 to 178 levels and more.
"""

# N: images   H, W: pixels, H = W = S   C: channels   I, O: pixels of a row that goes in, comes out   L: grey levels

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fullbatch.data.order import key_of

Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

_FAINT = 1e-4  # of the strongest: what a streak fades to before it is cut, a hundredth of a grey level


def _ndimage() -> Any:
    import scipy.ndimage  # here, since few runs need it, and it is an extra

    return scipy.ndimage


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

    def normal(self, mean: float, deviation: float, *shape: int) -> Floats:
        return self._each(0, lambda stream, place: stream.normal(mean, deviation, shape))

    def poisson(self, mean_N: Floats) -> Floats:
        return self._each(0, lambda stream, place: stream.poisson(mean_N[place]))


def streaked(x_NHWC: Floats, radius: float, sigma: float, degrees_N: Floats) -> Floats:
    """Motion blur by ImageMagick's rule, which CIFAR-10-C was made with: half a Gaussian along each image's own
    direction, from pixel to pixel, edges drawn out.  The tail is cut where it falls to ``_FAINT``."""
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2.0 * sigma**2))
    steps = steps[weights >= _FAINT]
    weights = (weights[steps] / weights[steps].sum()).astype(np.float32)
    count, height, width, _ = x_NHWC.shape
    angle_N11 = np.deg2rad(degrees_N)[:, None, None]
    image, row, column = np.ogrid[:count, :height, :width]
    blurred_NHWC = np.zeros_like(x_NHWC)
    for step, weight in zip(steps, weights, strict=True):
        down = np.ceil(step * np.sin(angle_N11) - 0.5).astype(np.int64)
        across = np.ceil(step * np.cos(angle_N11) - 0.5).astype(np.int64)
        blurred_NHWC += weight * x_NHWC[image, (row + down).clip(0, height - 1), (column + across).clip(0, width - 1)]
    return blurred_NHWC


def plasma(draws: Draws, size: int, decay: float, what: int = 0) -> Floats:
    """A cloudy field in [0, 1] for each image, (N, S, S), by the diamond-square rule on a torus: a point is the mean of
    its four neighbours plus noise, which shrinks by ``decay`` squared from one grid to the next finer one."""
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
    size = x_NHWC.shape[1]
    liquid = _ndimage().gaussian_filter(draws.normal(0.62, 0.1, size, size), (0, 0.7, 0.7), mode="nearest")
    drops = liquid >= 0.7
    across = _ndimage().generate_binary_structure(3, 1)
    across[0, 1, 1] = across[2, 1, 1] = False  # within an image
    rims = drops & ~_ndimage().binary_erosion(drops, across, border_value=1)
    # images lie 1000 apart, so that none sees another's rims
    distance = _ndimage().distance_transform_edt(~rims, sampling=(1000.0, 1.0, 1.0))
    relief = np.floor(_blurred(np.minimum(distance, 20.0).astype(np.float32)))
    emboss = np.array([[[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]], np.float32)
    lit = _ndimage().correlate(_equalized(relief), emboss, mode="mirror").clip(0.0, 255.0)
    water = np.where(drops, np.floor(liquid * 255.0), 0.0) * _blurred(lit)
    water = water / np.maximum(water.max(axis=(1, 2), keepdims=True), 1e-12)
    turquoise = np.array([175, 238, 238], np.float32) / 255.0
    return np.asarray(x_NHWC + 0.5 * water[..., None] * turquoise, np.float32)


def _blurred(field_NSS: Floats) -> Floats:
    return np.asarray(_ndimage().uniform_filter(field_NSS, (0, 3, 3), mode="mirror"), np.float32)


def _equalized(level_NSS: Floats) -> Floats:
    """Whole levels spread over 0 ... 255 so that as many pixels lie below each as its value says."""
    spread = []
    for level_SS in level_NSS.astype(np.int64):
        below_L = np.bincount(level_SS.ravel()).cumsum()
        lowest = below_L[below_L > 0][0]
        table_L = np.rint((below_L - lowest) / max(level_SS.size - lowest, 1) * 255.0).clip(0.0, 255.0)
        spread.append(table_L[level_SS])
    return np.stack(spread).astype(np.float32)


def impulse_noise(x_NHWC: Floats, draws: Draws) -> Floats:
    """One value in a hundred becomes 0 or 1."""
    drawn = draws.uniform(0.0, 1.0, *x_NHWC.shape[1:])
    return np.where(drawn < 0.005, 0.0, np.where(drawn < 0.01, 1.0, x_NHWC)).astype(np.float32)


def defocus_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    """A disk of radius 0.3, which is one pixel, its edge softened by a Gaussian of 0.4 over three pixels."""
    side = np.exp(-1.0 / (2.0 * 0.4**2))
    kernel = np.array([side, 1.0, side]) / (1.0 + 2.0 * side)
    for axis in (1, 2):
        x_NHWC = _ndimage().correlate1d(x_NHWC, kernel, axis=axis, mode="mirror")
    return x_NHWC


def glass_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    """From the last pixel to the first, each takes the value of itself or of a neighbour above, left, or both.  It was
    meant as an exchange, but in the code that made CIFAR-10-C the second half has no effect."""
    count, height, width, _ = x_NHWC.shape
    back_NHW2 = np.floor(draws.uniform(-1.0, 1.0, height, width, 2)).astype(np.int64).clip(-1, 0)
    shuffled, image_N = _gaussian(x_NHWC, 0.05), np.arange(count)
    for row in range(height - 1, 1, -1):
        for column in range(width - 1, 1, -1):
            up_N, left_N = back_NHW2[:, row, column].T
            shuffled[:, row, column] = shuffled[image_N, row + up_N, column + left_N]
    return _gaussian(shuffled, 0.05)


def zoom_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    """The mean of the image, twice, and of it enlarged by 1 to 5 %."""
    total_NHWC = 2.0 * x_NHWC
    for percent in range(1, 6):
        enlarge_OI = _enlarging(x_NHWC.shape[1], 1.0 + percent / 100.0)
        total_NHWC = total_NHWC + np.einsum("oi,nijc,pj->nopc", enlarge_OI, x_NHWC, enlarge_OI, optimize=True)
    return np.asarray(total_NHWC / 7.0, np.float32)


def _gaussian(x_NHWC: Floats, sigma: float) -> Floats:
    return np.asarray(_ndimage().gaussian_filter(x_NHWC, (0, sigma, sigma, 0), mode="nearest"), np.float32)


def _enlarging(size: int, factor: float) -> Floats:
    """A row of the middle part, enlarged linearly to about ``size`` pixels, first on first and last on last."""
    kept = int(np.ceil(size / factor))
    top, there = (size - kept) // 2, max(size, round(kept * factor))
    trim = (there - size) // 2
    place_O = (np.arange(size) + trim) * (kept - 1) / max(there - 1, 1)
    weight_OI = np.maximum(0.0, 1.0 - np.abs(place_O[:, None] + top - np.arange(size)[None, :]))
    return np.asarray(weight_OI / weight_OI.sum(axis=1, keepdims=True), np.float32)


def brightness(x_NHWC: Floats, draws: Draws) -> Floats:
    """HSV's value rises by 0.05; hue and saturation stay."""
    value = x_NHWC.max(axis=3, keepdims=True)
    raised = np.minimum(value + 0.05, 1.0)
    return np.asarray(np.where(value > 0.0, x_NHWC * (raised / np.maximum(value, 1e-12)), raised), np.float32)


def elastic_transform(x_NHWC: Floats, draws: Draws) -> Floats:
    """An affine map that moves three points by up to 0.08 of the side; at severity 1 nothing else is bent."""
    count, size = len(x_NHWC), x_NHWC.shape[1]
    middle, third, reach = size // 2, size // 3, 0.08 * size
    points_32 = middle + third * np.array([[1, 1], [1, -1], [-1, -1]], np.float64)  # x, y
    moved_N32 = points_32 + draws.uniform(-reach, reach, 3, 2).astype(np.float64)
    ones_N31 = np.ones((count, 3, 1))
    # where each pixel comes from: the map back from the moved points
    back_N32 = np.linalg.solve(np.concatenate([moved_N32, ones_N31], axis=2), np.broadcast_to(points_32, (count, 3, 2)))
    moved = []
    for image_HWC, back_32 in zip(x_NHWC, back_N32, strict=True):  # bilinear; beyond an edge the image is mirrored
        back_33 = np.eye(3)  # of row, column and channel
        back_33[:2, :2] = back_32[1::-1, ::-1].T
        start = (back_32[2, 1], back_32[2, 0], 0.0)
        moved.append(_ndimage().affine_transform(image_HWC, back_33, start, order=1, mode="mirror"))
    return np.stack(moved).astype(np.float32)


def pixelate(x_NHWC: Floats, draws: Draws) -> Floats:
    """Down to 0.95 of the side and up again, by Pillow's box filter."""
    size = x_NHWC.shape[1]
    small = (int(0.95 * size),) * 2

    def coarse(image: Image.Image) -> Image.Image:
        return image.resize(small, Image.Resampling.BOX).resize((size, size), Image.Resampling.BOX)

    return _by_pillow(x_NHWC, coarse)


def jpeg_compression(x_NHWC: Floats, draws: Draws) -> Floats:
    def coded(image: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80)
        return Image.open(buffer)

    return _by_pillow(x_NHWC, coded)


def _by_pillow(x_NHWC: Floats, change: Callable[[Image.Image], Image.Image]) -> Floats:
    levels_NHWC = np.rint(x_NHWC * 255.0).astype(np.uint8)
    changed = np.stack([np.asarray(change(Image.fromarray(image))) for image in levels_NHWC])
    return np.asarray(changed / 255.0, np.float32)


# By name, those of one line where they stand.  Shot noise is light counted in 500 quanta; saturation falls to 0.3 of
# what it was, while HSV's hue and value stay.
_BY_NAME: dict[str, Callable[[Floats, Draws], Floats]] = {
    "gaussian_noise": lambda x_NHWC, draws: x_NHWC + draws.normal(0.0, 0.04, *x_NHWC.shape[1:]),
    "shot_noise": lambda x_NHWC, draws: draws.poisson(500.0 * x_NHWC) / 500.0,
    "impulse_noise": impulse_noise,
    "speckle_noise": lambda x_NHWC, draws: x_NHWC + x_NHWC * draws.normal(0.0, 0.06, *x_NHWC.shape[1:]),
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": lambda x_NHWC, draws: streaked(x_NHWC, 6, 1, draws.uniform(-45.0, 45.0)),
    "zoom_blur": zoom_blur,
    "gaussian_blur": lambda x_NHWC, draws: _gaussian(x_NHWC, 0.4),
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "spatter": spatter,
    "brightness": brightness,
    "contrast": lambda x_NHWC, draws: (x_NHWC - (mean := x_NHWC.mean(axis=(1, 2), keepdims=True))) * 0.75 + mean,
    "saturate": lambda x_NHWC, draws: (value := x_NHWC.max(axis=3, keepdims=True)) - (value - x_NHWC) * 0.3,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}
CORRUPTIONS, CORRUPTION_NAMES = tuple(_BY_NAME.values()), tuple(_BY_NAME)


def corrupted(images_NHWC: Pixels, ids: Sequence[int], kind: int, seed: int) -> Pixels:
    """The images, each by its number in ``ids``, after the corruption ``CORRUPTIONS[kind]``."""
    _, height, width, _ = images_NHWC.shape
    assert height == width and height >= 8, "square images of some size"
    draws = Draws(key_of(seed, kind), tuple(ids))
    changed_NHWC = CORRUPTIONS[kind](images_NHWC.astype(np.float32) / np.float32(255.0), draws)
    return np.rint(changed_NHWC.clip(0.0, 1.0) * 255.0).astype(np.uint8)

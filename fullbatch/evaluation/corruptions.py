"""The 19 corruptions of CIFAR-10-C at severity 1 (Hendrycks and Dietterich 2019), for square images of any size.

The parameters are those of their code for 32 pixels; the code is ours, over a batch at a time, and what an image turns
into depends on the seed, its number and the kind alone.  ``weather`` says where two of them differ.  Results are
rounded to whole levels, where theirs are cut.
"""

# N: images   H, W: pixels, H = W   C: channels   I: pixels of a row   O: pixels of a row that comes out

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from fullbatch.data.order import key_of
from fullbatch.evaluation.weather import Draws, Floats, fog, frost, snow, spatter, streaked

Pixels = npt.NDArray[np.uint8]


# ---------------------------------------------------------------------------------------------------------------------
# noise


def gaussian_noise(x_NHWC: Floats, draws: Draws) -> Floats:
    return x_NHWC + draws.normal(0.0, 0.04, *x_NHWC.shape[1:])


def shot_noise(x_NHWC: Floats, draws: Draws) -> Floats:
    """Light counted in 500 quanta."""
    return np.asarray(draws.poisson(500.0 * x_NHWC) / 500.0, np.float32)


def impulse_noise(x_NHWC: Floats, draws: Draws) -> Floats:
    """One value in a hundred becomes 0 or 1."""
    drawn = draws.uniform(0.0, 1.0, *x_NHWC.shape[1:])
    return np.where(drawn < 0.005, 0.0, np.where(drawn < 0.01, 1.0, x_NHWC)).astype(np.float32)


def speckle_noise(x_NHWC: Floats, draws: Draws) -> Floats:
    return x_NHWC + x_NHWC * draws.normal(0.0, 0.06, *x_NHWC.shape[1:])


# ---------------------------------------------------------------------------------------------------------------------
# blur


def gaussian_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    return _gaussian(x_NHWC, 0.4)


def defocus_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    """A disk of radius 0.3, which is one pixel, its edge softened by a Gaussian of 0.4 over three pixels."""
    from scipy import ndimage  # here, since few runs need it

    side = np.exp(-1.0 / (2.0 * 0.4**2))
    kernel = np.array([side, 1.0, side]) / (1.0 + 2.0 * side)
    for axis in (1, 2):
        x_NHWC = ndimage.correlate1d(x_NHWC, kernel, axis=axis, mode="mirror")
    return x_NHWC


def glass_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    """From the last pixel to the first, each takes the value of itself or of a neighbour above, left, or both.

    Meant as an exchange; in the code that made CIFAR-10-C the second half of it has no effect, and so here.
    """
    count, height, width, _ = x_NHWC.shape
    back_NHW2 = draws.whole(-1, 1, height, width, 2)
    shuffled, image_N = _gaussian(x_NHWC, 0.05), np.arange(count)
    for row in range(height - 1, 1, -1):
        for column in range(width - 1, 1, -1):
            up_N, left_N = back_NHW2[:, row, column].T
            shuffled[:, row, column] = shuffled[image_N, row + up_N, column + left_N]
    return _gaussian(shuffled, 0.05)


def motion_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    return streaked(x_NHWC, radius=6, sigma=1, degrees_N=draws.uniform(-45.0, 45.0))


def zoom_blur(x_NHWC: Floats, draws: Draws) -> Floats:
    """The mean of the image, twice, and of it enlarged by 1 to 5 %."""
    found = 2.0 * x_NHWC
    for percent in range(1, 6):
        enlarge_OI = _enlarging(x_NHWC.shape[1], 1.0 + percent / 100.0)
        found = found + np.einsum("oi,nijc,pj->nopc", enlarge_OI, x_NHWC, enlarge_OI, optimize=True)
    return np.asarray(found / 7.0, np.float32)


def _gaussian(x_NHWC: Floats, sigma: float) -> Floats:
    from scipy import ndimage  # here, since few runs need it

    return np.asarray(ndimage.gaussian_filter(x_NHWC, (0, sigma, sigma, 0), mode="nearest"), np.float32)


def _enlarging(size: int, factor: float) -> Floats:
    """A row of the middle part, enlarged linearly to about ``size`` pixels, first on first and last on last."""
    kept = int(np.ceil(size / factor))
    top, there = (size - kept) // 2, max(size, round(kept * factor))
    trim = (there - size) // 2
    place_O = (np.arange(size) + trim) * (kept - 1) / max(there - 1, 1)
    weight_OI = np.maximum(0.0, 1.0 - np.abs(place_O[:, None] + top - np.arange(size)[None, :]))
    return np.asarray(weight_OI / weight_OI.sum(axis=1, keepdims=True), np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# colour


def brightness(x_NHWC: Floats, draws: Draws) -> Floats:
    """HSV's value rises by 0.05; hue and saturation stay."""
    value = x_NHWC.max(axis=3, keepdims=True)
    raised = np.minimum(value + 0.05, 1.0)
    return np.asarray(np.where(value > 0.0, x_NHWC * (raised / np.maximum(value, 1e-12)), raised), np.float32)


def contrast(x_NHWC: Floats, draws: Draws) -> Floats:
    mean = x_NHWC.mean(axis=(1, 2), keepdims=True)
    return np.asarray((x_NHWC - mean) * 0.75 + mean, np.float32)


def saturate(x_NHWC: Floats, draws: Draws) -> Floats:
    """HSV's saturation falls to 0.3 of what it was; hue and value stay."""
    value = x_NHWC.max(axis=3, keepdims=True)
    return np.asarray(value - (value - x_NHWC) * 0.3, np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# geometry and coding


def elastic_transform(x_NHWC: Floats, draws: Draws) -> Floats:
    """An affine map that moves three points by up to 0.08 of the side; at severity 1 nothing else is bent."""
    count, size = len(x_NHWC), x_NHWC.shape[1]
    middle, third, reach = size // 2, size // 3, 0.08 * size
    points_32 = middle + third * np.array([[1, 1], [1, -1], [-1, -1]], np.float64)  # x, y
    moved_N32 = points_32 + draws.uniform(-reach, reach, 3, 2).astype(np.float64)
    ones_N31 = np.ones((count, 3, 1))
    # where each pixel comes from: the map back from the moved points
    back_N32 = np.linalg.solve(np.concatenate([moved_N32, ones_N31], axis=2), np.broadcast_to(points_32, (count, 3, 2)))
    y, x = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    from_NHW2 = np.stack([x, y, np.ones_like(x)], axis=2).astype(np.float64) @ back_N32[:, None]
    return _sampled(x_NHWC, from_NHW2[..., 1], from_NHW2[..., 0])


def _sampled(x_NHWC: Floats, row_NHW: npt.NDArray[np.float64], column_NHW: npt.NDArray[np.float64]) -> Floats:
    """Bilinear; beyond an edge the image is mirrored, the edge itself not repeated."""
    size, image_N11 = x_NHWC.shape[1], np.arange(len(x_NHWC))[:, None, None]
    top, left = np.floor(row_NHW).astype(np.int64), np.floor(column_NHW).astype(np.int64)
    down, right = (row_NHW - top)[..., None].astype(np.float32), (column_NHW - left)[..., None].astype(np.float32)

    def at(row: npt.NDArray[np.int64], column: npt.NDArray[np.int64]) -> Floats:
        return x_NHWC[image_N11, _mirrored(row, size), _mirrored(column, size)]

    above = (1.0 - right) * at(top, left) + right * at(top, left + 1)
    below = (1.0 - right) * at(top + 1, left) + right * at(top + 1, left + 1)
    return np.asarray((1.0 - down) * above + down * below, np.float32)


def _mirrored(place: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    turn = np.abs(place) % (2 * size - 2)
    return np.asarray(np.minimum(turn, 2 * size - 2 - turn), np.int64)


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


# ---------------------------------------------------------------------------------------------------------------------

Corruption = Callable[[Floats, Draws], Floats]

CORRUPTIONS: tuple[Corruption, ...] = (
    gaussian_noise, shot_noise, impulse_noise, speckle_noise,
    defocus_blur, glass_blur, motion_blur, zoom_blur, gaussian_blur,
    snow, frost, fog, spatter,
    brightness, contrast, saturate,
    elastic_transform, pixelate, jpeg_compression,
)  # fmt: skip
CORRUPTION_NAMES = tuple(corruption.__name__ for corruption in CORRUPTIONS)


def corrupted(images_NHWC: Pixels, ids: Sequence[int], kind: int, seed: int) -> Pixels:
    """The images, each by its number in ``ids``, after the corruption ``CORRUPTIONS[kind]``."""
    _, height, width, _ = images_NHWC.shape
    assert height == width and height >= 8, "square images of some size"
    draws = Draws(key_of(seed, kind), tuple(ids))
    found = CORRUPTIONS[kind](images_NHWC.astype(np.float32) / np.float32(255.0), draws)
    return np.rint(found.clip(0.0, 1.0) * 255.0).astype(np.uint8)

"""The corruptions: small, never nothing, the same for an image whatever its batch, and some against plain loops."""

import numpy as np
import pytest
from PIL import Image

from fullbatch.evaluation.corruptions import CORRUPTION_NAMES, CORRUPTIONS, Draws, corrupted, plasma, streaked
from tests.data.making import picture

KINDS = range(len(CORRUPTIONS))
# What the least and the greatest change of an image may be, in dB of peak signal to noise.
HARDLY, MUCH = 60.0, 10.0


def pictures(count: int = 6, size: int = 32) -> np.ndarray:
    """Smooth pictures with some texture, so that a blur does something."""
    noise = np.random.default_rng(7).integers(-20, 21, (count, size, size, 3))
    smooth = np.stack([np.asarray(picture((size, size), seed), np.int64) for seed in range(count)])
    return (smooth + noise).clip(0, 255).astype(np.uint8)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = np.square(one.astype(np.float64) - other).mean()
    return float(10.0 * np.log10(255.0**2 / max(error, 1e-12)))


def of_kind(name: str, images: np.ndarray, seed: int = 0) -> np.ndarray:
    return corrupted(images, range(len(images)), CORRUPTION_NAMES.index(name), seed)


def test_there_are_the_nineteen_of_cifar_10_c():
    assert len(CORRUPTIONS) == len(set(CORRUPTION_NAMES)) == 19


@pytest.mark.parametrize("kind", KINDS, ids=CORRUPTION_NAMES)
def test_each_changes_an_image_a_little_and_always_in_the_same_way(kind):
    images = pictures()
    before = images.copy()
    changed = corrupted(images, range(6), kind, seed=0)
    assert changed.shape == images.shape and changed.dtype == np.uint8
    assert (images == before).all(), "the input stays"
    for one, other in zip(images, changed, strict=True):
        assert MUCH < psnr(one, other) < HARDLY
    assert (corrupted(images, range(6), kind, seed=0) == changed).all()
    alone = corrupted(images[4:5], [4], kind, seed=0)
    assert (alone == changed[4:5]).all(), "an image's neighbours in the batch are of no account"


@pytest.mark.parametrize("kind", KINDS, ids=CORRUPTION_NAMES)
def test_images_that_are_all_one_colour(kind):
    for level in (0, 255):
        changed = corrupted(np.full((2, 32, 32, 3), level, np.uint8), [0, 1], kind, seed=0)
        assert changed.shape == (2, 32, 32, 3)


@pytest.mark.parametrize("size", [16, 33, 64])
def test_other_sizes(size):
    images = pictures(2, size)
    for kind in KINDS:
        changed = corrupted(images, [0, 1], kind, seed=0)
        assert changed.shape == images.shape and (changed != images).any()


RANDOM = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow",
          "frost", "fog", "spatter", "elastic_transform")  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTION_NAMES)
def test_what_is_random_depends_on_the_seed_and_on_the_images_number(name):
    images = np.repeat(pictures(1), 2, axis=0)
    changed = of_kind(name, images)
    assert (changed[0] == changed[1]).all() == (name not in RANDOM)
    assert (of_kind(name, images, seed=1) == changed).all() == (name not in RANDOM)


def test_noise_has_the_size_it_is_said_to_have():
    grey = np.full((4, 64, 64, 3), 128, np.uint8)
    share = 128 / 255
    assert (of_kind("gaussian_noise", grey) / 255.0).std() == pytest.approx(0.04, rel=0.03)
    assert (of_kind("speckle_noise", grey) / 255.0).std() == pytest.approx(0.06 * share, rel=0.03)
    assert (of_kind("shot_noise", grey) / 255.0).std() == pytest.approx((share / 500) ** 0.5, rel=0.03)
    assert (of_kind("impulse_noise", grey) != 128).mean() == pytest.approx(0.01, rel=0.1)


def test_colours_move_as_hsv_says():
    colours = np.random.default_rng(0).integers(1, 256, (1, 32, 32, 3), dtype=np.uint8)
    hsv = np.asarray(Image.fromarray(colours[0]).convert("HSV"), np.float64)
    brighter = np.asarray(Image.fromarray(of_kind("brightness", colours)[0]).convert("HSV"), np.float64)
    assert np.abs(brighter[..., 2] - (hsv[..., 2] + 0.05 * 255).clip(max=255)).max() <= 1
    paler = np.asarray(Image.fromarray(of_kind("saturate", colours)[0]).convert("HSV"), np.float64)
    assert np.abs(paler[..., 2] - hsv[..., 2]).max() <= 1
    bright = hsv[..., 2] > 100  # below, a level is a large step of saturation
    assert np.abs(paler[..., 1] - 0.3 * hsv[..., 1])[bright].max() <= 3
    flat = of_kind("contrast", colours).astype(np.float64)
    assert flat.std() == pytest.approx(0.75 * colours.std(), rel=0.01)
    assert flat.mean() == pytest.approx(colours.mean(), abs=0.5)


def test_streaks_by_a_loop():
    x = np.random.default_rng(1).random((1, 9, 9, 1)).astype(np.float32)
    found = streaked(x, radius=3, sigma=1.0, degrees_N=np.array([30.0], np.float32))
    weights = [np.exp(-(step**2) / 2.0) for step in range(7) if np.exp(-(step**2) / 2.0) >= 1e-4]
    expected = np.zeros((9, 9))
    for row in range(9):
        for column in range(9):
            for step, weight in enumerate(weights):
                down, across = np.ceil(step * 0.5 - 0.5), np.ceil(step * np.cos(np.pi / 6) - 0.5)
                y, x_ = min(int(row + down), 8), min(int(column + across), 8)
                expected[row, column] += weight / sum(weights) * x[0, y, x_, 0]
    assert np.allclose(found[0, :, :, 0], expected, atol=1e-5)


def test_glass_takes_values_of_the_two_by_two_before_a_pixel():
    images = pictures(2, 12)
    changed = of_kind("glass_blur", images)
    for row in range(2, 12):
        for column in range(2, 12):
            near = images[:, row - 1 : row + 1, column - 1 : column + 1].reshape(2, 4, 3)
            assert (changed[:, None, row, column] == near).all(axis=2).any(axis=1).all()
    assert (changed[:, :2] == images[:, :2]).all()


def test_an_affine_map_of_a_straight_ramp_is_a_straight_ramp():
    rows, columns = np.mgrid[:32, :32]
    ramp = np.repeat((60 + 2 * rows + 2 * columns).astype(np.uint8)[None, :, :, None], 3, axis=3)
    inside = of_kind("elastic_transform", ramp)[0, 8:24, 8:24, 0].astype(np.float64)
    design = np.stack([np.ones(256), rows[8:24, 8:24].ravel(), columns[8:24, 8:24].ravel()], axis=1)
    _, residual, *_ = np.linalg.lstsq(design, inside.ravel(), rcond=None)
    assert residual[0] / 256 < 0.5, "but for rounding"


def test_clouds_fill_their_range():
    field = plasma(Draws(5, (0, 1, 2)), 20, decay=3.0)
    assert field.shape == (3, 20, 20) and field.min() >= 0.0 and field.max() <= 1.0
    steps = np.abs(np.diff(field, axis=2)).mean()
    assert steps < 0.15 < field.std() * 2, "smooth, and not flat"

import io
import pickle
import random
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from PIL import Image

from fullbatch.data import images
from fullbatch.data.images import EvalTransform, TrainTransform, decode, random_crop
from fullbatch.data.sample import BadSample
from tests.data.making import encoded, jpeg, picture, png

SIZES = [(256, 256), (300, 500), (640, 480), (37, 50), (224, 224), (1, 1), (3, 900), (901, 40), (257, 129)]


def rough(size, seed=0):
    """Noise over a smooth picture: resizing it badly shows."""
    noise = np.random.default_rng(seed).integers(-40, 40, (size[1], size[0], 3))
    return Image.fromarray((np.asarray(picture(size, seed)).astype(int) + noise).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_agrees_with_open_clip(size):
    open_clip = pytest.importorskip("open_clip")
    theirs = open_clip.image_transform(64, is_train=False, mean=(0, 0, 0), std=(1, 1, 1))
    raw = encoded(rough(size), "JPEG", quality=95)
    wanted = theirs(Image.open(io.BytesIO(raw))) * 255
    found = EvalTransform(64)(raw, "x")
    assert found.shape == (3, 64, 64) and found.dtype == torch.uint8 and found.is_contiguous()
    difference = (found - wanted).abs()
    assert difference.max() <= 1.01 and difference.mean() < 0.3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [jpeg, png])
def test_training_crops(size, kind):
    transform = pickle.loads(pickle.dumps(TrainTransform(64, crop=(0.5, 1.0), flip=True)))
    raw = kind(size)
    first, again, other = (transform(raw, "x", random.Random(seed)) for seed in (1, 1, 2))
    assert first.shape == (3, 64, 64) and first.dtype == torch.uint8 and first.is_contiguous()
    assert torch.equal(first, again)
    if max(size) < 3 * min(size) and size != (1, 1):  # the crop of a longer image is its middle
        assert not torch.equal(first, other)


@pytest.mark.parametrize("size", [(300, 300), (512, 400), (1000, 800)])
def test_a_training_crop_is_the_crop_resized_by_pillow(size):
    for seed in range(5):
        raw = encoded(rough(size), "JPEG", quality=95)
        left, top, width, height = random_crop(*size, (0.9, 1.0), random.Random(seed))
        crop = Image.open(io.BytesIO(raw)).crop((left, top, left + width, top + height))
        wanted = crop.resize((201, 201), Image.Resampling.BICUBIC)
        found = TrainTransform(201)(raw, "x", random.Random(seed))
        difference = (found.permute(1, 2, 0).float() - torch.from_numpy(np.array(wanted))).abs()
        assert difference.max() <= 1


# -- JPEGs decoded at reduced size -------------------------------------------------------------------------------------


def change(image, wanted):
    return np.abs(np.asarray(image).astype(int) - np.asarray(wanted))


@pytest.mark.parametrize(("size", "scale"), [(100, 2), (50, 4), (26, 8)])
@pytest.mark.parametrize("photo", ["china.jpg", "flower.jpg"])
def test_a_reduced_photo_changes_less_than_jpeg_would(photo, size, scale):
    """Beside the photo decoded in full, and beside keeping that as a JPEG of quality 95 with all of its colours."""
    raw = (Path(find_spec("sklearn").origin).parent / "datasets" / "images" / photo).read_bytes()
    whole = decode(raw, "x", 10**6)
    crop = random_crop(*whole.size, (0.9, 1.0), random.Random(0))
    left, top, width, height = (pixels // scale * scale for pixels in crop)
    square = whole.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BICUBIC)
    found = change(TrainTransform(size)(raw, "x", random.Random(0)).permute(1, 2, 0), square)
    kept = change(Image.open(io.BytesIO(encoded(square, "JPEG", quality=95, subsampling=0))), square)
    assert 0.3 < found.mean() < 0.6 * kept.mean() and 2 <= found.max() < kept.max()


@pytest.mark.parametrize("size", [(127, 140), (128, 128), (257, 130), (255, 300), (257, 256), (511, 513), (1000, 700)])
def test_a_reduced_crop_is_two_to_four_times_the_square(size, monkeypatch):
    crops, resized = [], images._resized

    def watched(pixels_CHW, height, width):
        crops.append(pixels_CHW.shape[1:])
        return resized(pixels_CHW, height, width)

    monkeypatch.setattr(images, "_resized", watched)
    for seed in range(8):
        TrainTransform(32, crop=(0.5, 1.0))(jpeg(size), "x", random.Random(seed))
        short = min(random_crop(*size, (0.5, 1.0), random.Random(seed))[2:])
        assert min(64, short) <= min(crops.pop()) <= 128


EXIF = Image.Exif()
EXIF[0x0112] = 6
KINDS = {
    "progressive": {"progressive": True},
    "all colours": {"subsampling": 0},
    "half of the colours": {"subsampling": 1},
    "RGB inside": {"keep_rgb": True},
    "turned": {"exif": EXIF},
    "restarts": {"restart_marker_blocks": 3},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
}


def jpeg_of(kind):
    options = dict(KINDS[kind])
    return encoded(rough((211, 160)).convert(options.pop("mode", "RGB")), "JPEG", quality=90, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_jpeg_can_be_reduced(kind):
    raw = jpeg_of(kind)
    reduced = TrainTransform(20)(raw, "x", random.Random(0))
    whole = TrainTransform(20)(encoded(decode(raw, "x", 10**6)), "x", random.Random(0))  # as a PNG
    assert (reduced.float() - whole.float()).abs().mean() < 6


@pytest.mark.parametrize("size", [20, 100])  # at reduced size and in full
def test_a_cut_jpeg_is_a_bad_sample(size):
    raw = encoded(rough((211, 160)), "JPEG")
    for cut in (raw[: len(raw) // 2], raw[:-20], raw[:-2]):
        for transform in (TrainTransform(size), EvalTransform(size)):
            with pytest.raises(BadSample, match="image file is truncated"):
                transform(cut, "x", random.Random(0))


def outcome(size, raw):
    try:
        return TrainTransform(size)(raw, "x", random.Random(0)).tolist()
    except BadSample as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_simplejpeg_changes_nothing(kind, monkeypatch):
    """Neither at reduced size nor in full, nor in what becomes of damaged files."""
    pytest.importorskip("simplejpeg")
    rng = np.random.default_rng(0)
    files = [jpeg_of(kind)]
    for _ in range(15):
        damaged = bytearray(files[0])
        damaged[rng.integers(2, len(damaged))] = rng.integers(256)
        files.append(bytes(damaged))
    found = [outcome(size, raw) for size in (20, 100) for raw in files]
    monkeypatch.setattr(images, "simplejpeg", None)
    assert found == [outcome(size, raw) for size in (20, 100) for raw in files]


def test_flips_half_of_the_images():
    raw = png((64, 64))
    flipped = 0
    for seed in range(200):
        plain, maybe = (TrainTransform(32, flip=flip)(raw, "x", random.Random(seed)) for flip in (False, True))
        assert torch.equal(maybe, plain) or torch.equal(maybe, plain.flip(2))
        flipped += not torch.equal(maybe, plain)
    assert 80 <= flipped <= 120


def test_crops_are_drawn_as_torchvision_draws_them():
    crops = pytest.importorskip("torchvision.transforms").RandomResizedCrop
    rng = random.Random(0)
    for width, height in ((400, 300), (300, 300), (1000, 100), (50, 700)):
        ours = np.array([random_crop(width, height, (0.6, 0.9), rng) for _ in range(3000)])
        image = torch.empty(3, height, width)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = [crops.get_params(image, [0.6, 0.9], [3 / 4, 4 / 3]) for _ in range(3000)]
        theirs = np.array([(j, i, w, h) for i, j, h, w in drawn])
        assert np.abs(ours.mean(0) - theirs.mean(0)).max() <= 0.02 * max(width, height)
        assert np.abs(ours.std(0) - theirs.std(0)).max() <= 0.02 * max(width, height)
        assert (ours[:, 0] + ours[:, 2]).max() <= width and (ours[:, 1] + ours[:, 3]).max() <= height


def test_a_large_jpeg_is_reduced_where_that_is_asked_for(monkeypatch):
    raw, loaded, honest = jpeg((800, 600)), [], images.load_rgb
    monkeypatch.setattr(images, "simplejpeg", None)
    monkeypatch.setattr(images, "load_rgb", lambda image, name: loaded.append(image.size) or honest(image, name))
    for transform in (EvalTransform(32), EvalTransform(32, full_pixels=480_000), EvalTransform(32, full_pixels=1)):
        transform(raw, "x")
    assert loaded == [(800, 600), (800, 600), (100, 75)]
    monkeypatch.undo()
    whole, reduced = (EvalTransform(32, full_pixels=most)(raw, "x").float() for most in (None, 1))
    assert (whole - reduced).abs().mean() < 2.0


def test_the_crop_keeps_its_share_of_the_area():
    rng = random.Random(0)
    shares = [w * h / 120_000 for _, _, w, h in (random_crop(400, 300, (0.3, 0.5), rng) for _ in range(500))]
    assert 0.29 < min(shares) < max(shares) < 0.51 and 0.38 < mean(shares) < 0.42


def test_bad_images():
    for raw in (b"text", jpeg(), jpeg((8, 8))[:200]):
        with pytest.raises(BadSample, match="n: "):
            TrainTransform(32, max_pixels=100)(raw, "n", random.Random(0))
        with pytest.raises(BadSample, match="n: "):
            EvalTransform(32, max_pixels=100)(raw, "n")
    strip = encoded(Image.new("RGB", (1, 60_000)))
    assert EvalTransform(224)(strip, "strip").shape == (3, 224, 224)  # resized as a whole it would take 9 GB

import struct
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from fullbatch.data.images import decode
from fullbatch.data.sample import BadSample
from tests.data.making import encoded, jpeg, picture, png

LIMIT = 50_000_000


@pytest.fixture(autouse=True)
def _no_warning_leaks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pixels(raw, max_pixels=LIMIT):
    image = decode(raw, "x", max_pixels)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(kind):
    wanted = np.asarray(picture()).astype(int)
    assert np.abs(pixels(encoded(picture(), kind)) - wanted).mean() < 12


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width, height, depth, colour, rows):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_by_its_header():
    bomb = png_of(60_000, 60_000, 8, 2, bytes(1000))
    assert len(bomb) < 200
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(BadSample, match="60000 x 60000 pixels, more than the limit of 50,000,000"):
        decode(bomb, "bomb.png", LIMIT)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_the_limit_is_ours_not_pils(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert pixels(jpeg()).shape == (24, 32, 3)
    with pytest.raises(BadSample, match="the limit of 767"):
        decode(jpeg(), "x", 767)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>404</html>",
        b"\xff\xd8\xff",
        b"BM",
        jpeg()[: len(jpeg()) // 2],
        png()[: len(png()) // 2],
        encoded(picture(), "WEBP")[:60],
        encoded(picture(), "TIFF")[:100],
        encoded(picture(), "GIF")[:40],
        png_of(0, 5, 8, 2, b""),
        png_of(5, 5, 8, 2, b""),
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
    ],
)
def test_broken_bytes_are_a_bad_sample(raw):
    with pytest.raises(BadSample, match=r"x\.jpg: "):
        decode(raw, "x.jpg", LIMIT)


def test_mutated_bytes_never_crash():
    rng = np.random.default_rng(0)
    sources = [jpeg((48, 48)), png(), *(encoded(picture(), kind) for kind in ("WEBP", "GIF", "BMP", "TIFF"))]
    for _ in range(300):
        raw = bytearray(sources[rng.integers(len(sources))])
        for place in rng.integers(4, len(raw), rng.integers(1, 6)):
            raw[place] = rng.integers(256)
        with suppress(BadSample):
            assert pixels(bytes(raw)).ndim == 3


def test_transparency_is_composed_on_white():
    half = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    half.putpixel((1, 0), (0, 0, 0, 0))
    assert pixels(encoded(half)).tolist() == [[[200, 0, 0], [255, 255, 255]]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert pixels(encoded(palette, transparency=bytes([255, 0]))).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert pixels(encoded(palette, "GIF", transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert pixels(encoded(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))).tolist() == [[[255] * 3]]
    assert pixels(encoded(Image.new("LA", (1, 1), (0, 128)))).tolist() == [[[127] * 3]]


def test_deep_and_grey_images():
    deep = np.array([[0, 256 * 100, 65535]], np.uint16)
    assert pixels(encoded(Image.fromarray(deep)))[0, :, 0].tolist() == [0, 100, 255]
    assert pixels(encoded(Image.fromarray(deep), "TIFF"))[0, :, 2].tolist() == [0, 100, 255]
    assert pixels(encoded(Image.fromarray(np.array([[7]], np.uint8)))).tolist() == [[[7, 7, 7]]]
    assert pixels(encoded(Image.new("1", (1, 1), 1))).tolist() == [[[255, 255, 255]]]
    assert pixels(encoded(picture().convert("L"), "JPEG")).shape == (24, 32, 3)
    with pytest.raises(BadSample, match="floating-point"):
        decode(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), "x", LIMIT)


def test_cmyk():
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.abs(pixels(encoded(red, "JPEG")) - [255, 0, 0]).max() < 8
    assert np.abs(pixels(encoded(red, "TIFF")) - [255, 0, 0]).max() < 8


def test_exif_orientation_is_ignored_as_in_open_clip():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert pixels(encoded(picture(), "JPEG", exif=exif)).shape == (24, 32, 3)
    assert pixels(encoded(picture(), "JPEG", exif=b"Exif\0\0garbage")).shape == (24, 32, 3)

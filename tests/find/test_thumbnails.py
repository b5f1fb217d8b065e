"""What a page shows of a file: its pixels, upright and small, and nothing else."""

import io

import numpy as np
import pytest
from PIL import Image

from fullbatch.data.sample import BadSample
from fullbatch.find.thumbnails import SMALL, jpeg_of


def encoded(image, form="jpeg", **options):
    raw = io.BytesIO()
    image.save(raw, form, **options)
    return raw.getvalue()


def shown(raw, side=SMALL):
    return Image.open(io.BytesIO(jpeg_of(raw, "it", side)))


def test_the_longer_side_is_as_asked_and_nothing_is_enlarged():
    assert shown(encoded(Image.new("RGB", (1000, 400)))).size == (256, 102)
    assert shown(encoded(Image.new("L", (400, 1000)), "png")).size == (102, 256)
    assert shown(encoded(Image.new("RGB", (30, 20)), "webp")).size == (30, 20)
    assert shown(encoded(Image.new("RGB", (5000, 1))), 100).size == (100, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_stands_upright(orientation):
    """Red is in the upper left corner of the scene, however the camera was held."""
    scene = Image.new("RGB", (60, 40), "blue")
    scene.paste("red", (0, 0, 30, 20))
    back = {  # how a camera stores the scene that its note turns upright again
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = scene if back is None else scene.transpose(back)
    pixels = np.asarray(shown(encoded(stored, quality=95, exif=exif))).astype(int)
    assert pixels.shape == (40, 60, 3)
    assert pixels[5, 5, 0] > 200 and pixels[5, 55, 2] > 200 and pixels[35, 5, 2] > 200


def test_nothing_but_pixels_is_kept():
    exif = Image.Exif()
    exif[0x010E] = "where I live"
    raw = encoded(Image.new("RGB", (60, 40)), exif=exif, comment=b"a secret") + b"<script>alert(1)</script>"
    made = jpeg_of(raw, "it", SMALL)
    assert b"where I live" in raw and not [text for text in (b"live", b"secret", b"script") if text in made]


def test_broken_notes_of_a_camera_do_not_matter():
    raw = encoded(Image.new("RGB", (60, 40)), exif=b"Exif\0\0garbage")
    assert shown(raw).size == (60, 40)


def test_what_is_no_picture_is_refused():
    for raw in (b"", b"<svg/>", encoded(Image.new("RGB", (60, 40)), "png")[:50]):
        with pytest.raises(BadSample):
            jpeg_of(raw, "it", SMALL)

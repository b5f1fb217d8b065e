"""Pictures for a page: always made anew from their pixels, so that nothing else of a file reaches a browser."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from fullbatch.data.cache_folder import write_atomically
from fullbatch.data.images import load_rgb, open_image
from fullbatch.data.sample import MAX_IMAGE_BYTES, BadSample, read_file
from fullbatch.encoder import MAX_PIXELS
from fullbatch.find.index import THUMBNAILS, IndexedFile, PictureIndex, digest_of

SMALL, LARGE = 256, 1600  # pixels of the longer side
_QUALITY = 82


def jpeg_of(raw: bytes, name: str, side: int) -> bytes:
    """At most ``side`` pixels long, and upright; BadSample where the bytes are no picture."""
    image = open_image(raw, name, MAX_PIXELS)
    if isinstance(image, JpegImageFile):
        image.draft("RGB", (2 * side, 2 * side))  # a large one is decoded at 1/2, 1/4 or 1/8
    with suppress(Exception):  # EXIF data are others' bytes, and may be anything
        ImageOps.exif_transpose(image, in_place=True)
    picture = load_rgb(image, name)
    picture.info.clear()  # Pillow would write a comment into the new file
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    picture.save(written, "jpeg", quality=_QUALITY)
    return written.getvalue()


@dataclass(frozen=True)
class Thumbnails:
    """Of the pictures of an index, made once and kept in it."""

    index: PictureIndex

    def small(self, entry: IndexedFile) -> bytes:
        digest = str(entry.digest)
        kept = self.index.place / THUMBNAILS / digest[:2] / f"{digest}.jpg"
        with suppress(OSError):
            return kept.read_bytes()
        made = jpeg_of(self.bytes_of(entry), entry.path, SMALL)
        with suppress(OSError):  # an index that cannot be written: then it is made each time
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, lambda file: file.write(made))
        return made

    def large(self, entry: IndexedFile) -> bytes:
        return jpeg_of(self.bytes_of(entry), entry.path, LARGE)

    def bytes_of(self, entry: IndexedFile) -> bytes:
        """Those that were indexed, and no others: what lies at the path by now may be anything."""
        raw = read_file(entry.path, str(self.index.folder / entry.path), MAX_IMAGE_BYTES)
        if digest_of(raw) != entry.digest:
            raise BadSample(entry.path, "the file has changed since it was indexed")
        return raw

"""The page's pictures: small, each kept once however often it is shown."""

from __future__ import annotations

import base64
import hashlib
import io

from PIL import Image, features

from fullbatch.data.images import decode
from fullbatch.data.sample import BadSample

LARGEST = 128  # pixels a side


class Pictures:
    """Add encoded images, get numbers; later all of them as data URIs in whatever size the page can afford."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self._numbers: dict[bytes, int] = {}
        self._kept: list[Image.Image] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, raw: bytes, name: str) -> int | None:
        """The picture's number; None if it cannot be decoded."""
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        if digest not in self._numbers:
            try:
                image = decode(raw, name, self.max_pixels)
            except BadSample:
                return None
            image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
            self._numbers[digest] = len(self._kept)
            self._kept.append(image)
        return self._numbers[digest]

    def encoded(self, side: int, quality: int) -> list[str]:
        """A data URI a picture, in the order of the numbers."""
        kind, mime = ("WEBP", "webp") if features.check("webp") else ("JPEG", "jpeg")
        uris = []
        for kept in self._kept:
            image = kept.copy()
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, kind, quality=quality)
            uris.append(f"data:image/{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}")
        return uris

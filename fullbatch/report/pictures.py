"""The page's pictures: small, each kept once however often it is shown; and the cards they stand on."""

from __future__ import annotations

import base64
import hashlib
import io

from PIL import Image, features

from fullbatch.config.shown import plain
from fullbatch.data.decode import decode
from fullbatch.data.sample import BadSample
from fullbatch.report.embedded import Embedded
from fullbatch.report.markup import Child, Html, node, quoted

CAPTION = 160  # characters shown of a caption
_LARGEST = 128  # pixels a side


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
            image.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
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

    def shown(self, embedded: Embedded, row: int) -> Html:
        """A sample's picture, read from its pool."""
        raw = embedded.read(row)
        number = self.add(raw.image, raw.name) if raw is not None else None
        if number is None:
            return node("span", "no picture", class_="missing")
        return node("img", data_picture=number, alt=plain(embedded.captions[row], CAPTION))

    def card(self, embedded: Embedded, first: int, other: int | None, reason: Child) -> Html:
        """One sample, or two side by side, with their captions and ids."""
        sides = [
            node(
                "div",
                self.shown(embedded, row),
                node("p", quoted(embedded.captions[row], CAPTION)),
                node("p", f"id {embedded.ids[row]}", class_="id"),
                class_="side",
            )
            for row in (first, other)
            if row is not None
        ]
        return node("div", node("div", sides, class_="sides"), node("p", reason, class_="reason"), class_="card pair")

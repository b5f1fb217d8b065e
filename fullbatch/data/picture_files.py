"""Pictures that a table names: files on this machine, or URLs.

A picture by URL is small: one request fetches all of it.  It is kept among the blocks of the cache, with its version
and the time of asking.  A run believes what was asked since it began, so later epochs and evaluations ask for nothing;
outside a run that is what was asked since the table was opened.  What is older is asked for again, unless it is of the
version that is kept: a picture that was replaced between two runs is noticed, as it is on a disk, and others are not
sent twice (web servers and S3; other stores name no version with a file, so each run fetches its own).

A picture that is gone is a bad sample.  A store that is down, or refuses us, ends the run, as it does for shards."""

from __future__ import annotations

import os
import posixpath
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from fullbatch.config.data import is_url
from fullbatch.data.block_cache import BlockCache, block_cache
from fullbatch.data.remote import fetch_whole
from fullbatch.data.sample import MAX_IMAGE_BYTES, BadSample, checked_image, fingerprint_of, read_image
from fullbatch.data.store_requests import Unusable, shown

_USUAL_BYTES = 1 << 20  # of a picture; most are smaller, and the cache has room for some that are three times as large
_HEADER = struct.Struct("<dH")  # when it was asked for; bytes of its version, which follows


_run_began: ContextVar[float | None] = ContextVar("run_began", default=None)


@contextmanager
def one_run() -> Iterator[None]:
    """All tables that are opened meanwhile believe what was asked since now."""
    token = _run_began.set(time.time())
    try:
        yield
    finally:
        _run_began.reset(token)


@dataclass(frozen=True)
class PictureFiles:
    """Relative paths start at ``root``, a folder or a URL, and may not leave it."""

    root: str
    opened: float = field(default_factory=lambda: _run_began.get() or time.time())

    @classmethod
    def beside(cls, table: str, root: str) -> PictureFiles:
        """Of a table that may have a root of its own."""
        if root:
            return cls(root.removeprefix("file://"))
        return cls(table.rpartition("/")[0] if is_url(table) else os.path.dirname(os.path.abspath(table)))

    def place(self, path: str) -> str:
        """The picture's URL, or its path on this machine: the same for all ways to write it."""
        path = path.removeprefix("file://")
        if is_url(path):
            return path
        if os.path.isabs(path) or not is_url(self.root):
            return os.path.normpath(os.path.join(self.root, path))
        relative = posixpath.normpath(path)
        is_web = self.root.startswith(("http://", "https://"))
        return f"{self.root.rstrip('/')}/{quote(relative, errors='surrogateescape') if is_web else relative}"

    def read(self, label: str, path: str) -> bytes:
        picture = self.remote(label, path)
        if picture is None:
            return read_image(label, self.root, path.removeprefix("file://"))
        try:
            return checked_image(label, picture.read())
        except Unusable as error:
            raise BadSample(label, str(error).rstrip(".")) from None

    def remote(self, label: str, path: str) -> RemotePicture | None:
        """None: it lies on this machine."""
        place = self.place(path)
        if not is_url(place):
            return None
        if not path or "\0" in path:
            raise BadSample(label, f"{shown(path)!r} is not an image path")
        if not is_url(path) and posixpath.normpath(path).split("/")[0] == "..":
            raise BadSample(label, f"{path!r} leads out of {self.root!r}; say where images start with ?root=URL")
        return RemotePicture(place, self.opened)


@dataclass(frozen=True)
class RemotePicture:
    url: str
    since: float

    @property
    def name(self) -> str:
        return f"{fingerprint_of('picture', self.url)}{fingerprint_of(self.url)}-whole"

    @property
    def size(self) -> int:
        return _USUAL_BYTES

    def keep(self) -> None:
        cache = block_cache()
        if cache is not None and cache.keeps:  # else it would be fetched in vain
            self.read(tries=1)  # whoever needs it tries on

    def read(self, tries: int | None = None) -> bytes:
        cache = block_cache()
        if cache is None:
            return _Picture.fetched(self.url, None, tries).image
        kept = _Picture.kept(cache, self.name)
        if kept is None or not kept.is_of(self.since):
            with cache.fetching(self.name):
                kept = _Picture.kept(cache, self.name)  # another process may have fetched it meanwhile
                if kept is None or not kept.is_of(self.since):
                    kept = _Picture.fetched(self.url, kept, tries)
                    cache.put(self.name, kept.packed())
        return kept.image


class _Picture(NamedTuple):
    asked: float
    version: str
    image: bytes

    @classmethod
    def fetched(cls, url: str, old: _Picture | None, tries: int | None) -> _Picture:
        asked = time.time()
        image, version = fetch_whole(url, MAX_IMAGE_BYTES, old.version if old else "", tries)
        if image is None:
            assert old is not None
            image = old.image
        return cls(asked, version, image)

    @classmethod
    def kept(cls, cache: BlockCache, name: str) -> _Picture | None:
        raw = cache.get(name)
        if not raw:  # None, or all was lost
            return None
        asked, length = _HEADER.unpack_from(raw)
        start = _HEADER.size + length
        return cls(asked, raw[_HEADER.size : start].decode("utf-8", "surrogateescape"), raw[start:])

    def packed(self) -> bytes:
        version = self.version.encode("utf-8", "surrogateescape")
        return _HEADER.pack(self.asked, len(version)) + version + self.image

    def is_of(self, since: float) -> bool:
        """Asked for by a run that began then; no time to come, where a clock was set back."""
        return since <= self.asked <= time.time()

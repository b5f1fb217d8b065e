"""Files in object stores and on web servers (s3, gs, hf, http, https), read by ranges through fsspec.

A file is looked up once, before the run: its size and its version (what the store says: generation, ETag, checksum or
time).  From then on it is the file of that version.  Indexes and blocks are kept under URL, size and version, so a file
that was replaced is never read from an old cache; one that is replaced in the middle of a run ends the run, since ids
and images would no longer belong together.  To that end a range counts as read when the answer names the version (S3,
web servers), or when the store names it afterwards: one request more a block, which every store understands, where
conditional reads differ from store to store.

A request that fails in passing (a broken connection, a stall, 429 or 5xx, too few bytes) is made again, five times in
all, after 1, 2, 4 and 8 seconds, and the log says so.  What lasts is a StoreError, one sentence with the URL, and ends
the run: a store that is down, or refuses us, is no bad sample; another in its place would change the order.  We count
these tries, so the clients' own are switched off where they can be.

Ranges are read as whole blocks of 4 MiB into a cache on this machine's disk (block_cache.py).  Members of a tar shard
follow each other, so a block that one sample needs holds its neighbours too; `--shuffle blocks` asks for them soon.

Credentials come from where the store's own client looks for them (environment, files in the home folder, the machine's
role).  A URL with a user, a password or a query of its own is refused when it is parsed (config/data.py); what is told
of an error leaves out queries, for redirects may carry signatures.  Clients do not survive a fork: each process makes
its own, and keeps its parent's untouched, because closing those would take connections away from the parent."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ssl import CertificateError
from typing import Any, Literal, TypeVar

import numpy as np

from fullbatch.config.extras import require_extra
from fullbatch.config.messages import listed, plain
from fullbatch.data.block_cache import BLOCK_BYTES, BlockCache, block_cache
from fullbatch.data.order import Ints
from fullbatch.data.sample import fingerprint_of
from fullbatch.data.store_requests import (
    Passing,
    StoreError,
    Unusable,
    check_size,
    code_of,
    no_parts,
    s3_range,
    s3_whole,
    shown,
    status_of,
    web_range,
    web_whole,
    without_user,
)

_PACKAGES = {  # the package that a protocol needs, and the extra that brings it
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "hf": ("huggingface_hub", "remote"),
    "http": ("aiohttp", "remote"),
    "https": ("aiohttp", "remote"),
    "memory": ("fsspec", "remote"),
}
_HTTP = {"client_kwargs": {"trust_env": True, "headers": {"Accept-Encoding": "identity"}}}  # proxies; bytes as they lie
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}}},
    "http": _HTTP,
    "https": _HTTP,
}
_RANGES = {"http": web_range, "https": web_range, "s3": s3_range}
_WHOLES = {"http": web_whole, "https": web_whole, "s3": s3_whole}
_VERSIONS = (  # what stores call it, the surest first
    "generation", "ETag", "etag", "Content-MD5", "Digest", "blob_id", "xet_hash", "Last-Modified", "LastModified",
    "updated", "mtime", "created",
)  # fmt: skip
_TRIES = 5
_FIRST_WAIT = 1.0  # seconds; each wait is twice the one before
_STALLED = 60.0  # seconds for one request
_GONE = (404, 410, 414)  # 414: no server has files with such long names
_PASSING = (408, 425, 429)  # of the answers 400 to 499; others will not change
# of S3's 400s, those that refuse us; 400 itself is all that is heard where an answer has no body
_TOKENS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed", "400")


log = logging.getLogger("fullbatch")

Result = TypeVar("Result")


def protocol_of(url: str) -> str:
    return url.partition("://")[0]


@functools.lru_cache(1 << 16)
def _key_of(url: str, size: int, version: str) -> str:
    return fingerprint_of(url, size) + fingerprint_of(version)


@dataclass(frozen=True)
class RemoteFile:
    """One version of a remote file."""

    url: str
    size: int
    version: str

    @property
    def key(self) -> str:
        """Names this version in the cache."""
        return _key_of(self.url, self.size, self.version)

    def read(self, offset: int, size: int) -> bytes:
        """These bytes, by way of the cache; fewer only at the end of the file."""
        cache, stop = block_cache(), min(offset + size, self.size)
        if stop <= offset:
            return b""
        if cache is None:
            return self.fetch(offset, stop - offset)
        numbers = range(offset // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        return b"".join(RemoteBlock(self, number).read(cache, offset, stop) for number in numbers)

    def fetch(self, offset: int, size: int, tries: int | None = None) -> bytes:
        """These bytes from the store; all of them, and of this version."""
        return _tried(self.url, lambda: self._of_this_version(offset, size), tries)

    def _of_this_version(self, offset: int, size: int) -> bytes:
        try:
            raw, version = self._range(offset, size)
        except Exception as error:
            if isinstance(error, Passing) or status_of(error) == 416:  # it may be shorter now
                self._check_still_there()
            raise
        if version and version.removeprefix("W/") == self.version.removeprefix("W/"):
            return raw
        self._check_still_there()
        if version.endswith('"') and self.version.endswith('"'):  # ETags of two copies, of which one is older
            raise Passing(f"its bytes came with version {version}, and the store says it is {self.version}")
        return raw

    def _check_still_there(self) -> None:
        now = look_up(self.url)
        if now != self:
            raise StoreError(
                f"{self.url!r} was replaced during the run (it had {self.size:,} bytes, version {self.version!r}; now "
                f"{now.size:,}, {now.version!r}); start the run again with files that stay as they are."
            )

    def _range(self, offset: int, size: int) -> tuple[bytes, str]:
        """The bytes, and the version as far as the answer names it."""
        raw: bytes
        version = ""
        ask = _RANGES.get(protocol_of(self.url))
        if ask is not None:
            raw, version = _ask(self.url, ask, start=offset, end=offset + size)
        else:
            raw = _ask(self.url, "cat_file", start=offset, end=offset + size)
        if len(raw) > size:
            raise no_parts(self.url)
        if len(raw) < size:
            raise Passing(f"{len(raw):,} bytes came of {size:,}")
        return raw, version


@dataclass(frozen=True)
class RemoteBlock:
    """Of those of a remote file that are kept on this machine."""

    file: RemoteFile
    number: int

    @property
    def name(self) -> str:
        return f"{self.file.key}-{self.number}"

    @property
    def size(self) -> int:
        return self._span[1]

    @property
    def _span(self) -> tuple[int, int]:
        """Where it begins in the file, and its length."""
        first = self.number * BLOCK_BYTES
        return first, min(BLOCK_BYTES, self.file.size - first)

    def read(self, cache: BlockCache, start: int, stop: int) -> bytes:
        """What it holds of these bytes of the file."""
        first, length = self._span
        start, stop = max(start - first, 0), min(stop - first, length)
        there = cache.get(self.name, length, start, stop)
        if there is None and not cache.keeps:
            return self.file.fetch(first + start, stop - start)  # and not the rest, which would be lost
        return self._fetched(cache, start, stop) if there is None else there

    def keep(self) -> None:
        cache, (_, length) = block_cache(), self._span
        if cache is not None and cache.keeps and not cache.holds(self.name, length):
            self._fetched(cache, 0, 0, tries=1)  # whoever reads it tries on

    def _fetched(self, cache: BlockCache, start: int, stop: int, tries: int | None = None) -> bytes:
        first, length = self._span
        with cache.fetching(self.name):
            there = cache.get(self.name, length, start, stop)  # another process may have fetched it meanwhile
            if there is None:
                block = self.file.fetch(first, length, tries)
                cache.put(self.name, block)
                there = block[start:stop]
        return there


def blocks_of(files: Sequence[object], which_P: Ints, starts_P: Ints, stops_P: Ints) -> list[RemoteBlock]:
    """Of bytes ``starts_P`` to ``stops_P`` of files number ``which_P``, each once; files on this machine have none."""
    spans_P3 = np.stack([which_P, starts_P // BLOCK_BYTES, -(-stops_P // BLOCK_BYTES)], 1)
    numbers = {
        (which, number): None
        for which, first, stop in np.unique(spans_P3, axis=0).tolist()
        for number in range(first, stop)
    }
    return [RemoteBlock(file, number) for which, number in numbers if isinstance(file := files[which], RemoteFile)]


def fetch_whole(url: str, limit: int, known: str = "", tries: int | None = None) -> tuple[bytes | None, str]:
    """A file of at most ``limit`` bytes by one request, and its version if the answer names it.  The version that is
    known already is not sent again: None."""
    if protocol_of(url) not in _PACKAGES:
        raise Unusable(_no_store(url))
    ask = _WHOLES.get(protocol_of(url))
    if ask is not None:
        whole: tuple[bytes | None, str] = _tried(url, lambda: _ask(url, ask, limit=limit, known=known), tries)
        return whole
    raw: bytes = _tried(url, lambda: _ask(url, "cat_file", end=limit + 1), tries)
    check_size(url, len(raw), limit)
    return raw, ""


class RemoteStream(io.RawIOBase):
    """A remote file as one that can be read and sought."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        raw = self._file.read(self._at, len(buffer))
        buffer[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)


def look_up(url: str) -> RemoteFile:
    """The file as it is now."""
    info: dict[str, Any] = _tried(url, lambda: _ask(url, "info"))
    size = info.get("size")
    if info.get("type") == "directory":
        raise ValueError(f"{url!r} is a folder; name the files in it: {url.rstrip('/')}/*.tar.")
    if not isinstance(size, int) or info.get("partial") is False:
        raise no_parts(url)  # one that does not say how long a file is does not either
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    if not version:
        _warn_of_no_version("/".join(url.split("/")[:3]))
    return RemoteFile(url, size, version)


@functools.cache
def _warn_of_no_version(server: str) -> None:
    log.warning(
        "%s sends no ETag or time of its files: one that another of its size replaces goes unnoticed.",
        server,
    )


def matching(pattern: str) -> list[str]:
    """The URLs that match a glob, sorted."""
    if protocol_of(pattern) in ("http", "https"):
        raise ValueError(f"{pattern!r}: a web server lists no files; write them out, as in {{00000..00331}}.tar.")
    paths = sorted(_tried(pattern, lambda: _listed(pattern)))
    if not paths:
        raise ValueError(f"Nothing matches {pattern!r}.")
    return [f"{protocol_of(pattern)}://{path.lstrip('/')}" for path in paths]


def _listed(pattern: str) -> list[str]:
    """As fsspec's glob, which however goes through folders one by one, and passes over those that it fails to list."""
    store, known = _store_of(pattern), re.split(r"[*?\[]", pattern)[0]
    folder, _, stem = known.rpartition("/")
    if not store.async_impl or "/" not in pattern[len(known) :] or folder.endswith("/"):
        found: list[str] = _ask(pattern, "glob")
        return found
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(store._strip_protocol(pattern))).match
    return [path for path in _ask(folder, "find", prefix=stem) if matches(path)]


def _ask(url: str, ask: str | Callable[..., Any], **arguments: Any) -> Any:
    """One request, by the name of a method of fsspec's, within the time that one may take; or by a function of ours,
    which sees to it that bytes keep coming: how long a large file takes is the network's affair."""
    store = _store_of(url)
    if ask in ("info", "glob", "find"):
        store.invalidate_cache()  # of listings: a file may have changed since
    if not store.async_impl:
        assert isinstance(ask, str)
        return getattr(store, ask)(url, **arguments)
    from fsspec.asyn import sync

    method = getattr(store, f"_{ask}") if isinstance(ask, str) else functools.partial(ask, store)
    path = store._strip_protocol(url)
    if isinstance(ask, str):
        limit = None if ask in ("glob", "find") else _STALLED  # of many pages, each within the client's own time
        return sync(store.loop, lambda: asyncio.wait_for(method(path, **arguments), limit))
    return sync(store.loop, lambda: method(path, silence=_STALLED, **arguments))


def _store_of(url: str) -> Any:
    """fsspec's file system, one for all threads of this process, see above: a second one, dropped after it was used,
    would be closed again in every forked worker, which waits a second for a thread that it does not have."""
    with _making[os.getpid()]:
        return _store(protocol_of(url), os.getpid())


_making: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # by process: a copied one may be held for ever


@functools.cache
def _store(protocol: str, process: int) -> Any:
    if protocol not in _PACKAGES:
        raise ValueError(_no_store(protocol))
    package, extra = _PACKAGES[protocol]
    for needed in ("fsspec", package):
        require_extra(needed, extra, f"Reading {protocol}://")
    import fsspec

    store = fsspec.filesystem(protocol, skip_instance_cache=True, **_OPTIONS.get(protocol, {}))
    if protocol == "s3":
        store.retries = 1
    return store


def _no_store(url: str) -> str:
    there = listed([name for name in _PACKAGES if name != "memory"])  # which is for tests
    return f"{protocol_of(url)}:// is no store that can be read; there are {there}, and file."


def _tried(url: str, ask: Callable[[], Result], tries: int | None = None) -> Result:
    """What ``ask`` gives, asked again where it fails in passing."""
    _store_of(url)  # what is wrong with that is the user's to know as it is
    most = _TRIES if tries is None else tries
    for attempt in range(1, most + 1):
        try:
            return ask()
        except StoreError:
            raise
        except Exception as error:  # each client has kinds of its own
            fault, reason = _judged(error)
            if fault != "passing" or attempt == most:
                tried, kind = f" after {most} tries" * (fault == "passing"), Unusable if fault == "file" else StoreError
                raise kind(f"Cannot read {shown(url)!r}{tried}: {reason}.") from None
            wait = _FIRST_WAIT * 2 ** (attempt - 1)
            log.warning("%s: %s; try %d of %d in %g s.", shown(url), reason, attempt + 1, most, wait)
            time.sleep(wait)
    raise AssertionError("the last try gives or raises")


# whose fault it is: nobody's, and it passes; the store's, and the run ends; this file's, and others may be read
_Fault = Literal["passing", "store", "file"]


def _judged(error: BaseException) -> tuple[_Fault, str]:
    """And what happened, as the end of a sentence."""
    status, code = status_of(error), code_of(error)
    if status is not None:
        answered = f"the server answered {status}"
        if status not in range(400, 500) or status in _PASSING or code == "RequestTimeout":
            return "passing", answered
        if status in (401, 403) or code in _TOKENS:
            return "store", f"{answered}; see that the credentials in the environment are this store's and still valid"
        if status == 407:
            return "store", f"{answered}; name the proxy's user and password in the environment, as in HTTPS_PROXY"
        return "file", "there is no such file" if status in _GONE else answered
    if isinstance(error, FileNotFoundError):  # fsspec says so of a web server that it could not reach, too
        return ("file", "there is no such file") if error.__cause__ is None else _judged(error.__cause__)
    kind, told = type(error).__name__, re.sub(r"\?[^\s'\")]*", "?...", without_user(plain(error))).rstrip(".")
    if kind == "NoCredentialsError":
        return "store", f"{told}; the AWS tools' are taken, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for instance"
    if isinstance(error, CertificateError | PermissionError):
        return "store", told or kind
    if kind == "TooManyRedirects":
        return "file", "it leads from one address to another without an end"
    if isinstance(error, ValueError) or kind == "ParamValidationError":
        return "file", told or kind
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "passing", f"no answer in {_STALLED:g} s"
    return "passing", told or kind

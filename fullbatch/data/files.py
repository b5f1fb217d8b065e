"""Files on this machine and in stores, for readers that do not care which."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import IO
from urllib.parse import unquote

from fullbatch.config.data import is_url
from fullbatch.data.block_cache import block_cache
from fullbatch.data.remote import RemoteFile, RemoteStream, look_up

_READ, _READ_BY_URL = 128 << 10, 1 << 20  # bytes at once, of a file that is read in order

AnyFile = str | RemoteFile  # a path on this machine, or a file in a store


def opened(file: AnyFile) -> IO[bytes]:
    return open(file, "rb", _READ) if isinstance(file, str) else io.BufferedReader(RemoteStream(file), _READ_BY_URL)


def name_of(file: AnyFile) -> str:
    return file if isinstance(file, str) else file.url


def size_of(file: AnyFile) -> int:
    return os.path.getsize(file) if isinstance(file, str) else file.size


def name_on_disk(path: str) -> str:
    """A path as it is; of a URL, as the same file would be called on a disk."""
    return unquote(path) if path.startswith(("http://", "https://")) else path


def looked_up(paths: list[str]) -> list[AnyFile]:
    """Files in stores as they are now."""
    if not any(map(is_url, paths)):
        return list(paths)
    block_cache()  # says here if its bound is no number
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda path: look_up(path) if is_url(path) else path, paths))

"""Requests for which fsspec's own would be two, or would not tell the version: of web servers and of S3.  ``silence``
is how long one waits for the next bytes; how long all of them take is the network's affair."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from fullbatch.config.messages import without_password

_USER = re.compile(r"://[^\s/]*@")
_IS_QUOTED = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")


class StoreError(OSError):
    """A remote file cannot be read, and trying again has not helped."""


class Unusable(StoreError):
    """The fault is this file's, not its store's: it is not there, its URL is none, or it is too large."""


class Passing(Exception):
    """An answer that another try may better."""


def shown(url: str) -> str:
    """For errors and logs, which are no place for secrets."""
    path, _, query = without_user(url).partition("?")
    return f"{path}?..." if query else path


def without_user(text: str) -> str:
    return _USER.sub("://...@", without_password(text))


async def web_whole(store: Any, url: str, silence: float, limit: int, known: str) -> tuple[bytes | None, str]:
    from yarl import URL

    session, raw = await store.set_session(), bytearray()
    # a URL that is written as it should be is left so: it may be signed
    as_it_is, headers = _IS_QUOTED.fullmatch(url) is not None, {"If-None-Match": known} if known else {}
    async with session.get(URL(url, encoded=as_it_is), headers=headers, timeout=_patience(silence)) as answer:
        if answer.status == 304:
            return None, known
        answer.raise_for_status()
        check_size(url, answer.content_length or 0, limit)
        async for piece in answer.content.iter_any():
            raw += piece
            check_size(url, len(raw), limit)
        return bytes(raw), answer.headers.get("ETag", "")


async def s3_whole(store: Any, path: str, silence: float, limit: int, known: str) -> tuple[bytes | None, str]:
    """As s3fs's cat_file, which however asks for the size first, and keeps the version to itself."""
    bucket, key, _ = store.split_path(path)
    try:
        unless = {"IfNoneMatch": known} if known else {}
        asked = store._call_s3("get_object", Bucket=bucket, Key=key, **unless)
        answer = await asyncio.wait_for(asked, silence)
    except Exception as error:
        if status_of(error) == 304:
            return None, known
        raise
    async with answer["Body"]:
        check_size(path, answer["ContentLength"], limit)
        raw = await _body_of(answer, silence)
    if len(raw) < answer["ContentLength"]:
        raise Passing(f"{len(raw):,} bytes came of {answer['ContentLength']:,}")
    return raw, answer.get("ETag", "")


def check_size(url: str, size: int, limit: int) -> None:
    if size > limit:
        raise Unusable(f"{shown(url)!r} has more bytes than the limit of {limit:,}.")


def _patience(silence: float) -> Any:
    """Of a web server or a proxy before it: the longest that is waited for its next bytes."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, connect=silence, sock_connect=silence, sock_read=silence)


async def _body_of(answer: Any, silence: float) -> bytes:
    """Of an object in S3, as long as bytes keep coming."""
    pieces = []
    while piece := await asyncio.wait_for(answer["Body"].read(1 << 20), silence):
        pieces.append(piece)
    return b"".join(pieces)


async def web_range(store: Any, url: str, silence: float, start: int, end: int) -> tuple[bytes, str]:
    """As fsspec's cat_file, which however reads a whole file before it can be told from a part."""
    session = await store.set_session()
    headers = {"Range": f"bytes={start}-{end - 1}"}
    async with session.get(store.encode_url(url), headers=headers, timeout=_patience(silence)) as answer:
        answer.raise_for_status()
        if answer.status != 206 and answer.content_length != end - start:
            raise no_parts(url)
        return await answer.read(), answer.headers.get("ETag", "")


async def s3_range(store: Any, path: str, silence: float, start: int, end: int) -> tuple[bytes, str]:
    """As s3fs's cat_file, which however keeps the version to itself."""
    bucket, key, version = store.split_path(path)
    pinned = {"VersionId": version} if version else {}
    span = f"bytes={start}-{end - 1}"
    asked = store._call_s3("get_object", Bucket=bucket, Key=key, Range=span, **pinned, **store.req_kw)
    answer = await asyncio.wait_for(asked, silence)
    try:
        return await _body_of(answer, silence), answer.get("ETag", "")
    finally:
        answer["Body"].close()


def no_parts(url: str) -> StoreError:
    return StoreError(
        f"The server of {url!r} does not serve parts of files; copy the file to a disk, or to a store that does."
    )


def status_of(error: BaseException) -> int | None:
    """The number with which a server answered, as aiohttp, botocore or httpx tell it; also of the error behind it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(status, int):
        return status
    return status_of(error.__cause__) if error.__cause__ is not None else None


def code_of(error: BaseException) -> str | None:
    """What S3 calls it; also of the error behind it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
        return code if isinstance(code, str) else None
    return code_of(error.__cause__) if error.__cause__ is not None else None

"""Where the members of a tar file lie.  Most headers are plain, and two patterns tell all that is wanted of those; what
is not plain (long names, pax and sparse members, links, folders, old formats, damage) is for Python's tarfile, which is
ten times as slow.  The patterns take only what tarfile takes in the same way."""

from __future__ import annotations

import functools
import logging
import re
import tarfile
from collections.abc import Iterator
from zlib import adler32

from fullbatch.data.files import AnyFile, name_of, opened, size_of

BLOCK = 512
_HEAD = re.compile(
    rb"""
    (?=([^\0]{1,100})) .{100}                     # name
    (?: [0-7]{6}[0-7 ]\0 | [\x80\xff].{7} ){3}    # mode, user, group; numbers above 2,097,151 in bytes
    ([0-7]{11})[ \0]                              # size
    [0-7]{11}[ \0]                                # time
    ([0-7]{6})(?: \0[ ] | [ ]\0 )                 # checksum
    0                                             # the type of regular files
    """,
    re.VERBOSE | re.DOTALL,
)
_TAIL = re.compile(
    rb"""
    .{100}                                        # nowhere to link to
    ustar(?: (\0)00 | [ ]{2}\0 )                  # POSIX, or GNU
    .{64}                                         # names of user and group
    (?: [0-7]{6}[0-7 ]\0 | \0{8} ){2}             # of a device
    (?=([^\0]{0,155})) .{167}                     # POSIX: folders before the name
    """,
    re.VERBOSE | re.DOTALL,
)
_ENDS = {"EmptyHeaderError": "it ends without an end mark", "TruncatedHeaderError": "it ends inside a header"}

log = logging.getLogger("fullbatch")


class TarHeader(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> TarHeader:
        """GNU tar keeps times where ustar keeps the first part of a name; tarfile takes them for one."""
        member = super().frombuf(buf, encoding, errors)
        if buf[257:265] == tarfile.GNU_MAGIC and member.type not in tarfile.GNU_TYPES:
            member.name = bytes(buf[:100]).split(b"\0", 1)[0].decode(encoding, errors)
        return member


class _Headers(tarfile.TarFile):
    """tarfile's own ``next`` takes a damaged header for the end of the file."""

    tarinfo = TarHeader

    def next(self) -> tarfile.TarInfo:
        assert self.fileobj is not None
        self.fileobj.seek(self.offset)
        return self.tarinfo.fromtarfile(self)


@functools.lru_cache(256)  # few differ from member to member
def _tail(tail: bytes) -> tuple[bytes, int] | None:
    """What stands before a name, and the sum of the bytes."""
    match = _TAIL.fullmatch(tail)
    if match is None:
        return None
    is_posix, folders = match.groups()
    return folders + b"/" if is_posix and folders else b"", sum(tail)


def _plain(header: bytes) -> tuple[str, int] | None:
    """Name and size of a regular file whose header is plain and has its checksum."""
    match, tail = _HEAD.match(header), _tail(header[157:])
    if match is None or tail is None:
        return None
    name, size, checksum = match.groups()
    # The low half of Adler's is 1 and the sum of the bytes, where those are few; the checksum counts itself as blanks.
    if (adler32(header[:148]) & 0xFFFF) - 1 + 8 * 0x20 + 0x30 + tail[1] != int(checksum, 8):
        return None
    return (tail[0] + name).decode("utf-8", "surrogateescape"), int(size, 8)


def walk_members(shard: AnyFile) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every regular member.  What lies behind a damaged header is lost, with a warning."""
    path, at, end = name_of(shard), 0, size_of(shard)
    try:
        with opened(shard) as file, _Headers(path, "r", file, encoding="utf-8", errors="surrogateescape") as tar:
            while True:
                file.seek(at)
                plain = None if tar.pax_headers else _plain(file.read(BLOCK))  # which speak of all that follow
                if plain is not None:
                    (name, size), start, is_regular = plain, at + BLOCK, True
                    following = start + -(-size // BLOCK) * BLOCK
                else:
                    tar.offset = at
                    member = tar.next()
                    name, size, start, following = member.name, member.size, member.offset_data, tar.offset
                    is_regular = member.isreg() and not member.issparse()
                left = end - start
                if size < 0 or (is_regular and size > left) or following <= at:
                    raise tarfile.HeaderError(f"{name!r} claims {size:,} bytes, {left:,} are left")
                if is_regular:
                    yield name, start, size
                at = following
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError) as damage:
        kind = type(damage).__name__
        if kind != "EOFHeaderError":
            words = _ENDS.get(kind, damage)
            log.warning("%s is damaged at byte %d: %s; samples before it are used.", path, at, words)

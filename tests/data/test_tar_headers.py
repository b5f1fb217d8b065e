"""The quick walk over a tar file's headers finds what tarfile finds, and says of damage what it says."""

import io
import tarfile
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbatch.data import tar_headers
from fullbatch.data.tar_headers import walk_members
from tests.data.making import write_members

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
TYPES = (
    tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE,
    tarfile.CONTTYPE, b"Z",
)  # fmt: skip
LETTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
NAMES = st.one_of(
    st.from_regex(r"[a-z]{1,8}/?[0-9]{1,8}\.(jpg|txt)", fullmatch=True),
    st.text(LETTERS, min_size=1, max_size=20),
    st.builds(
        lambda folder, length: f"{folder * (length // len(folder))}/a.jpg",
        st.sampled_from(["dir/", "größe/", "x"]),
        st.integers(10, 300),
    ),
)


@st.composite
def archives(draw):
    """As tarfile writes them, some with folders, links and devices, with numbers that need more than octal digits."""
    raw = io.BytesIO()
    tar_format = draw(st.sampled_from(FORMATS))
    shared = {"comment": "of all"} if tar_format == tarfile.PAX_FORMAT and draw(st.booleans()) else {}
    with tarfile.open(fileobj=raw, mode="w", format=tar_format, pax_headers=shared) as tar:
        for name in draw(st.lists(NAMES, max_size=6)):
            member = tarfile.TarInfo(name)
            member.mode, member.uname = draw(st.sampled_from([(0o644, ""), (0o777, "ü"), (0, "someone")]))
            if tar_format != tarfile.USTAR_FORMAT:
                member.uid = draw(st.sampled_from([0, 1000, 2**21, 2**40]))
                member.mtime = draw(st.sampled_from([0, 10**9, 0.5, -1, 2**33]))
            if draw(st.integers(0, 3)) == 0:
                member.type = draw(st.sampled_from(TYPES))
                member.linkname = draw(st.sampled_from(["", "a", "b" * 150])) if member.issym() else ""
            data = bytes(draw(st.integers(0, 3)) * 400) if member.type == tarfile.REGTYPE else b""
            member.size = len(data)
            try:
                tar.addfile(member, io.BytesIO(data))
            except ValueError:  # a name too long for the format
                continue
    return raw.getvalue()


@st.composite
def damaged(draw):
    raw = bytearray(draw(archives()))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(raw) // 512 - 1))) * 512 + draw(st.integers(0, 511))
        raw[at : at + 1] = draw(st.binary(max_size=12).filter(lambda new: len(new) == 1 or draw(st.booleans())))
    if draw(st.booleans()):  # the checksums put right, so that what they guard is read
        for at in range(0, len(raw) - 511, 512):
            if raw[at + 257 : at + 262] == b"ustar":
                raw[at + 148 : at + 156] = b" " * 8
                raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
    return bytes(raw[: draw(st.integers(0, len(raw)))]) if draw(st.booleans()) else bytes(raw)


def both_ways(path):
    """Members and warnings of the quick walk, which are those of tarfile's alone."""
    results = []
    for plain in (tar_headers._plain, lambda header: None):
        warnings = []
        with (
            patch.object(tar_headers, "_plain", plain),
            patch.object(tar_headers.log, "warning", lambda text, *words, to=warnings: to.append(text % words)),
        ):
            results.append((list(walk_members(str(path))), warnings))
    assert results[0] == results[1]
    return results[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("walked") / "a.tar"


@settings(max_examples=80)
@given(raw=archives())
def test_archives(path, raw):
    path.write_bytes(raw)
    both_ways(path)


@settings(max_examples=80)
@given(raw=damaged())
def test_damaged_archives(path, raw):
    path.write_bytes(raw)
    both_ways(path)


@pytest.mark.parametrize("tar_format", FORMATS)
def test_ordinary_members_never_come_to_tarfile(path, tar_format):
    write_members(path, [(f"folder/{number:09d}.jpg", bytes(number)) for number in range(40)], tar_format)
    with patch.object(tar_headers._Headers, "next", side_effect=AssertionError) as asked:
        asked.side_effect = [None, tarfile.TarError("the end mark")]  # opening looks at the first header
        assert len(list(walk_members(str(path)))) == 40 and asked.call_count == 2


def test_no_byte_of_a_header_is_unguarded(path):
    write_members(path, [("a.jpg", b"x"), ("b.jpg", b"y")], tarfile.USTAR_FORMAT)
    whole = path.read_bytes()
    for place in set(range(512)) - set(range(148, 156)):  # of the checksum itself, some may differ
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        members, warnings = both_ways(path)
        assert members == [] and "bad checksum" in warnings[0]

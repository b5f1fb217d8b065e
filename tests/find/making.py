"""Folders of small pictures, and a model to find them with."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from fullbatch.find.nearest import Finder
from fullbatch.find.server import PageServer

HOSTILE = (
    "<script>alert(1)<",
    '"><img src=x onerror=alert(2)>',
    "'; alert(3); '",
    "%2e%2e%2f..%2fetc%2fpasswd",
    "javascript:alert(4)",
    "line\nbreak and \x1b[31mred",
    "\u202egnp.exe",
    "&lt;b&gt; ${alert(5)} {{6}}",
    "😀 日本語 مرحبا",
    "x" * 200,
)


def picture(seed: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """Coloured fields: the same for the same seed, and another one for another."""
    fields = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(fields).resize(size, Image.Resampling.NEAREST)


def write_pictures(folder: Path, count: int, start: int = 0) -> list[Path]:
    """0000.png and so on, every third in a folder below."""
    paths = []
    for number in range(start, start + count):
        path = folder / ("below" if number % 3 == 2 else ".") / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
        paths.append(path)
    return paths


def write_hostile(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, name in enumerate(HOSTILE):
        path = folder / f"{name}.png"
        picture(1000 + number).save(path)
        paths.append(path)
    return paths


@contextmanager
def serving(finder: Finder) -> Iterator[PageServer]:
    with PageServer(finder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""Chromium for tests of pages; tests/conftest.py hands it out."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What a reader may have: families that matplotlib brings along.  The first is as wide as Verdana.
FONTS = {"wide": "DejaVuSans.ttf", "serif": "DejaVuSerif.ttf", "monospaced": "DejaVuSansMono.ttf"}


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no browser is installed (apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as started:
        yield started


@contextmanager
def browser_of(playwright: Any, font: str, folder: Path) -> Iterator[Any]:
    """A browser that knows this font alone, whatever is installed."""
    import matplotlib

    (folder / "fonts").mkdir()
    shutil.copy(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONTS[font], folder / "fonts")
    known = f"<fontconfig><dir>{folder / 'fonts'}</dir><cachedir>{folder / 'cache'}</cachedir></fontconfig>"
    (folder / "fonts.conf").write_text(f'<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">{known}')
    environment = {**os.environ, "FONTCONFIG_FILE": str(folder / "fonts.conf")}
    how = {"executable_path": CHROMIUM, "args": ["--no-sandbox"], "timeout": 1000 * HANG}
    running = playwright.chromium.launch(**how, env=environment)
    yield running
    running.close()


@pytest.fixture(scope="module")
def browser(playwright: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser_of(playwright, "wide", tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module", params=list(FONTS))
def browser_with_a_font(
    playwright: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    with browser_of(playwright, request.param, tmp_path_factory.mktemp("browser")) as running:
        yield running

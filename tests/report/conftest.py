import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from fullbatch.report.page import write_page
from tests.report.making import comparison_of, finetuned_run, hostile_run, interpolated

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
    (folder / "fonts").mkdir()
    shutil.copy(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONTS[font], folder / "fonts")
    known = f"<fontconfig><dir>{folder / 'fonts'}</dir><cachedir>{folder / 'cache'}</cachedir></fontconfig>"
    (folder / "fonts.conf").write_text(f'<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">{known}')
    environment = {**os.environ, "FONTCONFIG_FILE": str(folder / "fonts.conf")}
    running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], env=environment)
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


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("report") / "race" / "runs"
    return [hostile_run(folder, method, name=method) for method in ("openclip", "isogclr")]


@pytest.fixture(scope="session")
def comparison(runs: list[Path]) -> Path:
    return comparison_of(runs[0].parent.parent, runs)


@pytest.fixture(scope="session")
def tunings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two fine-tunings of one base: one that is kept, one that is not and was mixed with the base."""
    folder = tmp_path_factory.mktemp("tunings")
    found = [finetuned_run(folder, "hinged"), finetuned_run(folder, "global", "kept_base", "sogclr")]
    interpolated(found[1])
    return found


@pytest.fixture(scope="session")
def pages(
    runs: list[Path], comparison: Path, tunings: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A page of each sort."""
    folder = tmp_path_factory.mktemp("pages")
    return {
        "run": write_page([runs[1]], folder / "run" / "page.html", baseline=runs[0]),
        "several": write_page(runs, folder / "several.html"),
        "tuned": write_page([tunings[0]], folder / "tuned" / "page.html"),
        "mixed": write_page([tunings[1]], folder / "mixed" / "page.html"),
        "tunings": write_page(tunings, folder / "tunings.html"),
        "comparison": write_page([comparison], folder / "comparison.html"),
    }

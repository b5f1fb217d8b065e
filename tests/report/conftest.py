from pathlib import Path

import pytest

from fullbatch.report.page import write_page
from tests.report.making import comparison_of, hostile_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("report") / "race" / "runs"
    return [hostile_run(folder, method, name=method) for method in ("openclip", "isogclr")]


@pytest.fixture(scope="session")
def comparison(runs: list[Path]) -> Path:
    return comparison_of(runs[0].parent.parent, runs)


@pytest.fixture(scope="session")
def pages(runs: list[Path], comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each sort."""
    folder = tmp_path_factory.mktemp("pages")
    return {
        "run": write_page([runs[1]], folder / "run" / "page.html", baseline=runs[0]),
        "several": write_page(runs, folder / "several.html"),
        "comparison": write_page([comparison], folder / "comparison.html"),
    }

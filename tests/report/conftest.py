from pathlib import Path

import pytest

from fullbatch.report.page import write_page
from tests.report.making import comparison_of, finetuned_run, hostile_run, interpolated


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

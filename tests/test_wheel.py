"""What `pip install fullbatch` gives: built as `python -m build` does, installed into a venv, used from elsewhere."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import fullbatch as fb

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fullbatch"
pytestmark = pytest.mark.slow


def attempt(command, folder, **environment):
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run(command, folder, **environment):
    done = attempt(command, folder, **environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def built(kind, source, to):
    """By setuptools' own hooks, which fetch nothing; the name of what they wrote."""
    make = f"from setuptools import build_meta as hooks; print(hooks.build_{kind}({str(to)!r}))"
    return to / run([sys.executable, "-c", make], source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """From the source distribution: what that leaves out, the wheel lacks too."""
    place = tmp_path_factory.mktemp("build")
    source = place / "source"
    shutil.copytree(PACKAGE, source / "fullbatch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(built("sdist", source, place)) as packed:
        packed.extractall(place / "unpacked", filter="data")
    return built("wheel", next((place / "unpacked").iterdir()), place)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A new venv with nothing but the wheel; its dependencies are those that the tests run with."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], place)
    libraries = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], place).strip())
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (libraries / "others.pth").write_text("\n".join(others))
    return place


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        notes = {Path(name).name: name for name in opened.namelist() if ".dist-info/" in name}
        about = message_from_string(opened.read(notes["METADATA"]).decode())
        commands = opened.read(notes["entry_points.txt"]).decode()
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert names == {path.relative_to(ROOT).as_posix() for path in files}
    for data in ("recipes/emoji.yaml", "data/emoji/train.tar.xz", "report/page.js", "models/tiny.json", "py.typed"):
        assert f"fullbatch/{data}" in names
    assert (about["Name"], about["Version"]) == ("fullbatch", fb.__version__)
    assert {"LICENSE", "ATTRIBUTION.md"} <= set(notes)
    assert "fullbatch = fullbatch.cli:run" in commands
    assert {"onnx", "text", "lora", "spectral", "corruptions", "dev"} <= set(about.get_all("Provides-Extra"))
    needed = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    extras = ("pytest", "transformers", "onnx", "ruff", "playwright", "scipy", "scikit-learn", "threadpoolctl")
    assert not [line for line in needed if line.startswith(extras)]


def test_it_works_away_from_the_repository(installed, tmp_path):
    where = run([installed / "bin" / "python", "-c", "import fullbatch; print(fullbatch.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(installed)
    fullbatch = installed / "bin" / "fullbatch"
    assert "usage: fullbatch COMMAND" in run([fullbatch, "--help"], tmp_path)
    assert run([fullbatch, "--version"], tmp_path) == f"fullbatch {fb.__version__}\n"
    assert run([fullbatch, "recipes", "emoji"], tmp_path) == (PACKAGE / "recipes" / "emoji.yaml").read_text()


def test_a_model_is_trained_shown_and_exported_with_it(installed, tmp_path):
    """The built-in pictures, the tiny model's config and the files of the page are all in the package."""
    fullbatch, cache = installed / "bin" / "fullbatch", {"FULLBATCH_CACHE": str(tmp_path / "cache")}
    short = ["--samples", "128", "--batch-size", "64", "--workers", "0", "--name", "short", "--quiet"]
    run([fullbatch, "train", *short, "--evaluate", "retrieval:emoji?split=new_concept"], tmp_path, **cache)
    run([fullbatch, "report", "runs/short", "--no-pictures"], tmp_path, **cache)
    assert (tmp_path / "runs" / "short" / "report.html").is_file()
    run([fullbatch, "export", "runs/short", "out", "--format", "huggingface"], tmp_path, **cache)
    assert "retrieval:emoji" in (tmp_path / "out" / "README.md").read_text()


WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *others):
        hidden = name.partition(".")[0] in ("scipy", "sklearn", "threadpoolctl")
        return None if hidden else super().find_spec(name, *others)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
IMPORT_ALL = """
import pkgutil, fullbatch
for module in pkgutil.walk_packages(fullbatch.__path__, "fullbatch."):
    if not module.name.startswith(("fullbatch.integrations.", "fullbatch.__main__")):
        __import__(module.name)
print("imported")
import scipy
"""


def test_without_scipy_only_what_needs_it_is_refused(installed, tmp_path):
    """Python runs a sitecustomize at every start, so the processes that a command starts lack the packages too."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    settings = {"FULLBATCH_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    imported = attempt([installed / "bin" / "python", "-c", IMPORT_ALL], tmp_path, **settings)
    assert imported.stdout == "imported\n"
    assert imported.stderr.endswith("ModuleNotFoundError: No module named 'scipy'\n")

    fullbatch = installed / "bin" / "fullbatch"
    short = ["--samples", "256", "--workers", "0", "--quiet"]
    measured = [*short, "--evaluate", "retrieval:emoji?split=new_concept"]
    ordered = ["--batch-size", "64", "--batches", "ordered", "--drawn-batches", "4", "--kept-batches", "2"]
    run([fullbatch, "train", *measured, "--name", "uniform"], tmp_path, **settings)
    run([fullbatch, "train", *short, *ordered, "--name", "ordered"], tmp_path, **settings)
    run([fullbatch, "report", "runs/uniform"], tmp_path, **settings)
    assert (tmp_path / "runs" / "uniform" / "report.html").is_file()
    run([fullbatch, "compare", *measured, "--methods", "openclip", "sogclr", "--name", "two"], tmp_path, **settings)
    assert (tmp_path / "comparisons" / "two" / "report.html").is_file()
    refused = attempt([fullbatch, "train", *short, "--batches", "spectral"], tmp_path, **settings)
    needs = "--batches spectral needs the package scipy; install it with: pip install 'fullbatch[spectral]'."
    assert (refused.returncode, refused.stderr) == (1, f"fullbatch: {needs}\n")

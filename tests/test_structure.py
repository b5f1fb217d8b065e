"""The shape of the house: imports go one way, one room talks to torch.distributed, names are public in one place."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fullbatch as fb

ROOT = Path(fb.__file__).parent
ORDER = [  # a room imports from rooms before it
    "config", "distributed", "selection", "data", "models", "kernels", "objective", "theory", "training", "evaluation",
    "recipes", "assembly", "run", "audit", "finetuning", "trials", "report", "results", "flags",
    "commands", "cli", "__main__",
]  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from [node.module] if node.module != "fullbatch" else [f"fullbatch.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


@pytest.mark.parametrize("path", [f for f in FILES if room(f) != "__init__"], ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_up_the_list(path):
    here = ORDER.index(room(path))
    for module in imports(path):
        if module.startswith("fullbatch."):
            assert ORDER.index(module.split(".")[1]) <= here, f"{path.name} imports {module}"


def test_one_room_imports_torch_distributed():
    found = {room(f) for f in FILES if any(m.startswith("torch.distributed") for m in imports(f))}
    assert found == {"distributed"}


def test_public_names_are_declared_once():
    assert sorted(fb.__all__) == sorted(set(fb.__all__))
    for name in fb.__all__:
        assert getattr(fb, name) is not None
    for path in FILES:
        if path != ROOT / "__init__.py":
            assert "__all__" not in path.read_text(), path


@pytest.mark.parametrize(("given", "wanted"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_without_spinning_unless_the_user_wants_it(given, wanted):
    """Of the wait policy counts what stands in the environment when torch is imported; data workers inherit it."""
    tell = """
import os, sys
class Tell:
    def find_spec(self, name, *others):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.exit()
sys.meta_path.insert(0, Tell())
import fullbatch.__main__
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    told = subprocess.run([sys.executable, "-c", tell], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == wanted
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE", "here in the tests too"


def test_only_public_names_are_shown():
    assert dir(fb) == sorted(fb.__all__) and {"train", "finetune"} <= set(dir(fb))


@pytest.mark.parametrize("path", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_files_can_be_held_in_the_head(path):
    assert len(path.read_text().splitlines()) <= 450


def test_versions_agree():
    text = (ROOT.parent / "pyproject.toml").read_text()
    assert f'version = "{fb.__version__}"' in text
    assert f"## {fb.__version__}" in (ROOT.parent / "CHANGELOG.md").read_text()

"""The shape of the house: imports go one way, one room talks to torch.distributed, names are public in one place."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import fullbatch as fb

ROOT = Path(fb.__file__).parent
ORDER = [  # a room imports from rooms before it
    "config", "distributed", "data", "models", "objective", "selection", "theory", "training", "evaluation",
    "recipes", "assembly", "audit", "training_run", "loading", "encoder", "finetuning", "trials", "report", "find",
    "integrations", "cli", "__main__",
]  # fmt: skip
FILES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}


def names_in(node):
    """The modules that an import statement names, as far as its words tell."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in MODULES or node.module == "fullbatch" else node.module for name in inner]
    return []


def imports(path):
    return [name for node in ast.walk(FILES[path]) for name in names_in(node)]


def room(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def test_imports_go_up_the_list():
    height = {name: place for place, name in enumerate(ORDER)}
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        if room(path) != "__init__"
        for module in imports(path)
        if module.startswith("fullbatch.") and height.get(module.split(".")[1], len(ORDER)) > height.get(room(path), -1)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others():
    """When modules are loaded; what a function imports, or only the type checker, is no part of it."""
    needs = {name: {name for node in FILES[path].body for name in names_in(node)} for name, path in MODULES.items()}
    try:
        graphlib.TopologicalSorter({name: needs[name] & set(MODULES) for name in MODULES}).prepare()
    except graphlib.CycleError as cycle:
        pytest.fail(f"a circle of imports: {' <- '.join(cycle.args[1])}")


def test_one_room_imports_torch_distributed():
    rooms = {room(path) for path in FILES if any(name.startswith("torch.distributed") for name in imports(path))}
    assert rooms == {"distributed"}


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in FILES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    wrong = {name: files for name, files in places.items() if len(files) > 1}
    assert not wrong


def test_public_names_are_declared_once():
    assert sorted(fb.__all__) == sorted(set(fb.__all__))
    for name in fb.__all__:
        assert not isinstance(getattr(fb, name), ModuleType | None), name
    elsewhere = [str(path) for path in FILES if path != ROOT / "__init__.py" and "__all__" in path.read_text()]
    assert not elsewhere


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
fullbatch.make_objective
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    told = subprocess.run([sys.executable, "-c", tell], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == wanted
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE", "here in the tests too"


def test_only_public_names_are_shown():
    assert dir(fb) == sorted(fb.__all__) and {"train", "finetune"} <= set(dir(fb))


def test_files_can_be_held_in_the_head():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {path: length for path, length in lengths.items() if length > 450}


def test_the_readme_shows_the_house_as_it_is():
    readme = (ROOT.parent / "README.md").read_text()
    tree = re.search(r"^```\w*\nfullbatch/\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert tree, "README.md has no fenced block that begins with the line fullbatch/ and lists its folders"
    shown = re.findall(r"^  (\w+)/", tree[1], re.MULTILINE)
    there = {path.parent.relative_to(ROOT).parts[0] for path in FILES if path.parent != ROOT}
    assert sorted(shown) == sorted(there)


def test_versions_agree():
    text = (ROOT.parent / "pyproject.toml").read_text()
    assert f'version = "{fb.__version__}"' in text
    assert f"## {fb.__version__}" in (ROOT.parent / "CHANGELOG.md").read_text()

"""The page that follows one batch through the package names files and functions that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "one-training-step.md"
NAMED = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def names_in(path: Path) -> set[str]:
    """Functions, classes and constants of a file; methods and fields as Class.name."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        for name in _defined(node):
            names.add(name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            names |= {f"{node.name}.{name}" for name in _defined(inner)}
    return names


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_every_file_and_name_on_the_page_exists():
    named = NAMED.findall(PAGE.read_text())
    files = list(dict.fromkeys(file for file, _ in named))
    assert 10 <= len(files) <= 25
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert not name or name in names_in(ROOT / file), f"{file} has no {name}"


def test_the_page_names_nothing_in_another_way():
    """A file in backticks that the pattern misses would go unchecked."""
    for text in re.findall(r"`([^`\n]*\.py[^`\n]*)`", PAGE.read_text()):
        assert NAMED.fullmatch(f"`{text}`"), text

"""README and docs/: short where promised, links that lead somewhere, names and defaults that are those of the code."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

import fullbatch as fb

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")),
         *sorted(ROOT.glob("benchmarks/*/README.md"))]  # fmt: skip
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def links(page):
    """The files a page links to, each with the heading it names, if any; links to the web left out."""
    for target, anchor in LINK.findall(without_code(page.read_text())):
        if "://" not in target:
            yield (page.parent / target).resolve() if target else page, anchor


def anchors(page):
    """The names that headings of a page have on GitHub."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in links(page):
        assert target.exists(), f"{page.relative_to(ROOT)}: {target}"
        assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)}: {target.name}#{anchor}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_index_leads_to_every_page():
    listed = {target for target, _ in links(INDEX)}
    pages = {page.resolve() for page in ROOT.glob("docs/**/*.md") if page.name != "tables.md"} - {INDEX.resolve()}
    assert pages <= listed, sorted(str(page) for page in pages - listed)


def test_the_package_names_pages_that_exist():
    for path in [*ROOT.glob("fullbatch/**/*.py"), *ROOT.glob("fullbatch/**/*.yaml"), *ROOT.glob("examples/*.py")]:
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{path.relative_to(ROOT)}: {page}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "fullbatch." in page.read_text()], ids=lambda page: page.stem
)
def test_python_names_of_the_pages_exist(page):
    text = page.read_text()
    named = [(module, name) for module, names in re.findall(r"^from (fullbatch[\w.]*) import (.+)$", text, re.MULTILINE)
             for name in names.split(", ")]  # fmt: skip
    named += re.findall(r"`(fullbatch(?:\.\w+)+)\.(\w+)\(", text)
    for module, name in named:
        assert hasattr(importlib.import_module(module), name), f"{page.name}: {module}.{name}"


def test_the_tutorial_draws_the_folder_that_it_shows(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    (draw,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(draw, "draw.py", "exec"), {})
    assert len(list(Path("pictures").iterdir())) == 4000
    assert f"$ cat pictures/0000.txt\n{Path('pictures/0000.txt').read_text()}" in text


def shown(value):
    """A default as the page of flags has it."""
    match value:
        case None | "":
            return "none"
        case bool():
            return "on" if value else "off"
        case tuple():
            return " ".join(str(part) for part in value)
        case _:
            return str(value)


def test_the_page_of_flags_has_every_flag_and_its_default():
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", text, flags=re.DOTALL | re.MULTILINE))
    config = fb.RunConfig()
    for group in dataclasses.fields(config):
        settings = getattr(config, group.name)
        rows = dict(re.findall(r"^\| `--([\w-]+)` \| (.*?) \|", sections[group.name], flags=re.MULTILINE))
        defaults = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        defaults.pop("settings", None)  # a method's own, on the page of methods
        assert rows == {name.replace("_", "-"): shown(value) for name, value in defaults.items()}

"""The tutorial as a reader follows it, from a folder of pictures to a page in a browser; shorter, unless it is to make
the tutorial's figure anew:

    TUTORIAL_EPOCHS=20 TUTORIAL_FIGURE=docs/figures/find.png pytest tests/test_tutorial.py -m slow
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

import fullbatch as fb
from fullbatch.cli import main
from fullbatch.find.index import PictureIndex
from fullbatch.find.nearest import Finder
from tests.find.making import serving
from tests.waiting import HANG

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^\$ (fullbatch .*)$", PAGE, flags=re.MULTILINE)]
EPOCHS = os.environ.get("TUTORIAL_EPOCHS", "1")
FIGURE = os.environ.get("TUTORIAL_FIGURE")
pytestmark = pytest.mark.slow


def test_from_a_folder_to_a_page(browser, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    (draw,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(draw, "draw.py", "exec"), {})
    assert [command[0] for command in COMMANDS] == ["train", "train", "report", "find"]
    for command in COMMANDS:
        shorter = [
            EPOCHS if before == "--epochs" else word for before, word in zip(["", *command[:-1]], command, strict=True)
        ]
        assert main(shorter) == 0
    nearest = capsys.readouterr().out.splitlines()[-3:]
    assert all(re.fullmatch(r" *-?0\.\d{3}  pictures/\d{4}\.png", line) for line in nearest)
    finder = Finder(PictureIndex(Path("pictures"), fb.load("runs/shapes", device="cpu")))
    with serving(finder) as server:
        page = browser.new_page(viewport={"width": 1100, "height": 640})
        page.set_default_timeout(1000 * HANG)
        page.goto(server.url)
        page.fill("#words", COMMANDS[-1][3])
        page.press("#words", "Enter")
        page.wait_for_function("() => document.getElementById('told').textContent.includes('ms')")
        page.wait_for_function("() => [...document.querySelectorAll('.tile img')].every(i => i.naturalWidth > 0)")
        shown = [f"pictures/{name}" for name in page.locator(".tile bdi").all_inner_texts()[:3]]
        page.screenshot(path="find.png")
        page.close()
    assert shown == [line.split()[1] for line in nearest]
    if FIGURE:
        shutil.copy("find.png", ROOT / FIGURE)

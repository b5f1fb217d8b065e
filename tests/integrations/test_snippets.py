"""The snippets of docs/how-to/integrations.md run as they stand there, and go on after they were stopped."""

import random
import re
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.integrations.trainings import CutOff, die_at, differences

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "integrations.md").read_text()
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
SNIPPETS = {part.split("\n")[0]: code[1] for part in PAGE.split("\n## ") if (code := CODE.search(part))}


def run(name, folder, monkeypatch, stop_in=None, **given):
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    hook = register_optimizer_step_pre_hook(die_at(-1 if stop_in is None else stop_in, kill=False))
    try:
        names = dict(given)
        exec(compile(SNIPPETS[name], f"{name}.py", "exec"), names)
        return names
    finally:
        hook.remove()


def lightning_state(folder):
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return {key: state[key] for key in ("epoch", "global_step", "state_dict", "optimizer_states")}


def accelerate_state(folder):
    files = sorted((folder / "checkpoint").glob("*"))
    optimizer = torch.load(folder / "checkpoint" / "optimizer.bin", weights_only=True)
    return {"optimizer": optimizer, "model": next(file.read_bytes() for file in files if "model" in file.name)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "state_of"), [("Lightning", lightning_state), ("accelerate", accelerate_state)])
def test_stopped_and_run_again(tmp_path, monkeypatch, name, state_of):
    pytest.importorskip(name.lower(), reason=f"{name.lower()} is not installed")
    run(name, tmp_path / "whole", monkeypatch)
    with pytest.raises(CutOff):
        run(name, tmp_path / "cut", monkeypatch, stop_in=random.Random(name).randint(9, 38))
    run(name, tmp_path / "cut", monkeypatch)
    whole = state_of(tmp_path / "whole")
    assert not differences(whole, state_of(tmp_path / "cut"))
    assert "normalizers.image" in str(whole), "the tables are there"


def test_transformers(tmp_path, monkeypatch):
    tests = pytest.importorskip("tests.integrations.test_transformers")
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    names = run(
        "transformers", tmp_path, monkeypatch, dataset=tests.pairs(), model=tests.clip_model(), arguments=arguments
    )
    assert names["objective"].step == 2


def test_sentence_transformers(tmp_path, monkeypatch):
    tests = pytest.importorskip("tests.integrations.test_sentence_transformers")
    model = tests.text_model(tests.make_text_folder(tmp_path / "bert"))
    arguments = tests.Arguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    names = run(
        "sentence-transformers", tmp_path, monkeypatch, dataset=tests.text_pairs(), model=model, arguments=arguments
    )
    assert names["loss"].objective.step == 2


def test_flags_of_the_page_are_known():
    from fullbatch.integrations import open_clip as ours

    source = Path(ours.__file__).read_text()
    command = PAGE[PAGE.index("python -m fullbatch.integrations.open_clip") :].split("\n\n")[0]
    params = pytest.importorskip("open_clip_train.params", reason="open_clip_train is not installed")
    known = source + Path(params.__file__).read_text()
    assert all(f'"{flag}"' in known for flag in re.findall(r"--[\w-]+", command))

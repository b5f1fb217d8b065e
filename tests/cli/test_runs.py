"""A run from the command line, going on with it, and how it is stopped."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fullbatch.cli import main
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, read_yaml, to_dict
from tests.cli.making import answer, config_of, plain, small
from tests.data.making import captioned, write_shard
from tests.training.small import differences, saved_state
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]


def test_a_run_leaves_what_its_docstring_says(run_folder):
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "log.txt", "checkpoints/step-000000004"):
        assert (run_folder / name).exists(), name
    assert config_of("--config", f"{run_folder}/config.yaml").training.samples == 32
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4 and lines[-1]["samples"] == 32


def test_a_run_folder_is_not_overwritten(place, run_folder, capsys):
    status, _, err = answer(capsys, "train", *small(place), "--name", "done")
    assert status == 1
    assert f"The run folder {run_folder} exists already: go on with `--resume {run_folder}`" in err


def test_a_run_goes_on(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    status, out, _ = answer(capsys, "train", "--resume", str(copy), "--samples", "48")
    assert status == 0 and f"run folder: {copy}" in out
    assert (copy / "checkpoints" / "step-000000006").is_dir()
    assert from_dict(RunConfig, read_yaml(copy / "config.yaml")).training.samples == 48


def test_other_settings_than_the_checkpoints(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    before = (copy / "config.yaml").read_text()
    status, _, err = answer(capsys, "train", "--resume", str(copy), "--method", "sogclr")
    assert status == 1 and "--resume cannot change --method (it was 'neuclip', now 'sogclr')" in err
    assert (copy / "config.yaml").read_text() == before
    assert answer(capsys, "train", "--resume", str(copy), "--samples", "40")[0] == 0


def test_a_run_that_could_not_start_leaves_its_name_free(place, capsys):
    assert answer(capsys, "train", *small(place), "--name", "again", "--batch-size", "25")[0] == 1
    assert not (place / "runs" / "again").exists()
    assert answer(capsys, "train", *small(place), "--name", "again")[0] == 0


def test_every_checkpoint_is_damaged(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    (copy / "checkpoints" / "step-000000004" / "model.pt").write_bytes(b"x")
    status, _, err = answer(capsys, "train", "--resume", str(copy))
    assert status == 1
    assert f"fullbatch: Every checkpoint in {copy}/checkpoints is damaged; start a new run." in err
    status, _, err = answer(capsys, "export", str(copy), str(tmp_path / "out"))
    assert status == 1 and f"{copy} is neither a run folder with a good checkpoint nor a checkpoint." in err


def test_export(run_folder, tmp_path, capsys):
    status, out, _ = answer(capsys, "export", str(run_folder), str(tmp_path / "out"))
    assert (status, out) == (0, f"{tmp_path / 'out'}\n")
    assert (tmp_path / "out" / "open_clip_config.json").is_file()
    status, _, err = answer(capsys, "export", str(run_folder), str(tmp_path / "out.pt"))
    assert status == 1 and "open_clip knows no config by which to load out.pt" in err
    status, _, err = answer(capsys, "export", str(run_folder), str(tmp_path / "x"), "--format", "tflite")
    assert status == 2 and "tflite" in plain(err)
    status, _, err = answer(capsys, "export", str(run_folder))
    assert status == 2 and "the file or folder to write (required)" in plain(err)


def test_settings_reach_the_run(run_folder):
    config = from_dict(RunConfig, read_yaml(run_folder / "config.yaml"))
    assert to_dict(config)["objective"]["settings"] == {"rho": 1.0}


@pytest.mark.parametrize(
    ("command", "words"),
    [("search", "go on with `fullbatch search --resume FOLDER`"), ("compare", "compare --resume"), ("report", "")],
)
def test_stopped_at_once(command, words, capsys, monkeypatch):
    def stopped(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"fullbatch.cli.{command}"), command, stopped)
    assert main([command]) == 130
    told = capsys.readouterr().err
    assert told.startswith("fullbatch: stopped at once.") and words in told and "first step" not in told


@pytest.mark.slow
def test_under_torchrun(place):
    """Two ranks as a user starts them; one of them speaks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "fullbatch", "train", *small(place), "--name", "ranks",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("run folder:") == 1
    assert "on 2 ranks" in done.stderr
    wrong = subprocess.run([*command, "--batch-size", "5"], capture_output=True, text=True, timeout=300, check=False)
    assert wrong.returncode != 0
    assert "cannot be shared evenly by 2 ranks" in wrong.stderr


def test_the_same_command_begins_a_run_and_goes_on(place, tmp_path, capsys):
    (tmp_path / "more.yaml").write_text("run: {log_every: 1}\n")
    again = [*small(place), "--runs", str(tmp_path), "--config", str(tmp_path / "more.yaml"), "--resume", "auto"]
    status, _, err = answer(capsys, "train", *again)
    assert status == 1 and "give a --name" in err
    again += ["--name", "again"]
    for seen in (16, 32):
        status, _, _ = answer(capsys, "train", *again, "--samples", str(seen))
        assert status == 0
        lines = [json.loads(text) for text in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
        assert [line["samples"] for line in lines if "loss" in line][-1] == seen
    for words in (again, again[:-2]):
        status, out, err = answer(capsys, "train", *words, "--help")
        assert status == 0 and "--batch-size" in out, err


@pytest.mark.parametrize("saved", [True, False])
def test_the_same_command_goes_on_with_the_parts_that_it_began_with(place, tmp_path, capsys, saved):
    """A part of the user's own data is held out by the first start, and by no later one is trained on."""
    tables = [str(write_shard(tmp_path / f"{count}.tar", captioned(count, (20, 20)))) for count in (60, 24)]
    again = [*small(place), "--runs", str(tmp_path), "--name", "again"]
    own = again.index(f"{place}/shard.tar")
    again[own : own + 1] = [f"{tables[0]}?weight=2", tables[1]]
    assert answer(capsys, "train", *again, "--resume", "auto", "--samples", "16")[0] == 0
    folder = tmp_path / "again"
    begun = read_yaml(folder / "config.yaml")
    assert begun["data"]["data"] == [f"{tables[0]}?weight=2.0&part=train", tables[1]]
    if not saved:  # it was killed before its first checkpoint
        shutil.rmtree(folder / "checkpoints")
        (folder / "checkpoints").mkdir()
    status, _, err = answer(capsys, "train", *again, "--resume", "auto", "--samples", "32")
    assert status == 0, err
    now = read_yaml(folder / "config.yaml")
    assert (now["data"], now["evaluation"]) == (begun["data"], begun["evaluation"])
    if saved:
        other = [tables[1] if word.startswith(tables[0]) else word for word in again]
        assert "another data set" in answer(capsys, "train", *other, "--resume", "auto", "--samples", "48")[2]


STRUCK = """
import os, sys
from fullbatch.cli import main
from fullbatch.training.trainer import Trainer
from tests.killing import Fatal

last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
if last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Fatal(13).among(Trainer, "train_step")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, "ddp"), (4, "fsdp")])
def test_a_rank_that_dies_under_torchrun(place, tmp_path, ranks, parallel):
    """Torchrun starts the command again, and the run ends where the undisturbed one does, to the bit."""

    def started(name, *program):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "--max-restarts", "2", *program, "train", *small(place), "--runs", str(tmp_path), "--name", name,
            "--resume", "auto", "--samples", "480", "--save-every", "5", "--parallel", parallel,
        ]  # fmt: skip
        log = (tmp_path / f"{name}.txt").open("w")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=2 * HANG).returncode

    (tmp_path / "struck.py").write_text(STRUCK)
    assert started("whole", "-m", "fullbatch") == 0
    status, told = started("struck", str(tmp_path / "struck.py")), (tmp_path / "struck.txt").read_text
    assert status == 0, told()
    assert "-9" in told(), "it was killed, and torchrun says so"
    assert differences(*(saved_state(tmp_path / name, 60) for name in ("whole", "struck"))) == []


def test_going_on_with_a_run_that_is_further_already(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    before = (copy / "config.yaml").read_text()
    status, _, err = answer(capsys, "train", "--resume", str(copy), "--samples", "8")
    assert status == 1 and "already, beyond the 1 that --epochs or --samples ask for" in err
    status, _, err = answer(capsys, "train", "--resume", str(copy), "--name", "other")
    assert status == 1 and "leave --name and --runs out" in err
    assert (copy / "config.yaml").read_text() == before

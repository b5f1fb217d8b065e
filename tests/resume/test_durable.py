"""What must be on the disk before something else is, and what is left when the power fails in between.  The cases were
found by benchmarks/deaths, which has the layer below the files that loses them."""

import errno
import json
import os
import resource
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch

from fullbatch import training_run
from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict
from fullbatch.data import durable
from fullbatch.data.durable import make_folder
from fullbatch.finetuning.finetune import _require_room
from fullbatch.finetuning.record import read_record
from fullbatch.loading import load_trained
from fullbatch.models import saved
from fullbatch.models.build import build_model, rebuild_model
from fullbatch.models.design import from_json
from fullbatch.models.saved import export
from fullbatch.selection import periods
from fullbatch.selection.periods import PieceStatistics, is_whole, write_piece
from fullbatch.selection.planning import Snapshot
from fullbatch.selection.selector import Selector
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder
from fullbatch.training_run import train
from fullbatch.trials.comparison_plan import Plan
from tests.selection.planned import SELECTIONS, config_for
from tests.training.small import small_config


@pytest.fixture
def synced(monkeypatch):
    """The paths that were synced, in order."""
    paths = []
    honest = os.fsync

    def noted(descriptor):
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        honest(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return paths


def test_the_lines_of_a_run_are_on_the_disk_before_its_checkpoint(tmp_path, synced):
    run = train(small_config(tmp_path, steps=10)).folder
    saved = synced.index(str(checkpoint.folder_of(run / "checkpoints", 10).with_name(".writing-000000010")))
    assert str(run / "metrics.jsonl") in synced[:saved]
    assert str(run) in synced and str(tmp_path) in synced, "nor can the names of its folders be lost"
    assert str(run / "model" / "design.json") in synced


def test_a_folder_is_made_with_its_name_on_the_disk(tmp_path, synced):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]


def test_what_a_checkpoint_relies_on_comes_first(tmp_path):
    seen = []
    writer = checkpoint.Writer(tmp_path, 1, settle=lambda: seen.append(list(tmp_path.iterdir())))
    writer.save(3, checkpoint.Captured({"position": {}}), 0.0)
    writer.wait()
    assert seen == [[]] and checkpoint.checkpoints(tmp_path)


def test_the_best_goes_only_for_a_better_one_on_the_disk(tmp_path, monkeypatch):
    captured = checkpoint.Captured({"position": {}})
    writer = checkpoint.Writer(tmp_path, keep=2, best=5)
    for step in (5, 10, 15):
        writer.save(step, captured, 0.0)
    writer.wait()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        writer.save(20, captured, 0.0)
        writer.keep_best(20)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [5, 10, 15] and writer.best == 5
    with pytest.raises(OSError, match="could not be written"):
        writer.check()
    writer.save(20, captured, 0.0)
    writer.keep_best(20)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [15, 20]


def test_a_plan_is_told_before_what_it_was_made_from_goes(tmp_path, synced, monkeypatch):
    told = []
    forget = Snapshot.forget

    def noted(snapshot):
        told.append([path for path in synced if "/run/batches" in path][-2:])  # a checkpoint's writer syncs meanwhile
        forget(snapshot)

    monkeypatch.setattr(Snapshot, "forget", noted)
    run = train(config_for(tmp_path, SELECTIONS["spectral"])).folder
    assert told and all(last == [str(run / "batches/losses.jsonl"), str(run / "batches")] for last in told)


def test_a_file_that_cannot_be_synced_is_named(tmp_path):
    with pytest.raises(OSError, match="Input/output error") as told, durable.told_if_full(tmp_path / "lines"):
        raise OSError(5, "Input/output error")
    assert told.value.filename == str(tmp_path / "lines")


def test_a_folder_that_cannot_be_synced_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error") as told:
        durable.sync(tmp_path)
    assert told.value.filename == str(tmp_path)


def refuse(descriptor):
    raise OSError(5, "Input/output error")


def no_room(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def files_of_at_most(count):
    """Bytes; then the system writes a part, and nothing more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS = {
    "plan-000000000.npy": lambda path: write_piece(
        path, np.zeros((999, 9), np.int64), np.zeros((999, 9, 2), np.float32), PieceStatistics([], [], 9, 0, 0.1)
    ),
    "snapshot-000000.npy": lambda path: Snapshot(path).write(np.zeros((999, 9)), np.zeros(9), 0.1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_plans_and_snapshots_that_cannot_be_written_are_named(tmp_path, monkeypatch, name):
    path = tmp_path / name
    with files_of_at_most(5000), pytest.raises(OSError, match="File too large") as told:
        WRITERS[name](path)
    assert told.value.filename == str(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="Input/output error") as told:
            WRITERS[name](path)
        assert told.value.filename == str(path.with_suffix(".json")), "the first that is written"
        patched.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match=rf"The disk is full: {path.with_suffix('.json')} could not .* MB are free"):
            WRITERS[name](path)
    assert not list(tmp_path.glob(".*"))
    WRITERS[name](path)
    assert np.load(path).shape == (999, 9)


def test_a_line_of_a_plan_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    add = Selector._add_line

    def without_room(self, number):
        self._losses.symlink_to("/dev/full")
        add(self, number)

    monkeypatch.setattr(Selector, "_add_line", without_room)
    with pytest.raises(OSError, match=r"The disk is full: .*losses\.jsonl could not be written"):
        train(config_for(tmp_path, SELECTIONS["spectral"]))


def test_a_fine_tuning_that_was_killed_before_it_began_begins_again(tmp_path):
    for name in (".finetune.json.17", ".base.new"):
        (tmp_path / name).mkdir()
    _require_room(Folder(tmp_path))
    (tmp_path / "base").mkdir()
    with pytest.raises(ValueError, match="is not empty"):
        _require_room(Folder(tmp_path))
    (tmp_path / "finetune.json").touch()
    _require_room(Folder(tmp_path))


# -- damaged ----------------------------------------------------------------------------------------------------------


def test_a_damaged_plan_is_known(tmp_path):
    path = tmp_path / "plan-000000000.npy"
    places = np.arange(8).reshape(2, 4)
    about = PieceStatistics([0.5], [0.25], 8, 0, 0.1)
    write_piece(path, places, np.zeros((2, 4, 2), np.float32), about)
    assert is_whole(path)
    raw = path.read_bytes()
    for damaged in (raw[:-1], raw[:60], b"", raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:]):
        path.write_bytes(damaged)
        assert not is_whole(path)
    path.write_bytes(raw)
    said = path.with_suffix(".json").read_text()
    for damaged in ("{}", said.replace('"rows": 8', '"rows": 0')):
        path.with_suffix(".json").write_text(damaged)
        assert not is_whole(path)


def test_a_damaged_plan_is_made_again(tmp_path, caplog):
    config = config_for(tmp_path, SELECTIONS["ordered"])
    config = replace(config, run=replace(config.run, save_every=5))
    run = train(config).folder
    last = checkpoint.checkpoints(run / "checkpoints")[-1]
    last.rename(run / "aside")
    plans = periods.numbered(run / "batches", "plan")
    for path in plans.values():
        path.write_bytes(path.read_bytes()[:100])
    assert train(config, resume=run).results
    assert "is damaged; it is made again" in caplog.text


def test_damaged_files_are_named_in_a_sentence(tmp_path):
    (tmp_path / "tuned").mkdir()
    record = {"model": "m", "metric": "mean", "tolerance": 0.01, "best_step": 1, "chances": {}, "epochs": []}
    (tmp_path / "finetune.json").write_text(json.dumps(record))
    for text in ("", '{"step": 1}', '{"step": null, "epoch": 1, "values": {}, "score": 0.5}'):
        (tmp_path / "tuned" / "measured.json").write_text(text)
        with pytest.raises(ValueError, match=r"measured\.json is damaged \(.*\); put back a whole one"):
            read_record(tmp_path)
    design = {"kind": "open_clip", "design": {"name": "x", "config": {}, "mean": {"a": 1}}}
    with pytest.raises(ValueError, match="mean must be a number"):
        from_json(json.dumps(design))
    (tmp_path / "model").mkdir()
    text = {"vision_cfg": {"image_size": 16}, "text_cfg": {"context_length": None}, "embed_dim": 4}
    whole = {"kind": "open_clip", "design": {"name": "x", "config": text}}
    (tmp_path / "model" / "design.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="describes no model"):
        rebuild_model(RunConfig().model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"Plan needs .*base"):
        from_dict(Plan, {"name": "x"})
    with pytest.raises(ValueError, match=r"objective\.settings must map names to values, got \[\]"):
        from_dict(RunConfig, {"objective": {"settings": []}})


def test_a_full_disk_is_told_by_who_writes_a_models_design_or_weights(tmp_path, monkeypatch):
    def full(*given, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # names no file

    def unwritten(*given, **options):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    config = small_config(tmp_path, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "write_design", full)
        with pytest.raises(OSError, match=r"The disk is full: .*/model could not be written"):
            train(config)
    run = train(replace(config, run=replace(config.run, name="other"))).folder
    monkeypatch.setattr(safetensors.torch, "save_file", unwritten)
    file = tmp_path / "exported.to" / "fullbatch.safetensors"
    with pytest.raises(OSError, match=rf"^{file} could not be written \(I/O error: No space left"):
        load_trained(run).export(tmp_path / "exported.to")


@pytest.mark.parametrize(
    ("name", "format", "file"),
    [
        ("model.pt", "open_clip", "model.pt"),
        ("model.safetensors", "safetensors", "model.safetensors"),
        ("folder", "open_clip", "folder/open_clip_model.safetensors"),
        ("folder", "huggingface", "folder/model.safetensors"),
    ],
)
def test_an_export_without_room_is_named_and_leaves_nothing(name, format, file, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "registered_name", lambda design: "tiny")  # a file is for open_clip's own architectures
    message = rf"^{tmp_path / file} could not be written \(.+\); [\d,.]+ MB are free"
    with files_of_at_most(5000), pytest.raises(OSError, match=message):
        export(build_model(Model()), tmp_path / name, format, 0.05, None)
    assert not list(tmp_path.iterdir())


def test_an_export_whose_config_finds_no_room_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "_save_safetensors", lambda *given: None)
    with files_of_at_most(0), pytest.raises(OSError, match="File too large") as told:
        export(build_model(Model()), tmp_path / "folder", "open_clip", 0.05, None)
    assert told.value.filename == str(tmp_path / "folder")

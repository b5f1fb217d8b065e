"""20 steps equal 10 + resume + 10, to the bit, for every method; also past damaged checkpoints."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import fullbatch as fb
from fullbatch.config.methods import ObjectiveConfig
from fullbatch.config.optimization import Optimizer
from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.tiers import first
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
TIMES = ("seconds", "samples_per_second", "waiting")

# Beside the named methods: the choices that none of them makes.
OTHERS = {
    "mlp": ObjectiveConfig(normalizer="mlp", settings={"updates": 2, "restart_every": 7, "rho": 1.0}),
    "simultaneous": ObjectiveConfig(
        settings={"prototypes": 24, "schedule": "simultaneous", "restart_every": 7, "rho": 1.0}
    ),
    "hinged prototypes per sample": ObjectiveConfig(
        pairwise="squared_hinge", temperature_rule="per_sample", settings={"prototypes": 24, "updates": 2, "rho": 1.0}
    ),
}


def lines(run):
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def config_for(folder, name):
    if name in fb.METHODS:
        return small_config(folder, name)
    return replace(small_config(folder), objective=OTHERS[name])


def go_on_from(run, copy, step):
    """A copy of a run as it was right after the checkpoint of ``step``, a few steps further on."""
    shutil.copytree(run, copy)
    for later in checkpoint.checkpoints(copy / "checkpoints"):
        if later > checkpoint.folder_of(copy / "checkpoints", step):
            shutil.rmtree(later)
    return copy


AT_ONCE = ("openclip", "siglip", "sogclr", "scent", "isogclr", "tempnet", "amorlip", "neuclip", "rolling", "xbm", "mlp")


@pytest.mark.parametrize("name", first(AT_ONCE, of=[*fb.METHODS, *OTHERS]))
def test_twenty_steps_are_ten_and_ten(tmp_path, name):
    config = config_for(tmp_path, name)
    whole = train(config).folder
    copy = go_on_from(whole, tmp_path / "copy", step=10)
    train(renamed(config, "copy"), resume=copy)
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []
    assert lines(whole) == lines(copy)
    assert [line["step"] for line in lines(copy)] == list(range(1, 21))


def test_with_everything_switched_on(tmp_path):
    config = small_config(tmp_path, "fastclip_v3", ema=0.9, micro_batch=3, precision="bf16")
    optimizer = Optimizer(optimizer="radam", weight_decay=1e-4, clip_norm=0.5, temperature_lr_drop_below=0.07)
    config = replace(config, optimizer=optimizer, data=replace(config.data, workers=2))
    whole = train(config).folder
    copy = go_on_from(whole, tmp_path / "copy", step=10)
    train(replace(renamed(config, "copy"), data=replace(config.data, workers=1)), resume=copy)
    assert set(saved_state(whole, 20)) == {
        "model", "average", "optimizer", "temperature_optimizer", "objective", "scaler", "position"
    }  # fmt: skip
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []


def test_with_the_data_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = small_config(tmp_path, "sogclr")
    config = replace(config, data=replace(config.data, in_memory=True, flip=True, crop=(0.5, 1.0)))
    whole = train(config).folder
    copy = go_on_from(whole, tmp_path / "copy", step=10)
    train(renamed(config, "copy"), resume=copy)
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []
    assert lines(whole) == lines(copy)
    read = train(renamed(replace(config, data=replace(config.data, in_memory=False)), "read")).folder
    assert saved_state(read, 20)["position"]["step"] == 20
    assert set(lines(read)[-1]) == set(lines(whole)[-1])


def spoil_by_a_bit(folder):
    path = folder / "objective.pt"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def spoil_by_cutting(folder):
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:-100])


def spoil_by_losing(folder):
    (folder / "optimizer.pt").unlink()


def spoil_the_manifest(folder):
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("spoil", [spoil_by_a_bit, spoil_by_cutting, spoil_by_losing, spoil_the_manifest])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, spoil, caplog):
    config = small_config(tmp_path, "sogclr")
    whole = train(config).folder
    copy = go_on_from(whole, tmp_path / "copy", step=20)
    spoil(checkpoint.folder_of(copy / "checkpoints", 20))
    train(renamed(config, "copy"), resume=copy)
    assert "step-000000020 is damaged" in caplog.text
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []
    assert [path.name for path in sorted((copy / "checkpoints").iterdir())] == [
        "damaged-step-000000020", "step-000000010", "step-000000020"
    ]  # fmt: skip


def test_every_checkpoint_damaged(tmp_path):
    config = small_config(tmp_path)
    run = train(config).folder
    for folder in checkpoint.checkpoints(run / "checkpoints"):
        spoil_by_losing(folder)
    with pytest.raises(ValueError, match="is damaged; start a new run"):
        train(config, resume=run)


def test_a_finished_run_has_nothing_to_do(tmp_path):
    config = small_config(tmp_path)
    run = train(config).folder
    before = saved_state(run, 20)
    train(config, resume=run)
    assert differences(before, saved_state(run, 20)) == []


def test_only_the_newest_are_kept(tmp_path):
    config = small_config(tmp_path)
    config = replace(config, run=replace(config.run, save_every=3, keep=2))
    run = train(config).folder
    assert [path.name for path in checkpoint.checkpoints(run / "checkpoints")] == ["step-000000018", "step-000000020"]


def test_another_data_set_is_refused_where_samples_are_remembered(tmp_path):
    config = small_config(tmp_path, "sogclr")
    run = train(config).folder
    other = replace(config, data=replace(config.data, data=(config.data.data[0], config.data.data[0])))
    with pytest.raises(ValueError, match=r"another data set|does not fit"):
        train(other, resume=run)


def test_checkpoints_load_without_pickled_code(tmp_path):
    run = train(small_config(tmp_path)).folder
    for path in run.glob("checkpoints/*/*.pt"):
        torch.load(path, weights_only=True)

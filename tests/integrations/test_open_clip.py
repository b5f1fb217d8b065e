"""open_clip's own training script with our objective: killed and resumed it ends where the undisturbed one does."""

import importlib.util
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile

import pytest
import torch
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fullbatch as fb
from fullbatch.integrations import open_clip as ours
from fullbatch.integrations.open_clip import OpenClipLoss
from fullbatch.integrations.open_clip_data import count_samples, shard_sizes
from fullbatch.integrations.state import carry_state
from tests.conftest import unit_rows
from tests.integrations.trainings import CutOff, die_at, differences
from tests.tiers import first

pytest.importorskip("webdataset", reason="webdataset, which open_clip_train imports, is not installed")
pytest.importorskip("pandas", reason="pandas, which open_clip_train imports, is not installed")
open_clip_main = pytest.importorskip("open_clip_train.main", reason="open_clip_train is not installed")

SAMPLES, BATCH, EPOCHS = 48, 8, 3
PER_EPOCH = SAMPLES // BATCH
SETTINGS = {"neuclip": ["prototypes=16", "rho=2.0"], "isogclr": ["rho=2.0"], "fastclip_v3": ["rho=2.0"]}
WORDS = ["red", "green", "blue", "small", "large", "round", "flat", "old", "new", "wet"]


def pictures():
    rng = random.Random(0)
    return [
        (Image.new("RGB", (20, 20), tuple(rng.randbytes(3))), " ".join(rng.sample(WORDS, 4))) for _ in range(SAMPLES)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


def make_data(folder):
    """A CSV, three shards (one of them with a sample that has no caption) and a tiny model."""
    lines = ["filepath\ttitle"]
    for k, (picture, caption) in enumerate(pictures()):
        picture.save(folder / f"{k}.png")
        lines.append(f"{folder / f'{k}.png'}\t{caption}")
    (folder / "pairs.csv").write_text("\n".join(lines))
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for k, (picture, caption) in enumerate(pictures()[shard::3]):
                buffer = io.BytesIO()
                picture.save(buffer, "PNG")
                add(tar, f"{k:04}.png", buffer.getvalue())
                if (shard, k) != (1, 5):
                    add(tar, f"{k:04}.txt", caption.encode())
    small = {"layers": 1, "width": 16}
    config = {
        "embed_dim": 16,
        "vision_cfg": {**small, "image_size": 16, "patch_size": 8, "head_width": 8},
        "text_cfg": {**small, "context_length": 8, "vocab_size": 49408, "heads": 2},
    }
    (folder / "model").mkdir()
    (folder / "model" / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    return folder


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """open_clip sets the level of every logger there is."""
    monkeypatch.setattr(open_clip_main, "setup_logging", lambda *_: None)


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def flags(data, logs, method, *more, source="pairs.csv", workers=0):
    own = ["--objective", method, *(["--objective-settings", *SETTINGS[method]] if method in SETTINGS else [])]
    return [
        *own, "--train-data", str(data / source), "--model", f"local-dir:{data / 'model'}", "--device", "cpu",
        "--precision", "fp32", "--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--workers", str(workers),
        "--lr", "0.01", "--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6", "--warmup", "2", "--logs", str(logs),
        "--name", "run", "--save-most-recent", "--log-every-n-steps", "1", *more,
    ]  # fmt: skip


def shards(**options):
    return {"source": "{0..2}.tar", **options}


def train(arguments, stop_in=None):
    """In this process; ``stop_in`` counts steps of the optimizer."""
    before = die_at(stop_in, kill=False) if stop_in is not None else lambda *_: None
    hook = register_optimizer_step_pre_hook(before)
    try:
        assert ours.train(arguments) == 0
    finally:
        hook.remove()


def final_state(logs):
    state = torch.load(logs / "run" / "checkpoints" / "epoch_latest.pt", weights_only=True)
    assert state["epoch"] == EPOCHS
    return state


def whole_and_resumed(tmp_path, data, method, *more, steps=EPOCHS * PER_EPOCH, **options):
    train(flags(data, tmp_path / "whole", method, *more, **options))
    step = random.Random(method).randint(steps // EPOCHS, steps - 2)
    with pytest.raises(CutOff):
        train(flags(data, tmp_path / "cut", method, *more, **options), stop_in=step)
    train(flags(data, tmp_path / "cut", method, "--resume", "latest", *more, **options))
    return final_state(tmp_path / "whole"), final_state(tmp_path / "cut")


@pytest.mark.parametrize("method", first(["isogclr"], of=["openclip", "sogclr", "isogclr", "neuclip"]))
def test_cut_off_and_resumed_on_a_csv(tmp_path, data, method):
    whole, resumed = whole_and_resumed(tmp_path, data, method)
    assert not differences(whole, resumed)
    table = whole["optimizer"]["fullbatch_objectives"][0]
    assert int(table["_extra_state"][0]) == EPOCHS * PER_EPOCH


@pytest.mark.parametrize("method", first(["sogclr"], of=["sogclr", "neuclip"]))
@pytest.mark.parametrize("workers", first([2], of=[0, 2]))
def test_cut_off_and_resumed_on_shards(tmp_path, data, method, workers):
    whole, resumed = whole_and_resumed(
        tmp_path, data, method, "--train-num-samples", str(SAMPLES), **shards(workers=workers)
    )
    assert not differences(whole, resumed)


@pytest.mark.slow
def test_cut_off_and_resumed_on_shards_drawn_at_random(tmp_path, data):
    more = ("--train-num-samples", str(SAMPLES), "--dataset-resampled")
    whole, resumed = whole_and_resumed(tmp_path, data, "sogclr", *more, **shards(workers=1))
    assert not differences(whole, resumed)


@pytest.mark.slow
def test_killed_and_resumed_by_the_command(tmp_path, data):
    """The command as users give it, and SIGKILL."""
    command = [sys.executable, "-m", "fullbatch.integrations.open_clip"]
    kill = f"""
import random, runpy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tests.integrations.trainings import die_at
register_optimizer_step_pre_hook(die_at(random.randint({PER_EPOCH}, {EPOCHS * PER_EPOCH - 2}), kill=True))
runpy.run_module("fullbatch.integrations.open_clip", run_name="__main__", alter_sys=True)
"""
    train(flags(data, tmp_path / "whole", "fastclip_v3"))
    cut = flags(data, tmp_path / "cut", "fastclip_v3")
    killed = subprocess.run([sys.executable, "-c", kill, *cut], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    subprocess.run([*command, *cut, "--resume", "latest"], check=True, capture_output=True)
    assert not differences(final_state(tmp_path / "whole"), final_state(tmp_path / "cut"))


def test_the_weights_are_open_clips(tmp_path, data):
    """open_clip itself loads what was trained, with the temperature that was learned."""
    import open_clip

    train(flags(data, tmp_path, "openclip"))
    state = final_state(tmp_path)
    config = json.loads((data / "model" / "open_clip_config.json").read_text())["model_cfg"]
    model = open_clip.CLIP(**config)
    open_clip.load_checkpoint(model, str(tmp_path / "run" / "checkpoints" / "epoch_latest.pt"))
    log_tau = state["optimizer"]["fullbatch_objectives"][0]["temperatures.both.log_temperature"]
    assert model.logit_scale.item() == pytest.approx(-log_tau.item(), abs=0.01)
    assert log_tau.item() != pytest.approx(torch.tensor(0.07).log().item(), abs=1e-4), "it has learned"


def test_its_own_rate(tmp_path, data):
    train(flags(data, tmp_path, "openclip", "--temperature-lr", "0.02", "--skip-scheduler"))
    groups = final_state(tmp_path)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.01, 0.01, pytest.approx(0.02)]
    assert groups[2]["weight_decay"] == 0.0


def test_a_timm_optimizer(tmp_path, data):
    whole, resumed = whole_and_resumed(tmp_path, data, "sogclr", "--opt", "timm/lamb")
    assert not differences(whole, resumed)


def test_every_sample_has_one_id(tmp_path, data):
    seen = []
    first = OpenClipLoss.expect_ids
    try:
        OpenClipLoss.expect_ids = lambda self, ids: (seen.extend(ids.tolist()), first(self, ids))
        train(flags(data, tmp_path, "sogclr", "--train-num-samples", str(SAMPLES - 8), **shards()))
    finally:
        OpenClipLoss.expect_ids = first
    assert len(set(seen)) > 0.8 * SAMPLES and set(seen) < set(range(SAMPLES))
    assert 16 + 5 not in seen, "which has no caption"


@pytest.mark.parametrize("method", ["openclip", "sogclr"])
def test_accumulated_batches_are_one_batch(method):
    """As open_clip calls a loss with --accum-freq: the sum of gradients is that of the whole batch, seen once."""
    whole_image, whole_text = (unit_rows(12, 8, seed, torch.float32).requires_grad_() for seed in (0, 1))
    image, text = (rows.detach().clone().requires_grad_() for rows in (whole_image, whole_text))
    results = []
    for accum_freq, rows in ((1, (whole_image, whole_text)), (3, (image, text))):
        objective = fb.make_objective(method, num_samples=12)
        optimizer = carry_state(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), objective)
        loss = OpenClipLoss(objective, accum_freq=accum_freq)
        pieces = [torch.split(part, 12 // accum_freq) for part in rows]
        for ids in torch.arange(12).split(12 // accum_freq):
            loss.expect_ids(ids)
        for j in range(accum_freq):
            inputs = [torch.cat([p if k == j else p.detach() for k, p in enumerate(part)]) for part in pieces]
            losses = loss(*inputs, logit_scale=torch.ones(()), output_dict=True)
            sum(losses.values()).backward()
        learned = [parameter.grad for parameter in objective.parameters()]
        results.append((losses["contrastive_loss"].detach(), learned, dict(objective.state_dict())))
        assert objective.step == 1
        del optimizer
    torch.testing.assert_close(image.grad, whole_image.grad)
    torch.testing.assert_close(text.grad, whole_text.grad)
    torch.testing.assert_close(results[0], results[1], equal_nan=True)


def test_accumulation_in_open_clip(tmp_path, data):
    more = ("--accum-freq", "2")
    whole, resumed = whole_and_resumed(tmp_path, data, "sogclr", *more, steps=EPOCHS * PER_EPOCH // 2)
    assert not differences(whole, resumed)
    assert int(whole["optimizer"]["fullbatch_objectives"][0]["_extra_state"][0]) == EPOCHS * PER_EPOCH // 2


def test_the_script_is_as_before_afterwards(tmp_path, data):
    names = ("create_model_and_transforms", "optim", "get_data", "create_loss", "train_one_epoch")
    before = [getattr(open_clip_main, name) for name in names]
    train(flags(data, tmp_path, "openclip", "--epochs", "1"))
    assert [getattr(open_clip_main, name) for name in names] == before


# -- wrong use ---------------------------------------------------------------------------------------------------------


def answer(capsys, arguments):
    assert ours.run(arguments) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    return [line for line in lines if line.startswith("fullbatch: ")][-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--siglip"], "--siglip does not go with --objective; give --objective siglip instead."),
        (["--model", "coca_ViT-B-32"], "a CoCa model does not go with --objective; it needs its captioning loss."),
        (["--objective", "neuclipp"], "did you mean 'neuclip'?"),
        (["--objective-settings", "rho"], "--objective-settings takes NAME=VALUE, got 'rho'."),
        (["--objective-settings", "rhoo=3"], "rhoo"),
    ],
)
def test_flags_that_cannot_be(tmp_path, data, capsys, more, message):
    assert message in answer(capsys, [*flags(data, tmp_path, "openclip"), *more])


def test_its_extra_is_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "webdataset" else find(name))
    assert "pip install 'fullbatch[open_clip]'" in answer(capsys, ["--objective", "neuclip"])


def test_no_data(capsys):
    assert "--train-data is missing" in answer(capsys, ["--objective", "neuclip"])


def test_shards_that_cannot_be_counted(tmp_path, data, capsys):
    more = ("--train-num-samples", "48")
    line = answer(capsys, flags(data, tmp_path, "sogclr", *more, source="absent-{0..2}.tar"))
    assert "absent-0.tar' cannot be counted" in line and "sizes.json" in line


def test_shards_that_hold_more_than_was_said(tmp_path, data, capsys):
    for shard in range(3):
        os.link(data / f"{shard}.tar", tmp_path / f"{shard}.tar")
    (tmp_path / "sizes.json").write_text(json.dumps({f"{shard}.tar": 10 for shard in range(3)}))
    assert shard_sizes([str(tmp_path / "0.tar")]) == {str(tmp_path / "0.tar"): 10}
    arguments = flags(data, tmp_path / "logs", "sogclr", **shards())
    arguments[arguments.index("--train-data") + 1] = str(tmp_path / "{0..2}.tar")
    assert "holds more samples than the 10 that sizes.json says" in answer(capsys, arguments)


def test_counted_as_open_clip_reads(data):
    assert [count_samples(str(data / f"{shard}.tar")) for shard in range(3)] == [16, 16, 16]


def test_a_checkpoint_of_plain_open_clip(tmp_path, data, capsys):
    plain = flags(data, tmp_path, "openclip")
    open_clip_main.main(plain[plain.index("--train-data") :])
    assert "holds no state of the objective" in answer(capsys, [*plain, "--resume", "latest", "--epochs", "4"])


def test_a_loss_without_ids_or_optimizer():
    objective = fb.make_objective("sogclr", num_samples=8)
    loss = OpenClipLoss(objective)
    rows = unit_rows(8, 4, 0, torch.float32)
    with pytest.raises(ValueError, match=r"No optimizer learns .* call carry_state\(optimizer, objective\)"):
        loss(rows, rows)
    optimizer = carry_state(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), objective)
    with pytest.raises(ValueError, match="it needs sample_ids"):
        loss(rows, rows)
    loss.expect_ids(torch.arange(8))
    with pytest.raises(ValueError, match="image_embeddings must have rows of length 1"):
        loss(2 * rows, rows)
    del optimizer

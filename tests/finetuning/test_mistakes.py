"""A user's mistake is one message that says what to do, before anything is left behind."""

import json
import math
import shutil

import pytest
import torch

from fullbatch.cli import main
from fullbatch.config.model import Model
from fullbatch.loading import open_model
from tests.finetuning.making import tuning_config
from tests.training.small import TOWERS

RECIPE = "--recipe tuneclip --precision fp32 --workers 0 --device cpu --batch-size 8 --epochs 1"


@pytest.fixture
def place(tmp_path, base):
    """Data, towers of two widths, and weights as open_clip saves them, with and without what they need."""
    tuning_config(tmp_path, base)
    (tmp_path / "wide.json").write_text(json.dumps({**TOWERS, "embed_dim": 16}))
    own = open_model(Model(str(base)))
    state = dict(own.model.backbone.state_dict())
    torch.save({**state, "logit_scale": torch.tensor(-math.log(own.temperature))}, tmp_path / "plain.pt")
    torch.save({name: value for name, value in state.items() if name != "logit_scale"}, tmp_path / "scaleless.pt")
    (tmp_path / "text.pt").write_text("not weights")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--model says what to fine-tune: a run folder,"),
        ("--model {place}/nowhere", "There is no run folder, checkpoint or exported model at '{place}/nowhere'."),
        (
            "--model {place}/empty",
            "empty is neither a run folder, nor a checkpoint, nor what `fullbatch export` wrote.",
        ),
        ("--model {base}/..", "is a folder of 1 run(s); name one, such as {base}/../trained"),
        ("--model ViT-B-32", "'ViT-B-32' has no weights: add --pretrained"),
        ("--model ViT-B-33", "There is no such path, and 'ViT-B-33' is neither"),
        ("--model ViT-B-32 --pretrained nowhere", "'nowhere' is neither a file, nor a folder, nor an open_clip tag"),
        ("--model {base} --pretrained {place}/plain.pt", "brings its weights; --pretrained belongs to"),
        ("--model {place}/plain.pt", "holds weights without their design; name the model they belong to"),
        ("--model {place}/wide.json --pretrained {place}/plain.pt", "plain.pt does not fit the model"),
        ("--model {place}/towers.json --pretrained {place}/scaleless.pt", "logit_scale"),
        ("--model {place}/towers.json --pretrained {place}/text.pt", "text.pt cannot be read as a checkpoint"),
        ("--image-tower resnet18 --text-tower bert-base-uncased", "need --pretrained"),
        ("--model {base} --batch-size 64", "--batch-size 64 is more than the 40 samples of an epoch; use at most 40"),
        ("--model {base} --epochs 0", "--epochs must"),
        ("--model {base} --recovery-epochs -1", "--recovery-epochs must be a number of at least 0"),
        ("--model {base} --metric accuracy", "--metric 'accuracy': none of the tasks gives it"),
        ("--model {base} --metric text_to_image_median_rank", "of a rank less is better; take one of the shares"),
        ("--model {base} --tolerance x", "--tolerance must be a share such as 0.01, got 'x'"),
        ("--model {base} --tolerance 3", "--tolerance must lie in [0, 1], got 3.0"),
        ("--model {base}/../trained --image-size 64", "--image-size 64: {base}/../trained has 16; leave it out"),
        ("--model {base} --evaluate zero_shot:{place}/none.csv", "none.csv"),
    ],
)
def test_before_anything_is_trained(place, base, capsys, words, message):
    start = f"{RECIPE} --data {place}/shard.tar --evaluate retrieval:{place}/shard.tar --runs {place}/runs --name tuned"
    words = words.format(place=place, base=base).split()
    kept = start.split()
    for flag in ("--batch-size", "--epochs", "--evaluate"):
        if flag in words:
            where = kept.index(flag)
            del kept[where : where + 2]
    assert main(["finetune", *kept, *words]) == 1
    shown = capsys.readouterr()
    assert message.format(place=place, base=base) in shown.err
    assert "Traceback" not in shown.err and not (place / "runs" / "tuned").exists()


def test_data_must_be_named(base, capsys):
    assert main(["finetune", "--model", str(base)]) == 1
    assert "--data says what to fine-tune on" in capsys.readouterr().err


def test_a_metric_that_the_task_does_not_have(place, base, capsys):
    """Refused before the base is measured, and nothing is left behind; a METRIC alone is the first task's."""
    task = f"retrieval:{place}/shard.tar"
    words = f"{RECIPE} --recovery-epochs 1 --data {place}/shard.tar --runs {place} --name tuned --evaluate {task}"
    assert main(["finetune", *words.split(), "--model", str(base), "--metric", f"{task} mean_r2"]) == 1
    assert f"did you mean '{task} mean_r1'?" in capsys.readouterr().err
    assert not (place / "tuned").exists()
    assert main(["finetune", *words.split(), "--model", str(base), "--metric", "text_to_image_r5"]) == 0
    assert json.loads((place / "tuned" / "finetune.json").read_text())["metric"] == f"{task} text_to_image_r5"


def test_a_run_is_not_written_over(place, base, capsys):
    words = f"{RECIPE} --recovery-epochs 1 --data {place}/shard.tar --runs {place} --name tuned --model {base}"
    words = [*words.split(), "--evaluate", f"retrieval:{place}/shard.tar"]
    assert main(["finetune", *words]) == 0
    before = (place / "tuned" / "base" / "fullbatch.safetensors").stat().st_mtime_ns
    assert main(["finetune", *words]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (place / "tuned" / "base" / "fullbatch.safetensors").stat().st_mtime_ns == before
    assert main(["finetune", "--resume", str(base.parent / "trained")]) == 1
    assert "is not the folder of a `fullbatch finetune` run" in capsys.readouterr().err


def test_nothing_of_the_users_is_overwritten(place, base, capsys):
    """Neither by a run, nor by one that is refused and leaves nothing behind."""
    mine = shutil.copytree(base, place / "models" / "base")
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    words = f"{RECIPE} --model {mine} --data {place}/shard.tar --runs {place} --name models".split()
    for more in ((), ("--batch-size", "4096")):
        assert main(["finetune", *words, *more, "--evaluate", f"retrieval:{place}/shard.tar"]) == 1
        assert f"The folder {place / 'models'} is not empty; give another --name" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


def test_the_base_keeps_its_own_temperature(place, base, capsys):
    words = f"{RECIPE} --recovery-epochs 1 --data {place}/shard.tar --runs {place} --name tuned --model {base}"
    task = f"retrieval:{place}/shard.tar"
    assert main(["finetune", *words.split(), "--settings.temperature", "0.5", "--evaluate", task]) == 0
    found = [open_model(Model(str(folder))).temperature for folder in (base, place / "tuned" / "base")]
    assert found[0] == pytest.approx(found[1])
    assert open_model(Model(str(place / "tuned" / "tuned"))).temperature == pytest.approx(0.5)


def test_an_export_of_a_whole_run_names_what_came_of_it(place, base, capsys):
    words = f"{RECIPE} --recovery-epochs 1 --data {place}/shard.tar --runs {place} --name tuned --model {base}"
    assert main(["finetune", *words.split(), "--evaluate", f"retrieval:{place}/shard.tar"]) == 0
    result = json.loads((place / "tuned" / "finetune.json").read_text())["result"]
    assert main(["export", str(place / "tuned"), str(place / "out")]) == 0
    assert f"what came of it is {place / 'tuned' / result}" in capsys.readouterr().err


def test_the_temperature_may_be_given(place, base, capsys):
    words = f"{RECIPE} --recovery-epochs 1 --data {place}/shard.tar --runs {place} --name tuned"
    words = f"{words} --model {place}/towers.json --pretrained {place}/scaleless.pt --settings.temperature 0.02"
    assert main(["finetune", *words.split(), "--evaluate", f"retrieval:{place}/shard.tar"]) == 0
    for name in ("base", "tuned"):
        assert math.isclose(open_model(Model(f"{place}/tuned/{name}")).temperature, 0.02, rel_tol=1e-6)


def test_what_was_kept_can_be_exported(place, base, capsys):
    assert main(["export", str(base), str(place / "folder")]) == 0
    assert (place / "folder" / "open_clip_config.json").is_file()
    assert open_model(Model(str(place / "folder"))).temperature == pytest.approx(
        open_model(Model(str(base))).temperature
    )

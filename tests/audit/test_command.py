"""``fullbatch audit RUN``: from a run folder to audit.json and a table; what cannot be audited is said clearly."""

import json
import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fullbatch.assembly import build_objective, make_batches
from fullbatch.audit import Options
from fullbatch.audit.errors import normalizer_audit
from fullbatch.audit.finished_run import audit_run
from fullbatch.cli import main
from fullbatch.config.data import Data, Source
from fullbatch.data.images import EvalTransform
from fullbatch.data.sources import open_source
from fullbatch.loading import load_trained
from fullbatch.report.collect import read_run
from fullbatch.report.curves import batch_losses_section
from fullbatch.selection.ordered import losses_at
from fullbatch.selection.spectral import spectral_order
from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.data.making import captioned, write_shard
from tests.tiers import first
from tests.training.small import renamed, small_config

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
METHODS = ("openclip", "siglip", "sogclr", "fastclip_v2", "tempnet", "amorlip", "neuclip", "isogclr_new_v2")


@pytest.fixture(scope="module")
def sogclr(tmp_path_factory):
    """A run with two sources; tests copy it."""
    folder = tmp_path_factory.mktemp("sogclr")
    return train(two_sources(folder)).folder


def two_sources(folder, method="sogclr"):
    config = small_config(folder, method)
    second = write_shard(folder / "second.tar", captioned(12, (16, 16), first=100))
    return replace(config, data=Data(data=(*config.data.data, str(second)), workers=0))


def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


@pytest.mark.parametrize("method", first(["siglip", "sogclr", "amorlip", "neuclip"], of=METHODS))
def test_every_method(tmp_path, capsys, method):
    run = train(small_config(tmp_path, method)).folder
    assert main(["audit", str(run), "--anchors", "20"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((run / "audit.json").read_text())
    assert [each["step"] for each in found["checkpoints"]] == [10, 20]
    assert [each["samples_seen"] for each in found["checkpoints"]] == [80, 160]
    assert (found["anchors"], found["samples"], found["epsilon"], found["batch_size"]) == (20, 40, 1e-14, 8)
    for each in found["checkpoints"]:
        assert each["batch_error"] > 0.0 and each["tau"] > 0.0 and each["seconds"] > 0.0
        assert (each["normalizer_error"] is None) == (method == "siglip")
        assert set(each["by_direction"]) == {"image", "text"}
    errors = [each["batch_error"] for each in found["checkpoints"]]
    assert found["mean"]["batch_error"] == pytest.approx(sum(errors) / 2)
    assert "embedding" in shown and "exact normalizers" in shown
    assert ("has no normalizer" in shown) == (method == "siglip")


def test_the_numbers_are_those_of_the_checkpoint(sogclr, tmp_path):
    """Embedded and restored by hand: two sources, so that an id is the place in both."""
    run = copied(sogclr, tmp_path)
    found = audit_run(run, Options(checkpoint="10", anchors=30, device="cpu")).results["checkpoints"]
    assert [each["step"] for each in found] == [10]
    path = checkpoint.folder_of(run / "checkpoints", 10)
    loaded, state = load_trained(path, average=False), checkpoint.read(path)["objective"]
    batches = make_batches(loaded.config, loaded.model, torch.device("cpu"))
    objective = build_objective(loaded.config, loaded.model, batches.pool)
    objective.load_state_dict(state)
    transform = EvalTransform(16)
    samples = [batches.pool.read(sample) for sample in range(52)]
    with torch.no_grad():
        image, text = loaded.model(
            torch.stack([transform(sample.image, sample.name) for sample in samples]),
            loaded.model.tokenize([sample.captions[0] for sample in samples]),
        )
    numbers = normalizer_audit(objective, image, text, torch.arange(52), 30, 8, torch.Generator().manual_seed(0))
    expected = {key: value for key, value in numbers.items() if key != "by_direction"}
    got = found[0]
    assert {key: got[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_a_nan_is_null_in_the_file_and_how_the_run_was_trained_is_no_matter(sogclr, tmp_path):
    run = copied(sogclr, tmp_path)
    text = (run / "config.yaml").read_text()
    text = text.replace("compile: false", "compile: true").replace("graphs: false", "graphs: true")
    (run / "config.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullbatch.audit.errors._error", lambda *given: (math.nan, math.nan))
        audit_run(run, Options(checkpoint="10", anchors=30, device="cpu"))
    text = (run / "audit.json").read_text()
    assert "NaN" not in text and json.loads(text)["mean"]["normalizer_error"] is None


def without_cost(audited):
    return {key: value for key, value in audited.items() if not key.endswith("seconds")}


def on_rank(rank, run, seed):
    found = audit_run(run, Options(anchors=25, seed=seed))
    return [without_cost(each) for each in found.results["checkpoints"]]


@pytest.mark.parametrize("method", ["fastclip_v2", "neuclip"])
def test_two_ranks_agree_with_one(tmp_path, two_ranks, method):
    run = train(two_sources(tmp_path, method)).folder
    alone = on_rank(0, run, seed=3)
    for found in two_ranks.run(on_rank, run, 3):
        for one, other in zip(alone, found, strict=True):
            flat = {key: value for key, value in one.items() if key != "by_direction"}
            assert {key: other[key] for key in flat} == pytest.approx(flat, rel=1e-3, abs=1e-6)


def test_the_averaged_weights_are_not_what_is_audited(tmp_path):
    config = small_config(tmp_path, "neuclip")
    plain = audit_run(train(config).folder, Options(anchors=20)).results
    with_average = replace(renamed(config, "average"), training=replace(config.training, ema=0.9))
    averaged = audit_run(train(with_average).folder, Options(anchors=20)).results
    assert plain["checkpoints"][-1]["normalizer_error"] == averaged["checkpoints"][-1]["normalizer_error"]


def test_bf16_and_moved_data(sogclr, tmp_path):
    run = copied(sogclr, tmp_path)
    exact = audit_run(run, Options(anchors=40)).results["mean"]
    (tmp_path / "moved").mkdir()
    moved = [shutil.copy(sogclr.parent / name, tmp_path / "moved") for name in ("shard.tar", "second.tar")]
    coarse = audit_run(run, Options(anchors=40, precision="bf16", data=tuple(map(str, moved)))).results["mean"]
    assert coarse["batch_error"] == pytest.approx(exact["batch_error"], rel=0.2)


def failure(capsys, *arguments):
    assert main(["audit", *map(str, arguments)]) == 1
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said
    return said.splitlines()[-1]


def test_data_that_is_gone(tmp_path, capsys):
    run = train(two_sources(tmp_path)).folder
    os.remove(tmp_path / "second.tar")
    said = failure(capsys, run)
    assert "second.tar" in said and "--data" in said and "shard.tar'" not in said.split("cannot")[0]


def test_data_that_is_other_data(tmp_path, capsys):
    run = train(two_sources(tmp_path)).folder
    write_shard(tmp_path / "second.tar", captioned(13, (16, 16), first=300))
    said = failure(capsys, run)
    assert "is not what" in said and "second.tar" in said and "shard.tar" not in said
    said = failure(capsys, run, "--data", tmp_path / "shard.tar")
    assert "had 2 source(s), and now there are 1" in said


def test_no_checkpoint(sogclr, tmp_path, capsys):
    run = copied(sogclr, tmp_path)
    assert "keeps those of steps 10, 20" in failure(capsys, run, "--checkpoint", "15")
    shutil.rmtree(run / "checkpoints")
    assert "There is no checkpoint in" in failure(capsys, run)
    assert "is not a run folder" in failure(capsys, tmp_path)
    assert "There is no run folder" in failure(capsys, tmp_path / "nowhere")
    assert "--anchors must be at least 1" in failure(capsys, run, "--anchors", "0")


def test_a_damaged_checkpoint_is_left_out(sogclr, tmp_path, capsys, caplog):
    run = copied(sogclr, tmp_path)
    (run / "checkpoints" / "step-000000010" / "model.pt").write_bytes(b"")
    assert main(["audit", str(run)]) == 0
    assert [each["step"] for each in json.loads((run / "audit.json").read_text())["checkpoints"]] == [20]
    assert "step-000000010 is damaged (model.pt); it is left out" in caplog.text
    assert "is damaged" in failure(capsys, run, "--checkpoint", "10")


def test_more_anchors_than_samples(sogclr, tmp_path, capsys):
    assert main(["audit", str(copied(sogclr, tmp_path))]) == 0
    assert "--anchors 10,000 is more than the 52 samples: all of them are anchors" in capsys.readouterr().out


def test_a_checkpoint_by_its_folder(sogclr, tmp_path):
    run = copied(sogclr, tmp_path)
    found = audit_run(checkpoint.folder_of(run / "checkpoints", 20), Options(anchors=9))
    assert [each["step"] for each in found.results["checkpoints"]] == [20] and found.folder == run


def test_a_bad_sample_is_left_out(tmp_path):
    config = small_config(tmp_path, "sogclr")
    broken = captioned(40, (20, 16))
    broken[7] = (broken[7][0], {**broken[7][1], "jpg": b"no image"})
    shard = write_shard(tmp_path / "broken.tar", broken)
    run = train(replace(config, data=Data(data=(str(shard),), workers=0, max_bad=0.5))).folder
    found = audit_run(run)
    assert {each["samples"] for each in found.results["checkpoints"]} == {39}


def test_losses_of_spectral_batches_for_a_run_on_uniform_ones(tmp_path):
    """Figures 3 and 5 of "Mini-Batch Optimization of Contrastive Loss": by hand, and on the run's page."""
    run = train(small_config(tmp_path, "openclip")).folder
    assert audit_run(run, Options(anchors=5)).results["checkpoints"][0].get("batch_losses") is None
    found = audit_run(run, Options(anchors=5, batch_losses=True))
    for each in found.results["checkpoints"]:
        line = each["batch_losses"]
        assert sum(line["counts"]) == sum(line["uniform_counts"]) == 40 // 8
        assert line["edges"][0] < line["uniform_mean"] < line["edges"][-1]
    model = load_trained(run, average=False).model.eval()
    samples = open_source(Source(small_config(tmp_path, "openclip").data.data[0]))
    raw = [samples.read(place) for place in range(40)]
    transform = EvalTransform(model.image_size)
    images = torch.stack([transform(one.image, one.name) for one in raw])
    with torch.no_grad():
        image, text = model(images, model.tokenize([one.captions[0] for one in raw]))
    order = np.random.default_rng(0).permutation(40)
    tau, last = (found.results["checkpoints"][-1][name] for name in ("tau", "batch_losses"))
    image, text = image[order], text[order]
    uniform = losses_at(image, text, np.arange(40).reshape(-1, 8), tau).mean()
    clustered = losses_at(image, text, spectral_order(image, text, 8, 40, tau, 0).reshape(-1, 8), tau).mean()
    assert last["uniform_mean"] == pytest.approx(float(uniform), rel=1e-3)
    assert last["mean"] == pytest.approx(float(clustered), rel=1e-3) and last["mean"] > last["uniform_mean"]
    section = batch_losses_section(read_run(run))
    charts = section.body.charts
    assert [chart.title for chart in charts] == ["step 10", "step 20"]
    assert [line.label for line in charts[0].series] == ["spectral", "uniform"]
    assert "step 20" in section.body

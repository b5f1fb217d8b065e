"""The audit during training: when it happens, what it costs, and that training does not notice it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fullbatch.assembly import assemble
from fullbatch.audit.errors import normalizer_audit
from fullbatch.audit.probe import FORWARD, SHARE, AuditPlan, Probe, plan_audits
from fullbatch.config.training import Evaluation
from fullbatch.data.loader import LoadedBatch
from fullbatch.evaluation.embed import Embedder
from fullbatch.training_run import train
from tests.tiers import first
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
# as in tests/distributed/test_training.py
sharding = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 of torch 2.6 needs a GPU")
METHODS = ("openclip", "siglip", "sogclr", "fastclip_v2", "tempnet", "amorlip", "neuclip")


def audited(config, **settings):
    return replace(config, evaluation=replace(config.evaluation, **settings))


def lines(run, kind="audit"):
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line.get("kind") == kind]


def numbers(found):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@pytest.mark.parametrize("method", first(["sogclr", "amorlip", "neuclip"], of=METHODS))
def test_training_does_not_notice(tmp_path, method):
    config = small_config(tmp_path, method, name="without")
    without = train(audited(config, audit_every=0)).folder
    run = train(audited(renamed(config, "with"), audit_every=3, audit_samples=24, audit_anchors=10)).folder
    assert differences(saved_state(without, 20), saved_state(run, 20)) == []
    assert lines(without) == []
    assert [line["step"] for line in lines(run)] == [3, 6, 9, 12, 15, 18]
    for line in lines(run):
        assert (line["anchors"], line["samples"]) == (10, 24)
        assert line["batch_error"] > 0.0 and line["tau"] > 0.0 and line["seconds"] > 0.0
        if method == "siglip":
            assert line["normalizer_error"] is None and line["normalizer_bias"] is None


def test_on_all_samples_it_is_the_audit(tmp_path):
    """At step 20, against the whole data set: the same number as the definition's on the saved state."""
    config = audited(small_config(tmp_path, "sogclr"), audit_every=10, audit_anchors=40)
    run = train(config).folder
    parts = assemble(config, torch.device("cpu"), run / "model")
    for line in lines(run):
        parts.state.restore(saved_state(run, line["step"]))
        plan = plan_audits(config.evaluation, 8, 20, 40)
        assert plan == AuditPlan(10, 40, 40)
        embedder = Embedder(parts.model, parts.model.tokenize, 16, torch.device("cpu"))
        probe = Probe(plan, embedder, parts.batches, parts.state.objective)
        again = probe.audit()
        assert numbers([{**again, "step": line["step"], "kind": "audit"}]) == numbers([line])
        tables = embedder.tables(probe._read())
        generator = torch.Generator().manual_seed(config.training.seed)
        whole = normalizer_audit(
            parts.state.objective, tables.image_nD, tables.text_nD, torch.arange(40), 40, 8, generator
        )
        assert whole["normalizer_error"] == line["normalizer_error"]


def test_resume_is_exact_and_repeats_a_lost_line(tmp_path):
    config = audited(small_config(tmp_path, "sogclr"), audit_every=5, audit_samples=30)
    run = train(config).folder
    wanted, state = numbers(lines(run)), saved_state(run, 20)
    (run / "checkpoints" / "step-000000020").rename(run / "gone")
    kept = [
        text for text in (run / "metrics.jsonl").read_text().splitlines() if '"step": 10' not in text or "loss" in text
    ]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    assert [line["step"] for line in lines(run)] == [5, 15, 20]
    train(config, run)
    assert sorted(numbers(lines(run)), key=lambda line: line["step"]) == wanted
    assert differences(saved_state(run, 20), state) == []


def on_rank(rank, config):
    return str(train(config).folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "parallel"),
    [
        ("openclip", "ddp"),
        ("sogclr", "ddp"),
        ("tempnet", "ddp"),
        ("neuclip", "ddp"),
        pytest.param("sogclr", "fsdp", marks=sharding),
    ],
)
def test_two_ranks(tmp_path, two_ranks, method, parallel):
    """23 samples: one rank has a batch more than the other, and sharded towers must not wait for it."""
    config = small_config(tmp_path, method, parallel=parallel)
    config = audited(config, audit_every=5, audit_samples=23, audit_anchors=11, eval_batch=4)
    one = numbers(lines(train(config).folder))
    two_ranks.run(on_rank, renamed(config, "two"))
    two = numbers(lines(tmp_path / "two"))
    assert len(one) == len(two) == 4
    for here, there in zip(one, two, strict=True):
        assert here.pop("kind") == there.pop("kind") == "audit"
        assert there == pytest.approx(here, rel=1e-3, abs=1e-5)


def test_a_probe_that_cannot_be_read(tmp_path, monkeypatch):
    config = audited(small_config(tmp_path, "openclip"), audit_every=5)
    monkeypatch.setattr("fullbatch.data.loader.EvaluationBatches.__getitem__", _nothing)
    with pytest.raises(ValueError, match="--audit-every 0"):
        train(config)


def _nothing(self, index):
    return LoadedBatch(
        torch.empty(0, dtype=torch.int64), torch.empty((0, 3, 16, 16), dtype=torch.uint8), self.tokenize([""])[:0]
    )


class _Towers(nn.Module):
    """With everything that training would move: BatchNorm's averages, dropout's draws."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, images, tokens):
        rows = self.drop(self.norm(images.float().mean(dim=(2, 3))))
        return (nn.functional.normalize(rows, dim=-1),) * 2


def test_the_towers_are_left_as_they_were():
    model = _Towers()
    model.drop.eval()
    model.train()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    batch = LoadedBatch(
        torch.arange(6), torch.randint(256, (6, 3, 4, 4), generator=torch.Generator()).byte(), torch.zeros(6, 1)
    )
    Embedder(model, lambda words: torch.zeros(len(words), 1), 4, torch.device("cpu")).tables([batch])
    assert model.training and model.norm.training
    assert differences(dict(model.state_dict()), before) == []
    assert torch.equal(torch.random.get_rng_state(), random)


# ---------------------------------------------------------------------------------------------------------------------
# when, and on how much


def test_defaults_cost_little():
    """The share of the run's work, a forward pass being a third of a step's, for runs of all sizes."""
    for batch in (32, 128, 1024, 8192):
        for steps in (1, 20, 100, 352, 10_000, 1_000_000):
            for samples in (batch, 2841, 100_000, 10_000_000):
                plan = plan_audits(Evaluation(), batch, steps, max(samples, batch))
                if plan is None:
                    continue
                audits = steps // plan.every
                assert 1 <= audits <= 10
                assert audits * plan.samples * FORWARD <= 1.001 * SHARE * steps * batch
                assert plan.samples >= min(samples, 4 * batch)
                assert plan.anchors == min(256, plan.samples)


@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        ({}, AuditPlan(36, 256, 540)),
        ({"audit_every": 0}, None),
        ({"audit_every": 100}, AuditPlan(100, 256, 2841)),
        ({"audit_every": 100, "audit_samples": 100}, AuditPlan(100, 100, 100)),
        ({"audit_samples": 1000, "audit_anchors": 50}, AuditPlan(71, 50, 1000)),
        ({"audit_samples": 10**6}, AuditPlan(352, 256, 2841)),
    ],
)
def test_plans_of_the_demo(settings, plan):
    """2,841 samples, 352 steps of 128."""
    assert plan_audits(Evaluation(**settings), 128, 352, 2841) == plan


def test_a_run_too_short_has_none():
    assert plan_audits(Evaluation(), 8, 20, 40) is None


@pytest.mark.parametrize(("audits", "steps"), [(5, 3281), (10, 19), (5, 24), (60, 100), (9, 4), (1, 7)])
def test_as_many_as_asked_for_and_the_last_at_the_end(audits, steps):
    plan = plan_audits(Evaluation(audits=audits), 8, steps, 1000)
    at = [step for step in range(1, steps + 1) if plan.due(step)]
    assert len(at) == min(audits, steps) and at[-1] == steps


@pytest.mark.parametrize(
    "settings",
    [{"audit_every": -1}, {"audits": 0}, {"audit_anchors": 0}, {"audit_samples": 1}],
)
def test_settings_are_checked(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        Evaluation(**settings)


def test_the_chosen_samples_are_distinct_and_spread(tmp_path):
    config = small_config(tmp_path, "openclip")
    parts = assemble(config, torch.device("cpu"))
    embedder = Embedder(parts.model, parts.model.tokenize, 16, torch.device("cpu"))

    def chosen(seed):
        batches = replace(parts.batches, order=replace(parts.batches.order, seed=seed))
        return Probe(AuditPlan(1, 5, 20), embedder, batches, parts.state.objective).samples.ids.tolist()

    probes = [chosen(seed) for seed in (0, 0, 1)]
    assert len(set(probes[0])) == 20 and probes[0] == probes[1] != probes[2]
    assert min(probes[0]) < 10 and max(probes[0]) >= 30

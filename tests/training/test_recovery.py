"""Optimizer statistics recovery: against Algorithm 1 written out in float64, and Theorem 4.2 on a small case."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

from fullbatch.config.optimization import OPTIMIZERS, Optimizer, Recovery
from fullbatch.config.run import RunConfig
from fullbatch.models.build import build_model
from fullbatch.training import checkpoint
from fullbatch.training.stages import Stages, statistics_kept
from fullbatch.training_run import train
from tests.reference import papers
from tests.resume.test_resume import go_on_from, lines
from tests.training.clock import Clock
from tests.training.linear import LinearBatches, LinearTowers, linear_trainer, take_steps
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
CLOSE = {"rtol": 1e-9, "atol": 0.0}
TAU, MARGIN, EPSILON, GAMMA, GAMMA_EPOCHS = 0.1, 0.15, 1e-3, 0.6, 3
BETA1, BETA2, EPS, DECAY, PEAK = 0.9, 0.98, 1e-6, 0.02, 1e-2
SETTINGS = {"temperature": TAU, "margin": MARGIN, "epsilon": EPSILON, "gamma": GAMMA, "gamma_epochs": GAMMA_EPOCHS}


class ByHand:
    """TuneCLIP's Algorithms 1 and 2 as printed, with AdamW as its authors print it."""

    def __init__(self, batches):
        self.batches, self.model, self.u = batches, LinearTowers(), papers.MovingAverages()
        self.weights = list(self.model.parameters())
        self.m, self.v = ([torch.zeros_like(w) for w in self.weights] for _ in range(2))
        self.t = 0

    def step(self, numbers, lr):
        ids, image, text = self.read(numbers)
        rows = self.model(image, text)
        gamma = papers.cosine_gamma(GAMMA, GAMMA_EPOCHS, numbers[0] // self.batches.steps_per_epoch)
        hinge = papers.squared_hinge(MARGIN)
        at_rows, _ = papers.moving_average_step(*rows, ids, self.u, TAU, gamma, EPSILON, loss=hinge)
        gradients = torch.autograd.grad(rows, self.weights, (at_rows.image, at_rows.text))
        self.t += 1
        with torch.no_grad():
            for w, g, m, v in zip(self.weights, gradients, self.m, self.v, strict=True):
                m.copy_(BETA1 * m + (1 - BETA1) * g)
                v.copy_(BETA2 * v + (1 - BETA2) * g * g)
                if lr > 0.0:
                    m_hat, v_hat = m / (1 - BETA1**self.t), v / (1 - BETA2**self.t)
                    w.copy_(w - lr * DECAY * w - lr * m_hat / (v_hat.sqrt() + EPS))

    def read(self, numbers):
        found = [self.batches.batch(number) for number in numbers]
        ids, image, text = (torch.cat([getattr(b, name) for b in found]) for name in ("ids", "images", "tokens"))
        return ids.tolist(), image, text


def pair(tmp_path, **more):
    batches = LinearBatches(samples=16, batch_size=4)
    settings = {
        "method": "tuneclip", "settings": SETTINGS, "lr": PEAK, "beta1": BETA1, "beta2": BETA2, "eps": EPS,
        "weight_decay": DECAY, "recovery_epochs": 4, "epochs": 20, **more,
    }  # fmt: skip
    return batches, linear_trainer(tmp_path, batches, **settings), ByHand(batches)


def assert_memory(trainer, by_hand):
    for name in ("image", "text"):
        table = trainer.state.objective.normalizers[name].log_u
        for sample, value in getattr(by_hand.u, name).items():
            assert float(table.values[sample]) == pytest.approx(math.log(value), rel=1e-9, abs=1e-12)
    for weight, m, v in zip(trainer.state.model.parameters(), by_hand.m, by_hand.v, strict=True):
        moments = trainer.state.optimizer.state[weight]
        torch.testing.assert_close(moments["exp_avg"], m, **CLOSE)
        torch.testing.assert_close(moments["exp_avg_sq"], v, **CLOSE)


@pytest.mark.parametrize("joined", [1, 2])
def test_both_stages_are_those_of_the_paper(tmp_path, joined):
    """T frozen steps: u, m and v at 1e-9, weights to the bit; then 50 updates of AdamW carried on."""
    batches, trainer, by_hand = pair(tmp_path, recovery_batch=4 * joined)
    frozen = trainer.stages.recovery
    assert frozen == 16 // joined and trainer.stages.training == 80
    base = [weight.detach().clone() for weight in trainer.state.model.parameters()]
    for step in range(frozen):
        take_steps(trainer, batches, 1)
        by_hand.step(range(step * joined, (step + 1) * joined), lr=0.0)
        assert_memory(trainer, by_hand)
    assert all(torch.equal(a, b) for a, b in zip(base, trainer.state.model.parameters(), strict=True))
    for step in range(50):
        take_steps(trainer, batches, 1)
        by_hand.step([16 + step], lr=PEAK * 0.5 * (1 + math.cos(math.pi * step / 80)))
        for ours, theirs in zip(trainer.state.model.parameters(), by_hand.weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert not any(torch.equal(a, b) for a, b in zip(base, trainer.state.model.parameters(), strict=True))
    counts = {float(each["step"]) for each in trainer.state.optimizer.state.values()}
    assert counts == {frozen + 50.0}


def mean_errors(tmp_path, epochs, seed):
    """Mean squared errors of u and m over all iterates, the random iterate of Theorem 4.2."""
    rate = 0.05 * math.sqrt(8 / epochs)
    batches = LinearBatches(samples=64, batch_size=8, seed=seed)
    settings = {"temperature": 0.2, "gamma": rate, "epsilon": 1e-3}
    trainer = linear_trainer(
        tmp_path, batches, method="sogclr", settings=settings, recovery_epochs=epochs, epochs=1, beta1=1 - rate
    )
    model, objective = trainer.state.model, trainer.state.objective
    rows = model(*batches.features())
    tau = torch.tensor(0.2, dtype=torch.float64)
    exact = [
        torch.stack([1e-3 + papers.inner_mean(a, b, i, tau) for i in range(64)]) for _, a, b in papers.directions(*rows)
    ]
    loss = 0.2 * sum(g.log().mean() for g in exact)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    u_error = m_error = 0.0
    for _ in range(trainer.stages.recovery):
        take_steps(trainer, batches, 1)
        for name, g in zip(("image", "text"), exact, strict=True):
            u = objective.normalizers[name].log_u.values.exp().nan_to_num(0.0)
            u_error += float(((u - g.detach()) ** 2).mean()) / 2
        for weight, exactly in zip(model.parameters(), gradient, strict=True):
            m_error += float(((trainer.state.optimizer.state[weight]["exp_avg"] - exactly) ** 2).sum())
    return u_error / trainer.stages.recovery, m_error / trainer.stages.recovery


@pytest.mark.slow
def test_with_falling_rates_longer_recovery_is_more_exact(tmp_path):
    """Theorem 4.2: 1 - beta1 and gamma as sqrt(B/E).  At fixed rates nothing of the kind is claimed."""
    found = torch.tensor(
        [[mean_errors(tmp_path, epochs, seed) for seed in range(3)] for epochs in (2, 8, 32)], dtype=torch.float64
    ).mean(1)
    assert bool((found[1:] < 0.75 * found[:-1]).all()), found


# -- what is carried over, what stays frozen --------------------------------------------------------------------------


@pytest.mark.parametrize("carry", ["all", "moments", "memory", "none"])
def test_what_is_carried_over(tmp_path, carry):
    batches, trainer, _ = pair(tmp_path, carry=carry)
    take_steps(trainer, batches, trainer.stages.recovery)
    weight = next(trainer.state.model.parameters())
    before = trainer.state.optimizer.state[weight]["exp_avg"].clone()
    unseen = set(range(16)) - set(batches.batch(16).ids.tolist())
    kept = trainer.state.objective.normalizers["image"].log_u.values.clone()
    take_steps(trainer, batches, 1)
    moments, table = trainer.state.optimizer.state[weight], trainer.state.objective.normalizers["image"].log_u.values
    counts = trainer.stages.recovery + 1 if carry in ("all", "moments") else 1
    assert float(moments["step"]) == counts
    assert (moments["exp_avg"] * before).sum() / before.norm() ** 2 > (0.8 if counts > 1 else -1.0)
    rows = table[sorted(unseen)]
    expected = kept[sorted(unseen)] if carry in ("all", "memory") else torch.full_like(rows, math.nan)
    torch.testing.assert_close(rows, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_moves_frozen_weights(tmp_path, optimizer):
    config = recovering(small_config(tmp_path, "tuneclip", steps=2), recovery_steps=6)
    config = replace(config, optimizer=Optimizer(optimizer, weight_decay=1e-2), run=replace(config.run, save_every=6))
    run = train(config).folder
    torch.manual_seed(config.training.seed)
    assert differences(build_model(config.model).state_dict(), saved_state(run, 6)["model"]) == []
    assert differences(saved_state(run, 6)["model"], saved_state(run, 8)["model"]) != []


def test_batch_norm_keeps_its_statistics(tmp_path):
    layer = torch.nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    rows = torch.randn(8, 3)
    with statistics_kept(layer):
        frozen = layer(rows)
    assert differences(before, layer.state_dict()) == []
    torch.testing.assert_close(frozen, layer(rows))
    assert differences(before, layer.state_dict()) != []


def test_prototypes_settle_on_the_frozen_model_and_tau_waits(tmp_path):
    config = recovering(small_config(tmp_path, "neuclip", steps=2), recovery_steps=10)
    run = train(config).folder
    early, late = saved_state(run, 10)["objective"], saved_state(run, 12)["objective"]
    name = "temperatures.both.log_temperature"
    assert float(early[name]) == pytest.approx(math.log(0.07)) and float(late[name]) != float(early[name])
    logged = lines(run)
    assert {line["stage"] for line in logged if line["step"] <= 10} == {"recovery"}
    assert all(line["lr"] == 0.0 for line in logged if line["step"] <= 10)
    assert [line["stage"] for line in logged if line["step"] > 10] == ["tuning"] * 2


# -- the trainer's promises hold in either stage ----------------------------------------------------------------------


def recovering(config, **recovery):
    return replace(config, recovery=Recovery(**recovery))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "carry"),
    [("tuneclip", "all"), ("tuneclip", "none"), ("neuclip", "moments"), ("amorlip", "all"), ("isogclr", "memory")],
)
def test_resumed_in_either_stage(tmp_path, method, carry):
    """In the recovery, right at its end, and after it."""
    config = recovering(small_config(tmp_path, method, steps=6), recovery_steps=6, recovery_batch=16, carry=carry)
    config = replace(config, run=replace(config.run, save_every=3))
    whole = train(config).folder
    for step in (3, 6, 9):
        copy = go_on_from(whole, tmp_path / f"copy{step}", step)
        train(renamed(config, copy.name), resume=copy)
        assert differences(saved_state(whole, 12), saved_state(copy, 12)) == []
        assert lines(whole) == lines(copy)


def test_a_recovery_of_larger_batches_than_there_are_samples_is_refused(tmp_path):
    config = recovering(small_config(tmp_path, "tuneclip"), recovery_steps=2, recovery_batch=48)
    with pytest.raises(ValueError, match="--recovery-batch 48 is more than the 40 samples of an epoch"):
        train(config)


def test_no_sample_meets_itself_in_a_larger_batch(tmp_path):
    stages = Stages(per_epoch=5, training=5, recovery=7, joined=2)
    batches = LinearBatches(samples=20, batch_size=4)
    for step in range(stages.recovery):
        ids = torch.cat([batches.batch(number).ids for number in stages.places(step)])
        assert len(ids.unique()) == len(ids) == 8


def test_the_speed_counts_what_was_read(tmp_path, monkeypatch):
    Clock(monkeypatch)
    config = recovering(small_config(tmp_path, "tuneclip", steps=4), recovery_steps=4, recovery_batch=40)
    config = replace(config, run=replace(config.run, log_every=4))
    frozen, tuned = (json.loads(text) for text in (train(config).folder / "metrics.jsonl").read_text().splitlines())
    assert frozen["samples"] == 160 and tuned["samples"] == 192
    assert frozen["samples_per_second"] == pytest.approx(160 / frozen["seconds"], rel=0.5)


def test_going_on_with_another_recovery_is_refused(tmp_path):
    config = recovering(small_config(tmp_path, "tuneclip", steps=2), recovery_steps=2)
    run = train(config).folder
    with pytest.raises(ValueError, match=r"--resume cannot change --recovery-steps \(it was 2, now 3\)"):
        train(recovering(config, recovery_steps=3), resume=run)


def test_going_on_before_the_first_checkpoint_starts_from_the_pretrained_weights(tmp_path):
    config = small_config(tmp_path, "tuneclip")
    weights = tmp_path / "base.pt"
    torch.save(build_model(config.model).backbone.state_dict(), weights)
    config = replace(config, model=replace(config.model, pretrained=str(weights)))
    whole = train(config).folder
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    train(renamed(config, "copy"), resume=copy)
    assert differences(saved_state(whole, 20), saved_state(copy, 20)) == []


def test_a_constant_temperature_comes_with_the_weights(tmp_path):
    config = small_config(tmp_path, "tuneclip", steps=2)
    model = build_model(config.model)
    model.backbone.logit_scale.data.fill_(math.log(40.0))
    torch.save(model.backbone.state_dict(), tmp_path / "base.pt")
    config = replace(config, model=replace(config.model, pretrained=str(tmp_path / "base.pt")))
    assert lines(train(config).folder)[-1]["tau"] == pytest.approx(1 / 40, rel=1e-6)
    own = replace(config, objective=replace(config.objective, settings={"temperature": 0.2}))
    assert lines(train(renamed(own, "own")).folder)[-1]["tau"] == pytest.approx(0.2)


def test_cost_by_stage(tmp_path):
    config = recovering(small_config(tmp_path, "tuneclip", steps=4), recovery_steps=3, recovery_batch=16)
    cost = train(config).results["cost"]
    counted = [(stage["stage"], stage["steps"], stage["samples"]) for stage in cost["stages"]]
    assert counted == [("recovery", 3, 48), ("tuning", 4, 32)]
    assert all(stage["seconds"] > 0.0 and stage["device_hours"] > 0.0 for stage in cost["stages"])
    plain = train(renamed(small_config(tmp_path, "openclip", steps=4), "plain")).results["cost"]
    assert [stage["stage"] for stage in plain["stages"]] == ["training"]
    assert checkpoint.checkpoints(tmp_path / "plain" / "checkpoints")


# -- numbers of the stages --------------------------------------------------------------------------------------------


def test_the_stages_share_one_stream():
    stages = Stages(per_epoch=5, training=7, recovery=3, joined=2)
    assert stages.total == 10
    assert [list(stages.places(step)) for step in range(5)] == [[0, 1], [2, 3], [5, 6], [7], [8]]  # 4 would be alone
    assert [stages.batches_read(step) for step in range(6)] == [0, 2, 4, 6, 7, 8]
    assert [stages.epoch(step) for step in range(8)] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [stages.name(step) for step in (0, 2, 3, 9)] == ["recovery", "recovery", "tuning", "tuning"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recovery_epochs": -1}, "Recovery.recovery_epochs must be a number of at least 0, got -1.0; 0 means no"),
        ({"recovery_batch": 200}, "Recovery.recovery_batch must be a multiple of batch_size (128), got 200."),
        ({"recovery_epochs": 1, "recovery_steps": 2}, "Recovery.recovery_steps must be left out"),
        ({"carry": "u"}, "Recovery.carry must be one of 'all', 'moments', 'memory', 'none', got 'u'."),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RunConfig.of(**settings)


def test_no_epoch_of_recovery_is_a_cold_start(tmp_path):
    config = small_config(tmp_path, "tuneclip")
    whole = train(config).folder
    none = train(renamed(recovering(config, recovery_epochs=0), "none")).folder
    assert differences(saved_state(whole, 20), saved_state(none, 20)) == []

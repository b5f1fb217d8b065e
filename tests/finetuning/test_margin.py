"""The margin goes by the temperature: what the rule says stays is the same at every tau, and TuneCLIP's at 0.01."""

from dataclasses import replace

import pytest
import torch

from fullbatch.finetuning import margin
from fullbatch.finetuning.finetune import finetune
from fullbatch.finetuning.margin import margin_at, with_margin
from fullbatch.loading import load_trained
from tests.finetuning.making import tuning_config


def at_no_gap(tau, width):
    """The exponent (d + m)^2 / tau of a negative as near as the positive, and its slope in d; in float64."""
    gap = torch.zeros((), dtype=torch.float64, requires_grad=True)
    exponent = (gap + width).clamp(min=0.0) ** 2 / tau
    (slope,) = torch.autograd.grad(exponent, gap)
    return exponent.item(), slope.item()


@pytest.mark.parametrize("tau", [0.005, 0.0085, 0.01, 0.015, 0.0326, 0.07])
@pytest.mark.parametrize(("power", "kept"), [(1.0, 1), (0.5, 0)])
def test_what_the_rule_keeps_is_the_papers(tau, power, kept, monkeypatch):
    monkeypatch.setattr(margin, "POWER", power)
    assert at_no_gap(tau, margin_at(tau))[kept] == pytest.approx((1.0, 20.0)[kept], rel=1e-12)


def test_the_margin_is_the_papers_at_its_temperature_and_never_wider_than_a_gap():
    assert margin_at(0.01) == 0.1 and margin.POWER in (1.0, 0.5)
    assert margin_at(1.0) <= 2.0 and margin_at(0.02) > 0.1 > margin_at(0.008)


def settings_of(run):
    return load_trained(run).config.objective.settings


def test_a_run_writes_down_its_margin_and_goes_on_with_it(tmp_path, base):
    config = tuning_config(tmp_path, base, epochs=1)
    run = finetune(config).trained.folder
    temperature = load_trained(run).temperature
    assert settings_of(run)["margin"] == pytest.approx(margin_at(temperature)) and temperature > 0.02
    again = finetune(replace(config, training=replace(config.training, epochs=2)), resume=run).trained.folder
    assert settings_of(again) == settings_of(run)


def test_a_margin_that_was_given_stays(tmp_path, base):
    config = tuning_config(tmp_path, base)

    def found(**settings):
        objective = replace(config.objective, settings=settings)
        return with_margin(replace(config, objective=objective), 0.3).objective.settings

    assert found(margin=0.05) == {"margin": 0.05} and found(gamma=0.9) == {"gamma": 0.9, "margin": 0.3}
    plain = replace(config, objective=replace(config.objective, pairwise="identity"))
    assert with_margin(plain, 0.3) == plain and with_margin(config, None) == config


def test_a_temperature_that_was_given_decides(tmp_path, base):
    config = tuning_config(tmp_path, base, epochs=1)
    given = replace(config, objective=replace(config.objective, settings={"temperature": 0.05}))
    assert settings_of(finetune(given).trained.folder)["margin"] == pytest.approx(margin_at(0.05))

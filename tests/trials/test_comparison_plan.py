"""Plans: which runs they name, in which order, with which configs."""

import re
from pathlib import Path

import pytest
import yaml

from fullbatch.cli.compare import Compare, plan_values
from fullbatch.cli.train import train_config
from fullbatch.config.tree import to_dict, write_values
from fullbatch.training.run_folder import Folder
from fullbatch.trials.checks import check_begun, check_runs, check_same_plan
from fullbatch.trials.comparison_plan import plan_from
from tests.training.small import write_inputs


def planned(*flags, **options):
    return plan_from(plan_values(Compare(**{"name": "t", **options}), flags))


def config_of(plan, name):
    run = next(run for run in plan.planned if run.name == name)
    return plan.config(run, "runs")


def from_file(tmp_path, text, *flags):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return plan_from(plan_values(Compare(plan=path, name="t"), flags))


def test_every_cell_comes_once_before_any_comes_twice():
    plan = planned(methods=("openclip", "sogclr"), batch_sizes=(8, 16), seeds=(0, 1))
    assert [run.name for run in plan.planned] == [
        "openclip-b8-seed0", "sogclr-b8-seed0", "openclip-b16-seed0", "sogclr-b16-seed0",
        "openclip-b8-seed1", "sogclr-b8-seed1", "openclip-b16-seed1", "sogclr-b16-seed1",
    ]  # fmt: skip


def test_other_orders():
    by_size = planned(methods=("openclip", "sogclr"), batch_sizes=(16, 8), seeds=(0, 1), order="batch_sizes")
    assert [run.batch_size for run in by_size.planned] == [16] * 4 + [8] * 4
    by_row = planned(methods=("sogclr", "openclip"), batch_sizes=(8,), seeds=(0, 1), order="methods")
    assert [run.row.name for run in by_row.planned] == ["sogclr"] * 2 + ["openclip"] * 2


def test_a_method_keeps_the_settings_its_recipe_gives_it_and_no_others():
    plan = planned("--samples", "640", methods=("openclip", "neuclip"), batch_sizes=(64,), seeds=(3,))
    openclip, neuclip = (config_of(plan, f"{name}-b64-seed3") for name in ("openclip", "neuclip"))
    assert neuclip.objective.settings == {"prototypes": 512, "rho": 4.0}
    assert openclip.objective.settings == {}
    assert (openclip.training.batch_size, openclip.training.seed, openclip.training.samples) == (64, 3, 640)
    same = [{k: v for k, v in to_dict(c).items() if k not in ("objective", "run")} for c in (openclip, neuclip)]
    assert same[0] == same[1]


def test_a_row_changes_at_one_batch_size(tmp_path):
    text = """
methods:
  - {name: tuned, method: openclip, lr: 0.001, weight_decay: 0.2, at: {16: {lr: 0.002, temperature_lr: 1e-5}}}
batch_sizes: [8, 16]
seeds: [0]
"""
    plan = from_file(tmp_path, text)
    small, large = (config_of(plan, f"tuned-b{size}-seed0").optimizer for size in (8, 16))
    assert (small.lr, small.temperature_lr) == (0.001, None) and (large.lr, large.temperature_lr) == (0.002, 1e-5)
    assert small.weight_decay == large.weight_decay == 0.2
    assert plan_from(yaml.safe_load(write_values(plan.as_dict()))).planned == plan.planned
    for wrong in ("{16: 0.002}", "{small: {lr: 0.1}}"):
        with pytest.raises(ValueError, match=r"Row.at must map batch sizes to changes, as in at: \{64"):
            from_file(tmp_path, text.replace("{16: {lr: 0.002, temperature_lr: 1e-5}}", wrong))
    with pytest.raises(ValueError, match="leave seed to the plan"):
        from_file(tmp_path, text.replace("lr: 0.002", "seed: 3"))


def test_settings_of_one_method():
    plan = planned(
        methods=("openclip", "neuclip"),
        seeds=(0,),
        settings_of=("neuclip.rho=5", "openclip.temperature_lr=1e-4", "openclip.temperature=0.1"),
    )
    openclip, neuclip = (config_of(plan, f"{name}-b128-seed0") for name in ("openclip", "neuclip"))
    assert neuclip.objective.settings["rho"] == 5 and neuclip.objective.settings["prototypes"] == 512
    assert openclip.optimizer.temperature_lr == 1e-4 and openclip.objective.settings == {"temperature": 0.1}
    assert neuclip.optimizer.temperature_lr is None


@pytest.mark.parametrize(
    ("scaling", "rates"), [("none", (1e-3, 1e-3)), ("sqrt", (5e-4, 2e-3)), ("linear", (2.5e-4, 4e-3))]
)
def test_learning_rate_over_batch_sizes(scaling, rates):
    plan = planned(methods=("openclip",), batch_sizes=(32, 512), seeds=(0,), lr_scaling=scaling)
    found = [config_of(plan, f"openclip-b{size}-seed0").optimizer.lr for size in (32, 512)]
    assert found == pytest.approx(rates)


PLAN = """
base: {training: {samples: 100}}
methods:
  - openclip
  - {name: neuclip Tr=3, method: neuclip, settings: {restart_every: 3}, lr: 2e-3, batch_sizes: [8]}
  - {name: neuclip-mlp, method: neuclip, normalizer: mlp, batch_sizes: []}
batch_sizes: [8, 16]
seeds: [0, 1]
runs:
  - {methods: [neuclip-mlp], batch_sizes: [16], seeds: [5]}
  - {methods: [openclip], batch_sizes: [8], seeds: [0]}
"""


def test_a_plan_file(tmp_path):
    plan = from_file(tmp_path, PLAN, "--epochs", "3")
    names = [run.name for run in plan.planned]
    assert names == [
        "openclip-b8-seed0", "neuclip_Tr=3-b8-seed0", "openclip-b16-seed0",
        "openclip-b8-seed1", "neuclip_Tr=3-b8-seed1", "openclip-b16-seed1", "neuclip-mlp-b16-seed5",
    ]  # fmt: skip
    row = config_of(plan, "neuclip_Tr=3-b8-seed1")
    assert row.optimizer.lr == 2e-3 and row.objective.settings == {"restart_every": 3}
    assert row.training.samples is None and row.training.epochs == 3, "a flag changes the base"
    assert config_of(plan, "neuclip-mlp-b16-seed5").objective.normalizer == "mlp"
    assert plan.baseline == "openclip"


def test_what_is_written_is_read_back_the_same(tmp_path):
    plan = from_file(tmp_path, PLAN)
    assert plan_from(yaml.safe_load(write_values(plan.as_dict()))) == plan


def test_a_comparison_may_grow_but_not_change(tmp_path):
    def plan(*flags, **options):
        return planned(*flags, **{"methods": ("openclip",), "seeds": (0,), **options})

    before = plan("--samples", "640")
    check_same_plan(before, plan("--samples", "640", methods=("openclip", "sogclr"), seeds=(0, 1)), tmp_path)
    check_same_plan(before, plan("--samples", "640", "--workers", "0"), tmp_path)
    with pytest.raises(ValueError, match=r"openclip-b128-seed0 training.samples was 640 and is now 641"):
        check_same_plan(before, plan("--samples", "641"), tmp_path)
    with pytest.raises(ValueError, match="holds a comparison with the run openclip-b128-seed0"):
        check_same_plan(before, plan("--samples", "640", seeds=(1,)), tmp_path)


def test_the_rule_of_the_budget_may_not_change(tmp_path):
    samples, timed = planned(), planned(equal_time="openclip")
    check_same_plan(timed, planned(equal_time="openclip", seeds=(0, 1, 2, 3)), tmp_path)
    with pytest.raises(ValueError, match=r"equal_time was None and is now 'openclip'\. Take another --name"):
        check_same_plan(samples, timed, tmp_path)
    with pytest.raises(ValueError, match="equal_time was 'openclip' and is now 'sogclr'"):
        check_same_plan(timed, planned(equal_time="sogclr"), tmp_path)


def test_a_run_that_was_begun_otherwise_is_refused(tmp_path):
    plan = planned("--samples", "640", methods=("openclip",), seeds=(0,), equal_time="openclip")
    (config,) = plan.configs(tmp_path, {"openclip-b128-seed0": 1280})
    check_begun([config])
    Folder.of(config).path.mkdir(parents=True)
    Folder.of(config).write_config(config)
    check_begun([config])
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    check_begun(plan.configs(moved, {"openclip-b128-seed0": 1280}))
    with pytest.raises(ValueError, match=r"config.yaml is of another run .* training.samples was 1280 and is now 1152"):
        check_begun(plan.configs(moved, {"openclip-b128-seed0": 1152}))


@pytest.mark.parametrize("batches", ["uniform", "spectral"])
def test_a_run_of_before_there_were_corrections(tmp_path, batches):
    """Its uniform batches are what they were, and count; selected ones would be corrected now."""
    plan = planned("--samples", "640", "--batches", batches, methods=("openclip",), seeds=(0,))
    (config,) = plan.configs(tmp_path)
    folder = Folder.of(config)
    folder.path.mkdir(parents=True)
    folder.write_config(config)
    text = folder.config.read_text()
    folder.config.write_text(text.replace("  correction: normalizers\n", ""))
    assert folder.config.read_text() != text
    if batches == "uniform":
        check_begun([config])
    else:
        with pytest.raises(ValueError, match=r"selection.correction was 'none' and is now 'normalizers'"):
            check_begun([config])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods: [openclipp]", "Unknown method 'openclipp'; did you mean 'openclip'"),
        ("methods: [openclip, {method: openclip, lr: 1.0}]", "Two rows of the comparison are called 'openclip'"),
        ("methods: [{method: openclip, name: a b}, {method: openclip, name: a/b}]", "Two rows"),
        ("methods: [{method: openclip, settings: {rho: 3}}]", "The row 'openclip':.*rho"),
        ("methods: [{method: openclip, ls: 3}]", "A run has no setting 'ls'"),
        ("methods: [{method: openclip, seed: 3}]", "leave seed to the plan"),
        ("methods: [{name: openclip}]", "a mapping with `method`"),
        ("methods: openclip", "is a list"),
        ("methods: [3]", "a mapping with `method`"),
        ("metods: [openclip]", "a plan has no 'metods'; did you mean 'methods'"),
        ("batch_sizes: [8, 8]", "must be different whole numbers"),
        ("batch_sizes: [big]", "whole number"),
        ("seeds: []", "at least one seed"),
        ("seeds: [-1]", "at least 0"),
        ("baseline: siglip", "baseline: no row is called 'siglip'"),
        ("equal_time: siglip", "equal_time: no row is called 'siglip'"),
        ("runs: [{methods: [nix]}]", "runs: no row is called 'nix'"),
        ("runs: [{method: openclip}]", "Unknown key 'method'"),
        ("order: size", "must be one of"),
        ("lr_scaling: cubic", "must be one of"),
        ("base: 3", "plan.yaml: base must map names to values, as config.yaml does, got 3"),
        ("methods: [{method: openclip, settings: 3}]", "settings must map names to values, got 3"),
        ("base: {training: {sample: 3}}", "Unknown key 'sample' in training; did you mean 'samples'"),
    ],
)
def test_mistakes_in_a_plan(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        from_file(tmp_path, text).configs(tmp_path)


def test_the_data_scaling_of_the_docs(tmp_path):
    """TuneCLIP's Figure 5: the same model on five amounts of data, each part of the next; here of 40 pictures."""
    docs = (Path(__file__).parents[2] / "docs" / "how-to" / "compare.md").read_text()
    text = re.search(r"### Data scaling.*?```yaml\n(.*?)```", docs, re.DOTALL)[1]
    plan = from_file(tmp_path, text)
    assert (plan.baseline, plan.metric, plan.batch_sizes) == ("12M", "accuracy", (2048,))
    configs = [plan.config(run, "runs") for run in plan.planned if run.seed == 0]
    assert [config.data.data_share for config in configs] == [0.2, 0.4, 0.6, 0.8, 1.0]
    recipe = train_config(["--recipe", "tuneclip"])[0]
    for config in configs:
        assert (config.objective, config.optimizer) == (recipe.objective, recipe.optimizer)
        assert (config.training.epochs, config.recovery.recovery_epochs) == (5, 5)
        assert config.evaluation.evaluate_start and config.evaluation.evaluate_every == 1

    data, model = write_inputs(tmp_path)
    small = ("--data", data, "--model", model, "--evaluate", f"zero_shot:{data}", "--device", "cpu", "--workers", "0")
    path = tmp_path / "scaling.yaml"
    path.write_text(text)
    plan = plan_from(plan_values(Compare(plan=path, name="t", batch_sizes=(4,)), (*small, "--precision", "fp32")))
    configs = [config for config in plan.configs(tmp_path) if config.training.seed == 0]
    assert list(check_runs(configs).values()) == [20, 40, 60, 80, 100], (
        "ten epochs of 8, 16, ... pictures, four at a time"
    )

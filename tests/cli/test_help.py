"""What `--help` shows, and how soon."""

import dataclasses
import re
import subprocess
import sys

import pytest

from fullbatch import __version__
from fullbatch.cli import COMMANDS
from fullbatch.cli.flags import field_help
from fullbatch.cli.help import ESSENTIALS
from fullbatch.config.axes import CycleConsistency
from fullbatch.config.methods import NORMALIZERS, PAIRWISE, TEMPERATURES, Scale
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict
from fullbatch.recipes import recipe_values
from tests.cli.making import answer, plain


def test_without_a_command_the_usage_is_shown(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        status, out, _ = answer(capsys, *arguments)
        assert status == 0 and out.startswith("usage: fullbatch COMMAND")
        assert {"train", "export", "recipes"} <= set(out.split())
    for flag in ("--version", "-V"):
        assert answer(capsys, flag)[:2] == (0, f"fullbatch {__version__}\n")


def loaded_by(*commands):
    """The modules that are loaded after these commands, of those that take their time."""
    code = f"""
import sys
from fullbatch.cli import main
print(*map(main, {list(map(list, commands))}), file=sys.stderr)
print(*{{"torch", "tyro", "numpy", "rich", "yaml", "dataclasses", "logging", "fullbatch.config"}} & set(sys.modules))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return shown.stderr.split(), set(shown.stdout.splitlines()[-1].split())


def test_the_first_help_does_not_wait_for_libraries():
    status, loaded = loaded_by([], ["--help"], ["-h"], ["--version"], ["trian"])
    assert status[-5:] == ["0", "0", "0", "0", "1"]
    assert not loaded


def test_short_help_does_not_wait_for_torch():
    _, loaded = loaded_by(["train", "-h"], ["finetune", "-h"], ["recipes"])
    assert "torch" not in loaded and "numpy" not in loaded and "fullbatch.config" in loaded


@pytest.mark.parametrize("command", ESSENTIALS)
def test_short_help_shows_the_essentials(command, capsys, monkeypatch):
    """It is short, each flag is a real one, and each default is the config's; words stand only where that has none."""
    monkeypatch.setenv("COLUMNS", "80")
    status, short, _ = answer(capsys, command, "-h")
    assert status == 0 and len(short.splitlines()) <= 60 and max(map(len, short.splitlines())) <= 80
    assert answer(capsys, command, "--help")[1] == short
    assert f"fullbatch {command} --help-all\n" in short and "--method sogclr --help-all\n" in short

    every = plain(answer(capsys, command, "--help-all")[1])
    base = RunConfig() if command == "train" else from_dict(RunConfig, recipe_values("tuneclip"))
    defaults = {name: value for group in vars(base).values() for name, value in vars(group).items()}
    groups = ESSENTIALS[command]
    assert next(iter(groups)) == "your data" and next(iter(groups["your data"])) == "data"
    assert {"recipe", "config", "resume"} <= set(groups["start from"])
    for name, (value, text) in {name: row for flags in groups.values() for name, row in flags.items()}.items():
        flag, default = f"--{name.replace('_', '-')}", defaults.get(name)
        assert f"{flag} " in every or f"{flag}, " in every, flag
        if text.endswith(")"):
            own_words = (command, name) in (("finetune", "data"), ("finetune", "model"))
            assert re.search(r"\((default: .+|required)\)$", text) and (default in (None, "") or own_words), name
        else:
            assert default is not None
            words = {"False": "off", "('emoji',)": "emoji"}.get(str(default), default)
            text = f"{text} (default: {words})"
        assert plain(f"{flag} {value} {text}") in plain(short)


def test_short_help_shows_the_values_of_a_recipe_or_a_file(capsys, tmp_path):
    assert "together (default: 1024)" in plain(answer(capsys, "train", "--recipe", "cc3m-rn50", "-h")[1])
    (tmp_path / "mine.yaml").write_text("training: {batch_size: 24}\ndata: {image_size: 96}")
    shown = plain(answer(capsys, "train", "-h", "--config", f"{tmp_path}/mine.yaml")[1])
    assert "together (default: 24)" in shown and "of the pictures (default: 96)" in shown
    assert "There is no recipe 'cc3m'" in answer(capsys, "train", "--recipe", "cc3m", "-h")[2]


def test_help_all_shows_groups_and_defaults(capsys):
    status, out, _ = answer(capsys, "train", "--help-all")
    shown = plain(out)
    assert status == 0
    for group in ("objective", "settings", "data", "model", "training", "optimizer", "schedule", "evaluation", "run"):
        assert f"{group} options" in shown
    assert "pairs a step, over all ranks (default: 128)" in shown
    assert "--settings.prototypes INT" in shown
    for flag in ("--recipe", "--config", "--resume"):
        assert flag in shown.split("start options")[1].split("objective options")[0]


def test_help_all_shows_the_settings_of_the_method_that_is_named(capsys):
    _, out, _ = answer(capsys, "train", "--method", "sogclr", "--help-all")
    assert "Settings of sogclr." in plain(out)
    assert "--settings.gamma FLOAT" in plain(out)
    assert "prototypes" not in plain(out).split("settings options")[1].split("data options")[0]
    _, out, _ = answer(capsys, "train", "--method", "sogclr", "--normalizer", "mlp", "--help-all")
    assert "--settings.prototype-lr FLOAT" in plain(out) and "--settings.gamma" not in plain(out)


def test_help_all_shows_the_recipes_values(capsys):
    _, out, _ = answer(capsys, "train", "--recipe", "cc3m-rn50", "--help-all")
    assert "pairs a step, over all ranks (default: 1024)" in plain(out)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ESSENTIALS])
def test_the_help_of_the_other_commands_fits_on_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = answer(capsys, command, "-h")
    assert status == 0 and f"usage: fullbatch {command}" in out and len(out.splitlines()) <= 60


def test_every_flag_is_explained():
    for kind in (*PAIRWISE.values(), *NORMALIZERS.values(), *TEMPERATURES.values(), CycleConsistency, Scale):
        assert set(field_help(kind)) == {field.name for field in dataclasses.fields(kind)}, kind
    config = RunConfig()
    for group in dataclasses.fields(config):
        kind = type(getattr(config, group.name))
        assert set(field_help(kind)) == {field.name for field in dataclasses.fields(kind)}, kind

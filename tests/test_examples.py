"""The examples, the code of README and docs, and their commands work as they stand."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch.nn.functional import normalize

import fullbatch as fb
from fullbatch.cli.train import train_config
from tests.training.small import small_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(*command):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_own_loop_with_an_open_clip_model():
    out = run("examples/own_loop.py", "--steps", "12", "--samples", "200", "--batch", "16")
    assert "global loss" in out
    assert "neuclip, batch 16: R@1" in out


@pytest.mark.slow
def test_own_loop_over_two_ranks():
    out = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "examples/own_loop.py", "--steps", "4", "--samples", "100", "--batch", "16", "--method", "fastclip_v3",
    )  # fmt: skip
    assert out.count("fastclip_v3, batch 16: R@1") == 1


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_of_the_emoji_example_is_understood(monkeypatch):
    module = example("search_emoji")
    (command,) = re.findall(r"python examples/search_emoji.py (.*)", module.__doc__)
    options = module.parsed(shlex.split(command))
    assert options.captions == ["red apple", "birthday cake", "umbrella with rain drops"]
    assert (str(options.run), str(options.output)) == ("runs/demo", "emoji.png")


TRAINING = (ROOT / "docs" / "how-to" / "train.md").read_text()


def test_python_of_the_training_page():
    (block,) = re.findall(r"```python\n(.*?)```", TRAINING, flags=re.DOTALL)
    names = {}
    exec(compile(block, "train.md", "exec"), names)
    assert names["config"].training.batch_size == 256


@pytest.mark.slow
def test_emoji_are_found_in_a_picture(tmp_path):
    run("-m", "fullbatch", "train", "--samples", "128", "--runs", str(tmp_path), "--name", "demo", "--quiet")
    out = run("examples/search_emoji.py", str(tmp_path / "demo"), "--output", str(tmp_path / "out.png"), "red apple")
    assert "wrote" in out
    assert (tmp_path / "out.png").stat().st_size > 1000


METHODS_PAGE = (ROOT / "docs" / "reference" / "methods.md").read_text()


def python_of(text, about):
    """The blocks of a page that speak of something."""
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return [block for block in blocks if about in block]


@pytest.mark.parametrize("block", python_of(README + METHODS_PAGE, "objective"))
def test_python_of_the_readme_and_the_page_of_methods(block):
    rows = normalize(torch.randn(16, 512), dim=-1)
    names = {
        "image_embeddings": rows.clone().requires_grad_(),
        "text_embeddings": rows.flip(0).requires_grad_(),
        "sample_ids": torch.arange(16),
    }
    exec(compile(block, "page", "exec"), names)
    assert names["objective"] is not None


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/export.md", "docs/how-to/find.md"])
def test_python_that_uses_a_model(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    fb.train(small_config(tmp_path / "runs", steps=4, name="NAME"))
    (tmp_path / "photos").mkdir()
    for name in ("cat.jpg", "dog.jpg"):
        Image.new("RGB", (32, 24), "red" if name == "cat.jpg" else "blue").save(name)
        shutil.copy(name, "photos")
    (block,) = python_of((ROOT / page).read_text(), "fb.load(")
    names = {}
    exec(compile(block, page, "exec"), names)
    if page == "docs/how-to/export.md":
        torch.testing.assert_close(names["probabilities"].sum(dim=1), torch.ones(2))
    else:
        assert capsys.readouterr().out


def test_commands_of_the_readme_and_the_docs_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        for script in set(re.findall(r"python ((?:benchmarks|examples)/[\w/]+\.py)", page.read_text())):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


@pytest.mark.slow
def test_benchmarks_of_training_run(tmp_path):
    out = run("benchmarks/loader.py", "--samples", "64", "--rounds", "1", "--workers", "1", "--size", "64")
    assert "ratio" in out
    out = run(
        "benchmarks/reading.py", str(tmp_path), "--samples", "64", "--shards", "4", "--batch", "8", "--block", "8",
        "--window", "16", "--size", "64", "--latency", "0", "--rounds", "1", "--workers", "1", "--places", "disk",
        "http", "--webdataset-python", sys.executable,
    )  # fmt: skip
    assert "| webdataset, `cache_dir` |" in out and "| 1.00, 1.00, 0.00 |" in out
    out = run(
        "benchmarks/train_step.py", "--device", "cpu", "--steps", "2", "--rounds", "1", "--batch", "8",
        "--model", "tiny", "--methods", "openclip", "neuclip",
    )  # fmt: skip
    assert "neuclip" in out


@pytest.mark.slow
def test_benchmarks_run():
    out = run("benchmarks/objectives.py", "--batch", "32", "--width", "8", "--rounds", "1", "--chunks", "0", "8")
    assert "neuclip" in out
    assert "ratio to open_clip" in out
    out = run(
        "benchmarks/normalizer_error.py", "--width", "8", "--samples", "256", "--batch", "32", "--prototypes", "64",
        "--steps", "12", "--restart-every", "5",
    )  # fmt: skip
    assert "batch estimate" in out
    assert "bfloat16" in run("benchmarks/kernel_error.py", "--batch", "32", "--width", "8")


def test_many_machines():
    """The two files are what their schedulers read, as far as that can be seen here, and their flags are ours."""
    script = ROOT / "examples" / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    _, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    line = script.read_text().replace("\\\n", " ").splitlines()[-1]
    for words in (container["args"], shlex.split(line)):
        config, resume = train_config(words[words.index("train") + 1 :])
        assert config.run.name == "vit-b-32" and config.training.compile and resume is None
        assert config.data.data[0].endswith("{00000..00331}.tar") and config.training.batch_size % 16 == 0

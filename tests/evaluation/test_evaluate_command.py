"""``fullbatch evaluate``: of a run, a checkpoint, an export, an open_clip model; alone and on two ranks."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fullbatch.training_run
from fullbatch.cli import main
from fullbatch.evaluation.tasks import run_tasks
from tests.data.making import captioned, png, write_coco, write_shard
from tests.evaluation.making import several_captions, small_embedder, write_benchmark, write_captioned
from tests.training.small import small_config

LABELS = [number % 6 for number in range(11)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of twenty steps, its pairs, and a benchmark folder."""
    folder = tmp_path_factory.mktemp("trained")
    fullbatch.training_run.train(small_config(folder))
    write_benchmark(folder / "set", LABELS)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))


def answer(capsys, *arguments):
    status = main(["evaluate", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_a_run_and_its_checkpoints(trained, capsys):
    tasks = ["--tasks", f"retrieval:{trained}/shard.tar", f"wds:{trained}/set"]
    status, out, _ = answer(capsys, trained / "run", *tasks, "--workers", "0")
    assert status == 0 and "mean_r1" in out and "accuracy" in out
    written = json.loads((trained / "run/evaluation.json").read_text())
    assert written["step"] == 20 and [result["task"] for result in written["results"]] == tasks[1:]
    assert written["gaps"] == [] and written["precision"] == "fp32"
    checkpoint = trained / "run/checkpoints/step-000000010"
    assert answer(capsys, checkpoint, *tasks, "--workers", "0")[0] == 0
    earlier = json.loads((trained / "run/evaluation-step-000000010.json").read_text())
    assert earlier["step"] == 10 and earlier["results"] != written["results"]
    status, out, _ = answer(capsys, checkpoint, *tasks, "--precision", "bf16", "--output", trained / "half.json")
    assert status == 0 and json.loads((trained / "half.json").read_text())["precision"] == "bf16"


@pytest.mark.slow  # torch.compile
def test_compiled_towers_give_the_same_numbers(trained, capsys):
    found = []
    for more in ([], ["--compile"]):
        output = trained / "compiled.json"
        given = ["--tasks", f"retrieval:{trained}/shard.tar", "--workers", "0", "--cache", "none", "--output", output]
        assert answer(capsys, trained / "run", *given, *more)[0] == 0
        found.append(json.loads(output.read_text())["results"])
    assert found[0] == found[1]


def test_the_numbers_are_those_of_training(trained, capsys):
    config = small_config(trained, name="measured", steps=10)
    tasks = (f"retrieval:{trained}/shard.tar", f"wds:{trained}/set")
    config = replace(config, evaluation=replace(config.evaluation, evaluate=tasks))
    at_the_end = fullbatch.training_run.train(config).results["results"]
    assert answer(capsys, trained / "measured", "--workers", "0")[0] == 0  # its own tasks
    assert json.loads((trained / "measured/evaluation.json").read_text())["results"] == at_the_end


def test_an_export(trained, capsys):
    assert main(["export", str(trained / "run"), str(trained / "model.safetensors"), "--format", "safetensors"]) == 0
    assert main(["export", str(trained / "run"), str(trained / "folder")]) == 0
    values = []
    for model in (trained / "run", trained / "model.safetensors", trained / "folder"):
        output = trained / "out.json"
        status, _, err = answer(capsys, model, "--tasks", f"wds:{trained}/set", "--output", output, "--workers", "0")
        assert status == 0, err
        values.append(json.loads(output.read_text())["results"])
    assert values[0] == values[1] == values[2]


def test_an_open_clip_model(trained, tmp_path, capsys):
    import open_clip

    torch.save(open_clip.create_model("ViT-S-32-alt").state_dict(), tmp_path / "weights.pt")
    status, out, err = answer(
        capsys,
        "ViT-S-32-alt",
        "--pretrained",
        tmp_path / "weights.pt",
        "--tasks",
        f"wds:{trained}/set",
        "--workers",
        "0",
    )
    assert status == 0 and "accuracy" in out, err
    assert "written to" not in out


WRONG = {
    "nowhere/run --tasks wds:{place}/set": "There is no run folder, checkpoint or exported model at 'nowhere/run'.",
    "ViT-B-23 --tasks wds:{place}/set": "did you mean 'ViT-B-32'?",
    "ViT-B-32 --tasks wds:{place}/set": "'ViT-B-32' has no weights: add --pretrained",
    "ViT-B-32 --pretrained {place}/absent.pt --tasks wds:{place}/set": "absent.pt' is neither a file",
    "{place}/run": "--tasks says what to measure",
    "{place}/run --tasks wds:{place}/absent": "There is no folder",
    "{place}/run --tasks retreival:a.csv": "did you mean 'retrieval'?",
    "{place}/run --tasks datacomp:{place}": "None of DataComp's 38 tasks lies in",
    "{place}/run --tasks wds:{place}/set --templates nothing": "each with {} for the class name",
    "{place}/run --tasks wds:{place}/set --pretrained openai": "brings its weights",
    "{place}/weights.pt --tasks wds:{place}/set": "holds weights without their design",
    "{place}/run --tasks wds:{place}/set --cache {place}/weights.pt/x": "the folder cannot be made",
    "{place}/run --tasks wds:{place}/set --output {place}/set": "set is a folder; name a JSON file in it",
    "{place}/run --tasks wds:{place}/set --output {place}/weights.pt/x.json": "x.json cannot be written (",
    "{place}/run --tasks wds:{place}/set --precision fp16 --device cpu": "--precision fp16 needs a GPU",
}


@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_is_one_line(typed, trained, capsys):
    torch.save({"a": torch.zeros(1)}, trained / "weights.pt")
    status, out, err = answer(capsys, *typed.replace("{place}", str(trained)).split())
    said = [line for line in err.splitlines() if line.startswith("fullbatch: ")]
    assert (status, out, len(said)) == (1, "", 1), err
    assert WRONG[typed] in said[0]


def test_an_output_is_tried_before_the_work(trained, tmp_path, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the work was begun")

    monkeypatch.setattr("fullbatch.evaluation.tasks.run_tasks", never)

    def read_only(*_, **__):  # as of a run folder of somebody else; the tests may run as root
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", read_only)
    status, out, err = answer(capsys, trained / "run", "--tasks", f"wds:{trained}/set", "--workers", "0")
    assert (status, out) == (1, "")
    assert "evaluation.json cannot be written ([Errno 13] Permission denied" in err
    assert "name another file with --output" in err


def test_an_output_that_is_no_file_is_not_replaced(trained, tmp_path, capsys):
    """A rename would put a plain file in the place of a pipe or a device."""
    os.mkfifo(tmp_path / "pipe")
    status, out, err = answer(capsys, trained / "run", "--tasks", f"wds:{trained}/set", "--output", tmp_path / "pipe")
    assert (status, out) == (1, "") and "pipe is no file." in err
    assert (tmp_path / "pipe").is_fifo()


def test_numbers_that_cannot_be_written_are_printed(trained, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fullbatch.training.run_folder.replace_text", full)
    output = tmp_path / "new" / "out.json"
    status, out, err = answer(
        capsys, trained / "run", "--tasks", f"wds:{trained}/set", "--workers", "0", "--output", output
    )
    assert status == 1 and "accuracy" in out and "written to" not in out
    assert f"The numbers above are in no file: {output} cannot be written ([Errno 28] No space left" in err
    assert list((tmp_path / "new").iterdir()) == []  # what the trial wrote is gone


def test_a_task_that_fails_is_named_and_the_others_go_on(trained, tmp_path, capsys):
    (tmp_path / "one" / "cat").mkdir(parents=True)
    (tmp_path / "one" / "cat" / "a.png").write_bytes(png())
    write_benchmark(tmp_path / "eval" / "wds_mnist_test", LABELS)
    tasks = [f"zero_shot:{tmp_path}/one?captions=folder", f"datacomp:{tmp_path}/eval"]
    status, out, err = answer(capsys, trained / "run", "--tasks", *tasks, "--output", tmp_path / "out.json")
    assert status == 1
    assert "FAILED: zero_shot:" in out and "has one class ('cat')" in out
    assert "missing, 37 tasks: datacomp:imagenet1k, " in out
    assert "(1 of 38 tasks)" in out and "none of 13 tasks" in out
    assert "datacomp:mnist  accuracy" in err
    assert [gap["kind"] for gap in json.loads((tmp_path / "out.json").read_text())["gaps"]].count("failed") == 1


def measured_on(rank, tasks, cache):
    embedder = small_embedder()
    return run_tasks(tasks, embedder).as_dict()


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(two_ranks, tmp_path):
    captions = {f"{n}.png": of_image for n, of_image in enumerate(several_captions(11))}
    for n, name in enumerate(captions):
        (tmp_path / name).write_bytes(png((20, 16), n))
    write_benchmark(tmp_path / "eval/wds_geode_test", LABELS, groups=[n % 2 for n in range(11)])
    write_captioned(tmp_path / "eval/wds_flickr30k", several_captions(7))
    tasks = (f"retrieval:{write_coco(tmp_path / 'coco.json', captions)}", f"datacomp:{tmp_path}/eval")
    alone = measured_on(0, tasks, None)
    assert [result["task"].split(":")[0] for result in alone["results"]] == ["retrieval", "datacomp", "datacomp"]
    for together in two_ranks.run(measured_on, tasks, None):
        assert together == alone


@pytest.mark.slow
def test_the_command_on_two_ranks(trained, tmp_path):
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "FULLBATCH_CACHE": str(tmp_path / "c")}
    command = ["-m", "fullbatch", "evaluate", str(trained / "run"), "--device", "cpu", "--workers", "0"]
    task = ["--tasks", f"wds:{trained}/set", f"retrieval:{trained}/shard.tar"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for launcher, output in (([], "one.json"), (ranks, "two.json"), (ranks, "cached.json")):
        words = [sys.executable, *launcher, *command, *task, "--output", str(tmp_path / output)]
        if output == "one.json":
            words += ["--cache", "none"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    one, two, cached = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json", "cached.json"))
    for numbers in (one, two, cached):
        assert len(numbers.pop("times")) == len(numbers["results"])
    assert one == two == cached


def test_earlier_numbers_of_the_same_weights_are_kept(tmp_path, capsys):
    run = fullbatch.training_run.train(small_config(tmp_path, "openclip")).folder
    shard, other = str(tmp_path / "shard.tar"), str(write_shard(tmp_path / "other.tar", captioned(9, (20, 16))))
    assert main(["evaluate", str(run), "--tasks", f"retrieval:{shard}", "--cache", "none"]) == 0
    assert main(["evaluate", str(run), "--tasks", f"retrieval:{other}", "--cache", "none"]) == 0
    one_class = write_shard(tmp_path / "one.tar", captioned(1, (20, 16)))
    assert main(["evaluate", str(run), "--tasks", f"retrieval:{one_class}", "--cache", "none"]) == 1
    kept = json.loads((run / "evaluation.json").read_text())
    assert [result["task"] for result in kept["results"]] == [f"retrieval:{shard}", f"retrieval:{other}"]
    assert [gap["task"] for gap in kept["gaps"]] == [f"retrieval:{one_class}"]
    assert kept["times"][f"retrieval:{shard}"] < kept["times"][f"retrieval:{other}"]
    assert "average" not in kept


def test_numbers_of_the_average_and_of_what_it_averages_do_not_mix(tmp_path, capsys):
    config = small_config(tmp_path, "openclip")
    run = fullbatch.training_run.train(replace(config, training=replace(config.training, ema=0.9))).folder
    shard, other = str(tmp_path / "shard.tar"), str(write_shard(tmp_path / "other.tar", captioned(9, (20, 16))))
    for tasks, words, average in (([shard], [], True), ([other], ["--no-average"], False)):
        given = [f"retrieval:{task}" for task in tasks]
        assert main(["evaluate", str(run), "--tasks", *given, "--cache", "none", *words]) == 0
        written = json.loads((run / "evaluation.json").read_text())
        assert written["average"] is average and [result["task"] for result in written["results"]] == given


def test_a_row_a_caption_is_one_picture(tmp_path, capsys):
    run = fullbatch.training_run.train(small_config(tmp_path, "openclip")).folder
    rows = ["image,caption"]
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png((16, 16), number))
        rows += [f"{number}.png,picture {number}", f"./{number}.png,also {number}"]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    assert main(["evaluate", str(run), "--tasks", f"retrieval:{tmp_path / 'pairs.csv'}", "--cache", "none"]) == 0
    (result,) = json.loads((run / "evaluation.json").read_text())["results"]
    assert result["counts"] == {"images": 6, "captions": 12, "left_out": 0}


def test_an_empty_class_folder_is_named(tmp_path, capsys):
    run = fullbatch.training_run.train(small_config(tmp_path, "openclip")).folder
    for number, name in enumerate(("red", "blue")):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "0.png").write_bytes(png((16, 16), number))
    (tmp_path / "classes" / "green").mkdir()
    task = f"zero_shot:{tmp_path / 'classes'}?captions=folder"
    assert main(["evaluate", str(run), "--tasks", task, "--cache", "none"]) == 0
    (result,) = json.loads((run / "evaluation.json").read_text())["results"]
    assert result["notes"] == ["1 class folder(s) hold no picture and are no candidates (first: green)"]


def test_a_folder_of_runs_is_answered_with_one(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    fullbatch.training_run.train(small_config(tmp_path / "runs", "openclip"))
    assert main(["evaluate", str(tmp_path / "runs"), "--tasks", "retrieval:emoji"]) == 1
    assert f"is a folder of 1 run(s); name one, such as {tmp_path / 'runs' / 'run'}" in capsys.readouterr().err

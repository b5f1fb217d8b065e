"""`fullbatch find`: what it prints, and what a mistake is answered with."""

import contextlib
import errno
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.cli.making import answer, plain
from tests.find.making import picture, write_hostile, write_pictures
from tests.tiers import first
from tests.waiting import HANG


@pytest.fixture(scope="module")
def folder(place):
    write_pictures(place / "photos", 12)
    write_hostile(place / "photos" / "hostile")
    (place / "photos" / "bad.png").write_text("bad")
    (place / "empty").mkdir()
    return place / "photos"


def find(capsys, *arguments):
    status, out, err = answer(capsys, "find", *map(str, arguments))
    assert status == 0, err
    return out.splitlines(), err


def test_it_indexes_and_says_so(run_folder, folder, place, capsys):
    (line, *bad), err = find(capsys, run_folder, folder, "--index", place / "first")
    assert line == f"22 pictures of {folder} in the index {place / 'first'}: 22 new" and err == ""
    assert bad[0] == "1 cannot be used:" and "bad.png: not a JPEG" in bad[1]
    (line, *_), _ = find(capsys, run_folder, folder, "--index", place / "first")
    assert line.endswith(": 22 unchanged")


def test_it_prints_scores_and_paths(run_folder, folder, place, capsys):
    lines, err = find(capsys, run_folder, folder, "a", "red", "apple", "--top", 5)
    assert len(lines) == 5 and "22 new" in err
    assert all(re.fullmatch(rf" *-?\d\.\d{{3}}  {folder}/.+\.png", line) for line in lines)
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    again, err = find(capsys, run_folder, folder, "a red apple", "--top", 5, "--rows", "bf16")
    assert again == lines and err == "", "nothing changed, and nothing is said of it"
    assert find(capsys, run_folder, folder, "a red apple - a leaf", "--top", 5)[0] != lines
    assert len(find(capsys, run_folder, folder, "a", "--top", 1000)[0]) == 22


def test_by_a_picture(run_folder, folder, place, capsys):
    picture(4).save(place / "mine.png")
    lines, _ = find(capsys, run_folder, folder, "--like", place / "mine.png", "--top", 1)
    assert lines == [f" 1.000  {folder}/0004.png"]
    both, _ = find(capsys, run_folder, folder, "a cat", "--like", place / "mine.png")
    assert both != find(capsys, run_folder, folder, "a cat")[0]


def test_hostile_names_stay_on_their_lines(run_folder, folder, capsys):
    lines, _ = find(capsys, run_folder, folder, "a cat", "--top", 100)
    assert len(lines) == 22 and not [line for line in lines if re.search("[\x00-\x1f\u202e]", line)]


def test_a_static_page(run_folder, folder, place, capsys):
    lines, err = find(capsys, run_folder, folder, "a cat", "--top", 3, "--static", place / "page" / "found.html")
    assert len(lines) == 3 and f"3 pictures in {place / 'page' / 'found.html'}" in err
    text = (place / "page" / "found.html").read_text()
    assert text.count("<script>") == 1 and "Content-Security-Policy" in text and "onerror=alert(2)>" not in text


@pytest.mark.parametrize("reason", ["Another process is writing the index", "cannot be written (Permission denied)"])
def test_an_index_that_cannot_be_written_still_answers(reason, run_folder, folder, place, capsys, monkeypatch):
    from fullbatch.find import index
    from fullbatch.training import run_folder as locks

    typed = (run_folder, folder, "--index", place / "shared")
    find(capsys, *typed)
    lines, _ = find(capsys, *typed, "a cat")
    other = contextlib.nullcontext()
    if "Another" in reason:
        other = locks.alone_in(place / "shared")
    else:
        monkeypatch.setattr(index, "alone_in", denied)
    with other:
        answered, err = find(capsys, *typed, "a cat")
        assert answered == lines
        assert reason in err and err.endswith("Answers are from the 22 pictures in it now.\n") and err.count("\n") == 1
        find(capsys, *typed, "--static", place / "shared.html")
        status, out, err = answer(capsys, "find", *map(str, typed))
        assert (status, out) == (1, "") and reason in err and "Answers" not in err and err.count("\n") == 1


def denied(*_):
    raise PermissionError(errno.EACCES, "Permission denied", ".lock")


MISTAKES = {
    "{run} {place}/absent": "There is no folder {place}/absent.",
    "{run} {place}/notes.txt": "{place}/notes.txt is not a folder.",
    "{run} {place}/empty": "The folder {place}/empty holds no pictures (.jpg,",
    "{place}/absent {photos}": "There is no run folder, checkpoint or exported model at '{place}/absent'.",
    "ViT-B-32 {photos}": "'ViT-B-32' has no weights: add --pretrained",
    "tiny {photos}": "'tiny' is no trained model; name a run folder, one of its checkpoints",
    "{run} {photos} ''": "The query is empty and says nothing; leave it out, or say what to find.",
    "{run} {photos} a cat -": "The query 'a cat -' says nothing after a -.",
    "{run} {photos} a cat - a cat": "The parts of the query cancel each other; leave one out.",
    "{run} {photos} --like {place}/absent.png": "absent.png: cannot read '{place}/absent.png': No such file or",
    "{run} {photos} --like {place}/notes.txt": "{place}/notes.txt: not a JPEG, PNG",
    "{run} {photos} --top 0": "--top must be at least 1, got 0.",
    "{run} {photos} --batch-size 0": "--batch-size must be at least 1, got 0.",
    "{run} {photos} --index {place}": "--index {place} is no index, and not empty: name a new folder.",
    "{run} {photos} --index {place}/notes.txt": "--index {place}/notes.txt is a file; name a folder.",
    "{run} {photos} a --static {place}": "--static {place} is a folder; name a file, such as {place}/found.html.",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_one_line(typed, run_folder, folder, place, capsys):
    names = {"run": run_folder, "photos": folder, "place": place}
    status, out, err = answer(capsys, "find", *shlex.split(typed.format(**names)))
    assert (status, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("fullbatch: ") and MISTAKES[typed].format(**names) in last
    assert "Traceback" not in err


def test_another_models_index_is_refused(run_folder, folder, place, capsys):
    find(capsys, run_folder, folder, "--index", place / "bound")
    status, _, err = answer(
        capsys, "find", str(run_folder), str(folder), "--index", str(place / "bound"), "--precision", "bf16"
    )
    assert status == 1 and "is the index of another model, or of another --precision; name another --index" in err


@pytest.mark.parametrize("port", ["x", "-1", "65536", "a red apple"])
def test_a_port_is_a_port(port, run_folder, folder, capsys):
    status, _, err = answer(capsys, "find", str(run_folder), str(folder), "--serve", port)
    assert status == 2 and ("whole number in [0, 65535]" in plain(err) or "-1" in plain(err))
    assert port == "-1" or "put the query before --serve" in plain(err)


def test_a_port_in_use_is_named(run_folder, folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, err = answer(capsys, "find", str(run_folder), str(folder), "--serve", port)
    assert status == 1 and f"--serve {port}: 127.0.0.1:{port} cannot be used" in err


def test_the_page_opens_with_the_picture_that_was_asked_for(run_folder, folder, capsys, monkeypatch):
    from fullbatch.find.server import PageServer

    asked = {"like": "d1", "top": "1"}

    def searched(server):
        print(json.loads(server.answers.search(asked).body)["hits"][0][2])

    monkeypatch.setattr(PageServer, "serve_forever", searched)
    lines, _ = find(capsys, run_folder, folder, "a cat", "--like", folder / "0004.png", "--serve")
    assert lines[-3].endswith("/?q=a+cat&like=d1") and lines[-1] == "0004.png"


def listen_to_signals():
    """Where the tests run in the background of a shell, SIGINT is ignored, also by what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", first([signal.SIGINT], of=[signal.SIGINT, signal.SIGTERM]))
def test_it_serves_until_it_is_stopped(number, run_folder, folder):
    command = [
        sys.executable,
        "-m",
        "fullbatch",
        "find",
        str(run_folder),
        str(folder),
        "a cat",
        "--top",
        "1",
        "--serve",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=listen_to_signals, **pipes) as running:
        try:
            lines = [running.stdout.readline() for _ in range(3)]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/\?q=a\+cat\n", lines[1]), lines
            with urllib.request.urlopen(lines[1].split("?")[0] + "about", timeout=HANG) as response:
                assert b'"pictures": 22' in response.read()
            running.send_signal(number)
            stderr = running.communicate(timeout=HANG)[1]
            assert running.returncode == 0 and "Traceback" not in stderr, stderr
        finally:
            running.kill()


def test_ctrl_c_keeps_what_is_done(run_folder, folder, place, capsys, monkeypatch):
    from fullbatch.encoder import Encoder

    honest, calls = Encoder.embed_squares, []

    def stopped(self, squares):
        calls.append(len(squares))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(self, squares)

    monkeypatch.setattr(Encoder, "embed_squares", stopped)
    typed = ("find", str(run_folder), str(folder), "--index", str(place / "stopped"), "--batch-size", "4")
    status, _, err = answer(capsys, *typed)
    assert status == 130 and "What is in the index is kept: the same command goes on." in err
    monkeypatch.undo()
    (line, *_), _ = find(capsys, *typed[1:])
    assert line.endswith(": 14 new, 8 unchanged")

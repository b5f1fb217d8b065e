"""Tar shards by URL: what is read, and what is trained, equals the same files on disk to the bit, whatever the server
does on the way."""

import functools
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fullbatch.cli import main
from fullbatch.config.data import Data, Source
from fullbatch.data import remote
from fullbatch.data.loader import open_pool
from fullbatch.data.sources import fingerprint_of_samples, open_source
from fullbatch.data.store_requests import StoreError
from fullbatch.training.run_folder import Folder
from fullbatch.training.trainer import Trainer
from fullbatch.training_run import train
from tests.data.faulty_server import often, serving
from tests.data.making import captioned, read_all, write_shard
from tests.killing import Fatal, exit_code, started
from tests.resume.test_resume import go_on_from
from tests.training.small import by_url, differences, renamed, saved_state, small_config

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
SLOW = pytest.mark.slow


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        write_shard(folder / f"{number:05d}.tar", captioned(12, first=12 * number))
    return folder


@pytest.fixture
def server(quick, shards):
    with serving() as server:
        for path in shards.iterdir():
            server.files[f"/data/shards/{path.name}"] = path.read_bytes()
        yield server


def test_samples_and_fingerprints_are_those_of_the_files(server, shards):
    here = open_source(Source(f"{shards}/{{00000..00002}}.tar"))
    there = open_source(Source(f"{server.url}/data/shards/{{00000..00002}}.tar"))
    assert there.fingerprint == here.fingerprint and len(there) == 36
    assert read_all(there) == read_all(here)
    assert [there.read(number) for number in (35, 0, 13)] == [here.read(number) for number in (35, 0, 13)]
    assert read_all(open_source(Source(f"file://{shards}/*.tar"))) == read_all(here)


def test_the_index_and_the_blocks_are_read_once(server):
    source = Source(f"{server.url}/data/shards/{{00000..00002}}.tar")
    read_all(open_source(source))
    spans = [(path, span) for method, path, span in server.requests if method == "GET"]
    assert len(spans) == len(set(spans)) == sum(-(-len(raw) // 4096) for raw in server.files.values())
    heads = server.count("HEAD")
    again = open_source(source)
    assert server.count("HEAD") == heads + 3 and server.count("GET") == len(spans)
    read_all(pickle.loads(pickle.dumps(again)))
    assert server.count("GET") == len(spans) and server.count("HEAD") == heads + 3


def test_large_members_are_skipped_by_the_walk(server, tmp_path, monkeypatch):
    monkeypatch.setattr("fullbatch.data.files._READ_BY_URL", 512)
    large = [(f"{number}", {"jpg": bytes(100_000), "txt": b"large"}) for number in range(3)]
    server.files["/large.tar"] = write_shard(tmp_path / "large.tar", large).read_bytes()
    assert len(open_source(Source(f"{server.url}/large.tar"))) == 3
    assert server.count("GET") < 10


@pytest.mark.parametrize("tags", [True, False])
def test_a_replaced_shard_is_indexed_anew(server, tmp_path, tags):
    server.tags = tags  # without them the size alone tells
    source = Source(f"{server.url}/data/shards/00000.tar")
    before = open_source(source)
    fingerprint = fingerprint_of_samples(before, source)
    other = write_shard(tmp_path / "other.tar", captioned(17, first=100))
    server.files["/data/shards/00000.tar"] = other.read_bytes()
    after = open_source(source)
    assert len(before) == 12 and len(after) == 17
    assert [raw.image for raw in read_all(after)[0].values()] == [
        raw.image for raw in read_all(open_source(Source(str(other))))[0].values()
    ]
    assert fingerprint_of_samples(after, source) != fingerprint


def test_a_shard_replaced_in_the_middle_of_a_run_ends_it(server, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    samples = open_source(Source(f"{server.url}/data/shards/00000.tar"))
    samples.read(0)
    server.files["/data/shards/00000.tar"] = server.files["/data/shards/00001.tar"]
    with pytest.raises(StoreError, match=r"00000.tar' was replaced during the run"):
        samples.read(1)


def test_a_missing_shard_is_named(server):
    with pytest.raises(StoreError, match=r"Cannot read 'http://.*/00003.tar': there is no such file"):
        open_source(Source(f"{server.url}/data/shards/{{00000..00003}}.tar"))


def test_a_bound_that_is_no_number_is_told(server, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "much")
    with pytest.raises(ValueError, match="FULLBATCH_CACHE_GB must be"):
        open_source(Source(f"{server.url}/data/shards/00000.tar"))


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_here(quick, tmp_path):
    """A run from disk, and a server with the same file."""
    config = small_config(tmp_path, "sogclr")
    with serving() as server:
        server.files["/shard.tar"] = (tmp_path / "shard.tar").read_bytes()
        yield config, train(config).folder, server


@pytest.mark.parametrize(
    ("workers", "gigabytes"),
    [(0, "1"), (2, "1"), pytest.param(2, "0.00002", marks=SLOW), pytest.param(0, "0", marks=SLOW)],
)
def test_training_by_url_is_training_from_disk(run_here, workers, gigabytes, monkeypatch, tmp_path):
    config, run, server = run_here
    monkeypatch.setenv("FULLBATCH_CACHE_GB", gigabytes)
    monkeypatch.setattr(remote, "_STALLED", 0.2)
    monkeypatch.setattr(remote, "_TRIES", 12)
    server.fails = functools.partial(often, random.Random(1))
    other = by_url(config, f"{server.url}/shard.tar", "remote")
    other = train(replace(other, data=replace(other.data, workers=workers))).folder
    assert differences(saved_state(run, 20), saved_state(other, 20)) == []
    blocks = tmp_path / "cache" / "blocks"
    if blocks.exists():
        held = sum(path.stat().st_size for path in blocks.iterdir() if not path.name.startswith(".lock"))
        assert 0 < held <= float(gigabytes) * 1e9


def test_blocks_of_neighbours_train_the_same_too(run_here):
    config, _, server = run_here
    config = replace(config, data=replace(config.data, shuffle="blocks", block_samples=5, window_blocks=2))
    here = train(renamed(config, "here")).folder
    there = train(by_url(config, f"{server.url}/shard.tar", "there")).folder
    assert differences(saved_state(here, 20), saved_state(there, 20)) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_goes_away_ends_the_run_and_a_resumed_one_ends_as_it_would_have(run_here, workers, monkeypatch):
    config, run, server = run_here
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    other = by_url(config, f"{server.url}/shard.tar", "remote")
    other = replace(other, data=replace(other.data, workers=workers), run=replace(other.run, save_every=2))
    server.fails = lambda method, path: "503" if server.count("GET") > 100 else None
    with pytest.raises(
        OSError, match=r"Cannot read 'http://.*/shard.tar' after 5 tries: the server answered 503"
    ) as told:
        train(other)
    assert "\n" not in str(told.value)
    server.fails = lambda method, path: None
    folder = Path(other.run.runs) / "remote"
    assert 0 < len(list(folder.glob("checkpoints/step-*"))) < 10
    assert "the server answered 503; try 2 of 5" in (folder / "log.txt").read_text()
    train(other, resume=folder)
    assert differences(saved_state(run, 20), saved_state(folder, 20)) == []


def test_a_run_may_move_from_disk_to_a_store(run_here, tmp_path):
    """And keeps the order that was chosen when it began."""
    config, run, server = run_here
    begun = go_on_from(run, tmp_path / "begun", step=10)
    moved = by_url(config, f"{server.url}/shard.tar", "begun")
    train(moved, resume=begun)
    assert Folder(begun).read_config().data.shuffle == "full"
    assert differences(saved_state(run, 20), saved_state(begun, 20)) == []


def test_blocks_are_chosen_for_a_store(run_here):
    config, run, server = run_here
    config = replace(config, data=replace(config.data, block_samples=4, window_blocks=2))
    chosen = train(by_url(config, f"{server.url}/shard.tar", "chosen")).folder
    assert Folder(chosen).read_config().data.shuffle == "blocks"
    named = train(renamed(replace(config, data=replace(config.data, shuffle="blocks")), "named")).folder
    assert differences(saved_state(chosen, 20), saved_state(named, 20)) == []
    assert differences(saved_state(chosen, 20), saved_state(run, 20)) != []


def test_a_cache_that_is_too_small_is_named(server, monkeypatch, caplog):
    url = f"{server.url}/data/shards/{{00000..00002}}.tar"
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0.00006")
    for changes, told in [
        ({"block_samples": 6, "window_blocks": 3}, "smaller --window-blocks than 3"),
        ({"shuffle": "full"}, "choose --shuffle blocks"),
        ({"block_samples": 2, "window_blocks": 1}, None),
    ]:
        caplog.clear()
        open_pool(Data(data=(url,), **changes))
        assert (told in caplog.text) if told else not caplog.records


def test_no_secret_is_written_down(run_here, tmp_path, caplog, capsys):
    config, _, server = run_here
    url = server.url.replace("http://", "http://me:s3cr3t@") + "/shard.tar"
    model = ["--model", config.model.model, "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    with caplog.at_level(logging.DEBUG):
        assert main(["train", "--data", url, "--batch-size", "8", "--samples", "16", *model]) != 0
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    told = capsys.readouterr()
    assert "names a user or a password" in told.err and "s3cr3t" not in told.err + told.out + caplog.text
    assert not any(b"s3cr3t" in raw for raw in written)
    assert json.dumps(server.requests).count("s3cr3t") == 0


def _resumed(rank, config, run):
    train(config, resume=run)


@pytest.mark.slow
def test_one_rank_then_two_by_url(run_here, two_ranks, tmp_path):
    config, run, server = run_here
    runs = [go_on_from(run, tmp_path / name, step=10) for name in ("here", "there")]
    two_ranks.run(_resumed, renamed(config, "here"), runs[0])
    two_ranks.run(_resumed, by_url(config, f"{server.url}/shard.tar", "there"), runs[1])
    assert differences(saved_state(runs[0], 20), saved_state(runs[1], 20)) == []


def test_the_command_line_holds_out_and_measures_by_url_too(run_here, tmp_path):
    config, _, server = run_here
    shard = write_shard(tmp_path / "sixty.tar", captioned(60, (20, 16)))
    server.files["/sixty.tar"] = shard.read_bytes()
    flags = "--batch-size 8 --samples 80 --method sogclr --device cpu --workers 0 --quiet --no-tensorboard"
    results = []
    for name, data in (("here", str(shard)), ("there", f"{server.url}/sixty.tar")):
        where = ["--model", config.model.model, "--runs", str(tmp_path / "runs"), "--name", name]
        assert main(["train", "--data", data, *flags.split(), *where]) == 0
        run = tmp_path / "runs" / name
        assert f"{data}?part=train" in (run / "config.yaml").read_text()
        (result,) = json.loads((run / "results.json").read_text())["results"]
        assert result.pop("task") == f"retrieval:{data}?part=held_out"
        results.append(result)
    assert differences(*(saved_state(tmp_path / "runs" / name, 10) for name in ("here", "there"))) == []
    assert results[0] == results[1]


# -- a real S3 server --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_s3_is_training_from_disk(bucket, tmp_path, shards):
    for path in shards.iterdir():
        bucket.upload_file(str(path), "bucket", f"shards/{path.name}")
    here = open_source(Source(f"{shards}/*.tar"))
    for pattern in ("s3://bucket/shards/{00000..00002}.tar", "s3://bucket/shards/*.tar"):
        there = open_source(Source(pattern))
        assert there.fingerprint == here.fingerprint and read_all(there) == read_all(here)
    config = small_config(tmp_path, "sogclr")
    bucket.upload_file(str(tmp_path / "shard.tar"), "bucket", "shard.tar")
    run = train(config).folder
    other = by_url(config, "s3://bucket/shard.tar", "remote")
    other = train(replace(other, data=replace(other.data, workers=2))).folder
    assert differences(saved_state(run, 20), saved_state(other, 20)) == []


def _environment():
    """For ranks that were started before the server was."""
    return {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "FULLBATCH_", "NO_PROXY"))}


def _go(config, resume, die_in_step):
    multiprocessing.set_start_method("fork", force=True)  # its workers are to have these settings, too
    remote._FIRST_WAIT, remote._TRIES, remote.BLOCK_BYTES = 0.01, 12, 4096
    Fatal(die_in_step).among(Trainer, "train_step")
    train(config, resume=resume)


@pytest.mark.slow
def test_s3_with_faults_and_kills_is_training_from_disk(s3, bucket, tmp_path, monkeypatch):
    config = small_config(tmp_path, "sogclr", steps=60)
    bucket.upload_file(str(tmp_path / "shard.tar"), "bucket", "shard.tar")
    whole = train(config).folder
    other = by_url(config, "s3://bucket/shard.tar", "killed")
    other = replace(other, data=replace(other.data, workers=2), run=replace(other.run, save_every=4))
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0.00002")  # five blocks of forty
    folder, rng, s3.share = tmp_path / "killed", random.Random(3), 0.1
    for die_in_step in [*(rng.randint(2, 9) for _ in range(6)), 0]:  # too few, in all, to come to the end
        resume = folder if (folder / "config.yaml").exists() else None
        process = started(_go, other, resume, die_in_step)
        assert exit_code(process) == (-signal.SIGKILL if die_in_step else 0)
    s3.share = 0.0
    assert s3.faults > 20
    assert differences(saved_state(whole, 60), saved_state(folder, 60)) == []
    blocks = tmp_path / "cache" / "blocks"
    assert sum(path.stat().st_size for path in blocks.iterdir() if not path.name.startswith(".lock")) <= 20_000


def _resumed_from_s3(rank, config, run, environment):
    before = dict(os.environ)
    os.environ.update(environment)
    remote._FIRST_WAIT, remote._TRIES = 0.01, 12
    try:
        train(config, resume=run)
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.slow
def test_s3_with_faults_on_one_rank_then_two_is_training_from_disk(s3, bucket, tmp_path, two_ranks, monkeypatch):
    config = small_config(tmp_path, "sogclr")
    config = replace(config, data=replace(config.data, shuffle="blocks", block_samples=5, window_blocks=2))
    bucket.upload_file(str(tmp_path / "shard.tar"), "bucket", "shard.tar")
    monkeypatch.setattr(remote, "_TRIES", 12)
    s3.share = 0.3
    here, there = train(renamed(config, "here")).folder, train(by_url(config, "s3://bucket/shard.tar", "there")).folder
    runs = [go_on_from(run, tmp_path / f"{run.name} on two ranks", step=10) for run in (here, there)]
    two_ranks.run(_resumed, renamed(config, runs[0].name), runs[0])
    two_ranks.run(_resumed_from_s3, by_url(config, "s3://bucket/shard.tar", runs[1].name), runs[1], _environment())
    s3.share = 0.0
    assert s3.faults > 3 and differences(saved_state(here, 20), saved_state(there, 20)) == []
    assert differences(*(saved_state(run, 20) for run in runs)) == []


def test_mistakes_with_s3(s3, bucket, monkeypatch):
    bucket.put_object(Bucket="bucket", Key="a.tar", Body=bytes(1024))
    with pytest.raises(StoreError, match=r"Cannot read 's3://bucket/b.tar': there is no such file"):
        open_source(Source("s3://bucket/b.tar"))
    with pytest.raises(StoreError, match="there is no such file"):
        open_source(Source("s3://no-such-bucket/b.tar"))
    with pytest.raises(ValueError, match=r"Nothing matches 's3://bucket/\*b.tar'"):
        open_source(Source("s3://bucket/*b.tar"))
    file, before = remote.look_up("s3://bucket/a.tar"), len(s3.requests)
    assert file.fetch(5, 10) == bytes(10) and len(s3.requests) == before + 1
    bucket.put_object(Bucket="bucket", Key="a.tar", Body=b"1" * 1024)
    with pytest.raises(StoreError, match="was replaced during the run"):
        file.fetch(0, 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    remote._store.cache_clear()
    with pytest.raises(StoreError, match=r"Cannot read 's3://bucket/a.tar' after 5 tries: Could not connect"):
        remote.look_up("s3://bucket/a.tar")


def test_a_list_may_take_longer_than_a_request(bucket, monkeypatch):
    bucket.put_object(Bucket="bucket", Key="a.tar", Body=b"a")
    monkeypatch.setattr(remote, "_STALLED", 1e-4)
    assert remote.matching("s3://bucket/*.tar") == ["s3://bucket/a.tar"]


def test_a_glob_over_folders_is_one_list_and_a_list_that_fails_is_told(s3, bucket):
    """fsspec's own goes through the folders one by one, and passes over those that it fails to list."""
    for name in ("sets/a-1/0.tar", "sets/a-1/1.tar", "sets/a-2/0.tar", "sets/a-2/notes.txt", "sets/b/0.tar", "x/0.tar"):
        bucket.put_object(Bucket="bucket", Key=name, Body=b"a")
    before = len(s3.requests)
    found = [f"s3://bucket/sets/a-{name}.tar" for name in ("1/0", "1/1", "2/0")]
    assert remote.matching("s3://bucket/sets/a-*/*.tar") == found and len(s3.requests) == before + 1
    assert remote.matching("s3://bucket/sets/a-[2-9]/?.tar") == found[2:]
    assert len(remote.matching("s3://bucket/**/0.tar")) == 4 and len(remote.matching("s3://bucket/*/0.tar")) == 1
    with pytest.raises(ValueError, match=r"Nothing matches 's3://bucket/sets/\*/2.tar'"):
        remote.matching("s3://bucket/sets/*/2.tar")
    s3.refuses = ["AccessDenied"]
    with pytest.raises(StoreError, match=r"Cannot read 's3://bucket/sets/\*/0.tar'"):
        remote.matching("s3://bucket/sets/*/0.tar")


def test_without_credentials_one_sentence_says_so(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    remote._store.cache_clear()
    with pytest.raises(StoreError, match=r"^Cannot read 's3://bucket/a.tar': Unable to locate credentials; the AWS"):
        remote.look_up("s3://bucket/a.tar")

"""Training from CSV, parquet and pictures by URL ends where training from the same files on disk does, to the bit, also
where the store fails, and goes on where it went away."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest

from fullbatch.config.data import Data
from fullbatch.data import remote
from fullbatch.data.loader import open_pool
from fullbatch.training_run import train
from tests.data import test_remote_tables
from tests.data.faulty_server import often
from tests.data.test_remote_tables import COUNT, KINDS, pictures_asked
from tests.training.small import by_url, differences, saved_state, small_config

tables, server, in_s3 = test_remote_tables.tables, test_remote_tables.server, test_remote_tables.in_s3  # fixtures


def trained(config, data, name, workers=0, **run):
    config = by_url(config, str(data), name)
    config = replace(config, data=replace(config.data, workers=workers), run=replace(config.run, **run))
    return train(config).folder


def lose(server, tables, name):
    (tables / name).unlink()
    del server.files[f"/data/set/{name}"]


def test_training_by_url_is_training_from_disk(server, tables, tmp_path):
    """Missing pictures are replaced by the same others, too."""
    lose(server, tables, "images/5.jpg")
    config = small_config(tmp_path, "sogclr")
    here = trained(config, tables / "pairs.csv", "here")
    there = trained(config, f"{server.url}/data/set/pairs.csv", "there")
    assert differences(saved_state(here, 20), saved_state(there, 20)) == []
    assert "pairs.csv:row 5: Cannot read 'http://127.0.0.1" in (there / "log.txt").read_text()
    asked = [path for path in pictures_asked(server) if not path.endswith("/5.jpg")]
    assert len(asked) == len(set(asked)) == COUNT - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers", "gigabytes"),
    [("pairs.csv", 0, "1"), ("images.parquet", 2, "1"), ("pairs.csv", 2, "0.00002"), ("paths.parquet", 2, "0")],
)
def test_training_from_a_faulty_server_is_training_from_disk(
    server, tables, tmp_path, monkeypatch, kind, workers, gigabytes
):
    monkeypatch.setattr(remote, "_STALLED", 0.2)
    monkeypatch.setattr(remote, "_TRIES", 12)
    monkeypatch.setenv("FULLBATCH_CACHE_GB", gigabytes)
    lose(server, tables, "images/5.jpg")
    config = small_config(tmp_path, "sogclr")
    here = trained(config, tables / kind, "here")
    faults = ("503", "429", "drop", "cut", "stall")  # "short": of a whole picture, nobody could tell
    server.fails = functools.partial(often, random.Random(1), faults=faults)
    there = trained(config, f"{server.url}/data/set/{kind}", "there", workers)
    assert differences(saved_state(here, 20), saved_state(there, 20)) == []
    blocks = tmp_path / "cache" / "blocks"
    if blocks.exists():
        held = sum(path.stat().st_size for path in blocks.iterdir() if not path.name.startswith(".lock"))
        assert held <= float(gigabytes) * 1e9


@pytest.mark.slow
def test_a_store_that_goes_away_ends_the_run_and_a_resumed_one_ends_as_it_would_have(server, tables, tmp_path):
    config = small_config(tmp_path, "sogclr")
    here = trained(config, tables / "pairs.csv", "here")
    gone = open_pool(Data(data=(str(tables / "pairs.csv"),)))[1].ids(0, np.arange(20, 21))[0]  # of the third batch
    server.fails = lambda method, path: "503" if path.endswith(f"/{gone}.jpg") else None
    with pytest.raises(OSError, match=r"Cannot read 'http://.*.jpg' after 5 tries: the server answered 503"):
        trained(config, f"{server.url}/data/set/pairs.csv", "there", save_every=1)
    server.fails = lambda method, path: None
    there = tmp_path / "there"
    assert 0 < len(list(there.glob("checkpoints/step-*"))) < 10
    train(by_url(config, f"{server.url}/data/set/pairs.csv", "there"), resume=there)
    assert differences(saved_state(here, 20), saved_state(there, 20)) == []


@pytest.mark.slow
def test_training_from_tables_in_a_faulty_s3_is_training_from_disk(in_s3, bucket, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_TRIES", 12)
    (tables / "images/5.jpg").unlink()
    bucket.delete_object(Bucket="bucket", Key="set/images/5.jpg")
    config = small_config(tmp_path, "sogclr")
    in_s3.share = 0.25
    for kind in KINDS:
        here = trained(config, tables / kind, f"here-{kind}")
        there = trained(config, f"s3://bucket/set/{kind}", f"there-{kind}", workers=2)
        assert differences(saved_state(here, 20), saved_state(there, 20)) == []
    in_s3.share = 0.0
    assert in_s3.faults > 10

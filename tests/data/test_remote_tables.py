"""CSV and parquet by URL, and tables that name pictures by URL: what is read equals the same files on disk to the bit;
what is missing is a bad sample, and a store that is down ends the run."""

import logging
import pickle
import random

import numpy as np
import pytest

from fullbatch.config.data import Data, Source
from fullbatch.data import picture_files, remote
from fullbatch.data.block_cache import BlockCache
from fullbatch.data.images import TrainTransform
from fullbatch.data.loader import TrainingBatches, open_pool
from fullbatch.data.picture_files import PictureFiles
from fullbatch.data.sample import BadSample
from fullbatch.data.sources import fingerprint_of_samples, open_source
from fullbatch.data.store_requests import StoreError
from fullbatch.training_run import train
from tests.data.faulty_server import serving
from tests.data.making import jpeg, png, read_all, write_csv, write_images
from tests.training.small import by_url, small_config
from tests.waiting import wait_for

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

SECRET = "s3cr3t"
COUNT = 40


@pytest.fixture
def tables(tmp_path):
    """pairs.csv beside its pictures; images.parquet with the pictures inside, paths.parquet with their paths."""
    folder = tmp_path / "set"
    folder.mkdir()
    names = write_images(folder, COUNT, (20, 16))
    names[3] = "images/größe 100%?.jpg"
    (folder / "images/3.jpg").rename(folder / names[3])
    captions = [f"picture {number}" for number in range(COUNT)]
    write_csv(folder / "pairs.csv", zip(names, captions, strict=True))
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    inside = [(folder / name).read_bytes() for name in names]
    for name, images in (("images", inside), ("paths", names)):
        rows = pyarrow.table({"image": images, "caption": captions})
        parquet.write_table(rows, folder / f"{name}.parquet", row_group_size=7)
    return folder


def put(server, folder):
    for path in folder.rglob("*"):
        if path.is_file():
            server.files[f"/data/{path.relative_to(folder.parent)}"] = path.read_bytes()


@pytest.fixture
def server(quick, tables):
    with serving() as server:
        put(server, tables)
        yield server


def pictures_asked(server):
    return [path for method, path, _ in server.requests if method == "GET" and "/images/" in path]


KINDS = ("pairs.csv", "images.parquet", "paths.parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_fingerprints_are_those_of_the_files(server, tables, kind):
    here = open_source(Source(str(tables / kind)))
    there = open_source(Source(f"{server.url}/data/set/{kind}"))
    assert there.fingerprint == here.fingerprint and len(there) == COUNT
    assert read_all(there) == read_all(here) and len(read_all(here)[0]) == COUNT
    assert pickle.loads(pickle.dumps(there)).read(17) == here.read(17)
    assert read_all(open_source(Source(f"file://{tables / kind}"))) == read_all(here)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_epoch_asks_for_nothing_and_a_second_run_for_versions(server, kind):
    source = Source(f"{server.url}/data/set/{kind}")
    table = open_source(source)
    whole = read_all(table)
    pictures, asked = pictures_asked(server), len(server.requests)
    assert len(pictures) == len(set(pictures)) == (0 if kind == "images.parquet" else COUNT)
    assert not any("/images/" in path for method, path, _ in server.requests if method == "HEAD")
    assert read_all(pickle.loads(pickle.dumps(table))) == whole and len(server.requests) == asked
    sent = server.sent
    again = open_source(source)
    assert read_all(again) == whole and read_all(again) == whole
    assert server.sent == sent and len(pictures_asked(server)) == 2 * len(pictures)


def test_tables_that_name_urls(server, tables, tmp_path):
    here = read_all(open_source(Source(str(tables / "pairs.csv"))))[0]
    names = [f"images/{number}.jpg" for number in range(3)]
    rows = [(f"{server.url}/data/set/{names[0]}?sig={SECRET}", "a"), (f"file://{tables}/{names[1]}", "b")]
    rows += [(str(tables / names[2]), "c"), ("local.jpg", "d")]
    (tmp_path / "local.jpg").write_bytes(jpeg(seed=9))
    samples = open_source(Source(str(write_csv(tmp_path / "mixed.csv", rows))))
    good, bad = read_all(samples)
    assert not bad and [good[n].image for n in range(3)] == [here[n].image for n in range(3)]
    assert good[3].image == jpeg(seed=9)
    server.files["/elsewhere/mixed.csv"] = (tmp_path / "mixed.csv").read_bytes()
    there = open_source(Source(f"{server.url}/elsewhere/mixed.csv"))
    assert there.fingerprint == samples.fingerprint and sorted(read_all(there)[0]) == [0, 1, 2]
    bare = write_csv(tmp_path / "bare.csv", [(name, "x") for name in names])
    rooted = open_source(Source.parse(f"{bare}?root={server.url}/data/set"))
    assert [raw.image for raw in read_all(rooted)[0].values()] == [here[n].image for n in range(3)]


def test_rows_that_cannot_be_used(server, tmp_path):
    asked = server.url + "/data/set/images"
    server.files["/data/set/images/empty.jpg"] = b""
    server.files["/data/set/images/page.jpg"] = b"<html>"
    rows = {
        f"{asked}/gone.jpg?token={SECRET}": "/data/set/images/gone.jpg?...': there is no such file",
        f"http://me:{SECRET}@127.0.0.1:PORT/gone.jpg": "Cannot read 'http://...@127.0.0.1:PORT/gone.jpg'",
        f"http://{SECRET}@127.0.0.1:PORT/gone.jpg": "Cannot read 'http://...@127.0.0.1:PORT/gone.jpg'",
        f"{asked}/empty.jpg": "the image has zero bytes",
        "ftp://host/a.jpg": "ftp:// is no store that can be read; there are s3, gs, hf, http, https, and file",
        "http://": "Cannot read 'http://'",
        f"http://[a/x?{SECRET}": "Cannot read 'http://[a/x?...'",
        "missing.jpg": "there is no such file",
        "../set.jpg": "leads out of 'http://127.0.0.1:PORT/data/set'; say where images start with ?root=URL",
        "images/../../set.jpg": "leads out of",
        "": "'' is not an image path",
        "images": "there is no such file",
        "/nowhere/a.jpg": "No such file or directory",
        "file:///nowhere/a.jpg": "No such file or directory",
    }
    port = server.url.rpartition(":")[2]
    paths = [path.replace("PORT", port) for path in rows]
    table = write_csv(tmp_path / "bad.csv", [(path, "x") for path in paths])
    server.files["/data/set/bad.csv"] = table.read_bytes()
    good, bad = read_all(open_source(Source(f"{server.url}/data/set/bad.csv")))
    assert not good
    for index, words in enumerate(rows.values()):
        assert words.replace("PORT", port) in bad[index].reason and bad[index].name == f"bad.csv:row {index}"
        assert SECRET not in str(bad[index])


def test_a_picture_that_is_too_large_is_not_fetched(server, monkeypatch):
    monkeypatch.setattr(picture_files, "MAX_IMAGE_BYTES", 1000)
    server.files["/large.jpg"] = bytes(30 << 20)
    sent = server.sent
    with pytest.raises(Exception, match=r"row 7: 'http://.*/large.jpg' has more bytes than the limit of 1,000"):
        PictureFiles(server.url).read("row 7", "large.jpg")
    assert server.sent - sent < 15 << 20


def test_a_picture_replaced_between_two_runs_is_noticed(server, tables):
    source = Source(f"{server.url}/data/set/pairs.csv")
    before = open_source(source)
    fingerprint = fingerprint_of_samples(before, source)
    old = before.read(0).image
    server.files["/data/set/images/0.jpg"] = png()
    assert before.read(0).image == old  # a run keeps what it has
    after = open_source(source)
    assert after.read(0).image == png() and fingerprint_of_samples(after, source) != fingerprint
    del server.files["/data/set/images/1.jpg"]
    assert sorted(read_all(open_source(source))[1]) == [1]


@pytest.mark.parametrize("tags", [True, False])
def test_tables_of_one_run_believe_each_other(server, tags):
    """As that of an evaluation, opened after an epoch, and that of the training."""
    server.tags = tags
    source = Source(f"{server.url}/data/set/pairs.csv")
    read_all(open_source(source))
    with picture_files.one_run():
        first = read_all(open_source(source))
        assert len(pictures_asked(server)) == 2 * COUNT, "another run asks what is new"
        assert read_all(open_source(source)) == first and len(pictures_asked(server)) == 2 * COUNT
    read_all(open_source(source))
    assert len(pictures_asked(server)) == 3 * COUNT


def test_a_server_without_versions_sends_each_run_its_own(server):
    server.tags = False
    source = Source(f"{server.url}/data/set/pairs.csv")
    read_all(open_source(source))
    server.files["/data/set/images/0.jpg"] = png()
    table = open_source(source)
    assert table.read(0).image == png() and len(pictures_asked(server)) == COUNT + 1
    read_all(table)
    read_all(table)
    assert len(pictures_asked(server)) == 2 * COUNT


def test_damaged_pictures_in_the_cache_are_fetched_again(server, tmp_path):
    table = open_source(Source(f"{server.url}/data/set/pairs.csv"))
    whole = read_all(table)
    for path in (tmp_path / "cache" / "blocks").glob("*-whole"):
        raw = path.read_bytes()
        path.write_bytes(random.Random(path.name).choice([raw[:-1], b"", raw[:3], raw[:20] + b"!" + raw[21:]]))
    assert read_all(table) == whole and len(pictures_asked(server)) == 2 * COUNT


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_ahead_is_not_asked_for_again(server, kind):
    table = open_source(Source(f"{server.url}/data/set/{kind}"))
    rows = np.arange(7, 14)
    assert table.remote_bytes
    for piece in table.remote_pieces(rows):
        piece.keep()
    asked = len(server.requests)
    for row in rows:
        table.read(int(row))
    assert len(server.requests) - asked == (7 if kind == "paths.parquet" else 0)


def test_what_is_read_ahead_is_asked_for_once_and_only_if_it_can_be_read(server, tmp_path):
    """Whoever needs a picture tries on; and a path that is none is not asked for."""
    table = open_source(Source(f"{server.url}/data/set/pairs.csv"))
    server.fails = lambda method, path: "503"
    (piece,), asked = table.remote_pieces(np.arange(1)), len(server.requests)
    with pytest.raises(StoreError):
        piece.keep()
    assert len(server.requests) - asked == 1
    server.fails = lambda method, path: None
    server.files["/bad.csv"] = write_csv(tmp_path / "bad.csv", [("../a.jpg", "x"), ("", "y")]).read_bytes()
    assert open_source(Source(f"{server.url}/bad.csv")).remote_pieces(np.arange(2)) == []


def test_pictures_are_fetched_ahead_further_than_as_many_blocks(server, monkeypatch):
    """A cache of 16 blocks, of which 4 may be ahead: four batches of 4 pictures behind the first, not one."""
    monkeypatch.setenv("FULLBATCH_CACHE_GB", str(16 * (4 << 20) / 1e9 + 1e-9))
    monkeypatch.setattr(remote, "_STALLED", 30.0)  # on a busy machine, too
    pool, order = open_pool(Data(data=(f"{server.url}/data/set/pairs.csv",)))
    batches = TrainingBatches(pool, order, 4, TrainTransform(8), lambda texts: texts)
    batches[0]
    wait_for(lambda: len(pictures_asked(server)) >= 20)
    assert len(set(pictures_asked(server))) == 20


def test_no_picture_is_fetched_ahead_where_none_can_be_kept(server, monkeypatch):
    """It would be fetched for nothing, and once more when its turn comes."""
    monkeypatch.setattr(BlockCache, "_write", lambda *arguments, **named: False)
    table = open_source(Source(f"{server.url}/data/set/pairs.csv"))
    asked = len(pictures_asked(server))
    table.read(0)  # and finds that there is no room
    for piece in table.remote_pieces(np.arange(1, 7)):
        piece.keep()
    assert len(pictures_asked(server)) - asked == 1


def test_a_caption_that_names_a_url_makes_no_table_remote(tables):
    rows = [("images/0.jpg", "seen on https://host/a.jpg")]
    assert not open_source(Source(str(write_csv(tables / "told.csv", rows)))).remote_bytes


@pytest.mark.parametrize("fault", ["503", "stall", "403", "407"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_down_is_no_bad_sample(server, kind, fault, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    table = open_source(Source(f"{server.url}/data/set/{kind}"))
    table.read(0)
    server.fails = lambda method, path: fault
    if fault == "stall":
        monkeypatch.setattr(remote, "_STALLED", 0.1)
    words = {"503": "after 5 tries: the server answered 503", "stall": "no answer in 0.1 s", "403": "answered 403"}
    words["407"] = "answered 407"
    with pytest.raises(StoreError, match=words[fault]):
        table.read(30)


@pytest.mark.parametrize("kind", ["images.parquet", "paths.parquet"])
def test_a_table_replaced_during_the_run_ends_it(server, kind, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    table = open_source(Source(f"{server.url}/data/set/{kind}"))
    table.read(0)
    server.files[f"/data/set/{kind}"] = server.files[f"/data/set/{kind}"][::-1]
    with pytest.raises(StoreError, match=rf"{kind}' was replaced during the run") as told:
        table.read(COUNT - 1)
    assert "\n" not in str(told.value)


def test_a_csv_replaced_while_it_is_read(server, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    server.files["/data/set/pairs.csv"] += b"images/1.jpg,x\r\n" * 100_000
    server.faults["GET", 1] = "replace"
    with pytest.raises(StoreError, match=r"pairs.csv' was replaced during the run"):
        open_source(Source(f"{server.url}/data/set/pairs.csv"))


def test_what_is_no_table(server):
    server.files["/a.parquet"] = b"PAR1 no table"
    server.files["/empty.csv"] = b""
    for name, words in {
        "a.parquet": r"a.parquet' is not a readable parquet file",
        "empty.csv": r"empty.csv' has no column",
        "none.csv": r"Cannot read 'http://.*/none.csv': there is no such file",
        "a.json": "only tar shards, CSV and parquet are read by URL; copy what is of kind coco to a disk",
        "folder": "Cannot tell from its name",
        "a.tar.gz": "is packed, and samples are read from the middle",
    }.items():
        with pytest.raises((ValueError, StoreError), match=words) as told:
            open_source(Source(f"{server.url}/{name}"))
        assert "\n" not in str(told.value)
    with pytest.raises(
        ValueError, match="only tar shards, CSV and parquet are read by URL; copy what is of kind folder"
    ):
        open_source(Source(f"{server.url}/pictures", kind="folder"))


@pytest.mark.parametrize("root", [f"https://me:{SECRET}@host/x", f"https://host/x?token={SECRET}"])
def test_a_root_with_a_secret_is_refused_and_not_repeated(root):
    for text in (f"a.csv?root={root}", f"a.csv?root={root}&weights=2"):
        with pytest.raises(ValueError, match=r"(?i)source") as told:
            Source.parse(text)
        assert SECRET not in str(told.value)


def test_no_query_is_written_down(server, tables, tmp_path, caplog):
    rows = [(f"{server.url}/data/set/images/{number}.jpg?sig={SECRET}", "x") for number in range(COUNT)]
    table = write_csv(tmp_path / "signed.csv", rows)
    asked = server.requests  # what is read ahead is asked for once, so the second "503" is the batch's
    server.fails = lambda method, path: "503" if sum(there == path for _, there, _ in asked) <= 2 else None
    with caplog.at_level(logging.DEBUG):
        config = small_config(tmp_path)
        run = train(by_url(config, str(table), "run")).folder
    assert "try 2 of 5" in (run / "log.txt").read_text() and "there is no such file" in (run / "log.txt").read_text()
    written = [path.read_bytes() for place in (run, tmp_path / "cache") for path in place.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in raw for raw in written) and SECRET not in caplog.text
    assert all(path.endswith(f"?sig={SECRET}") for path in pictures_asked(server))


def test_a_signed_url_is_sent_as_it_is_written(server):
    pictures = PictureFiles("")
    query = "sig=a%2Fb%2Bc%3D&x=a/b+c&y=%41"
    assert pictures.read("row", f"{server.url}/data/set/images/1.jpg?{query}") == jpeg((20, 16), 1)
    assert server.requests[-1][1].partition("?")[2] == query
    pictures.read("row", f"{server.url}/data/set/images/größe 100%25%3F.jpg")
    assert server.requests[-1][1] == "/data/set/images/gr%C3%B6%C3%9Fe%20100%25%3F.jpg"


def test_rows_of_one_picture_stay_together(server, tmp_path):
    names = [f"images/{number}.jpg" for number in range(60)]
    table = write_csv(tmp_path / "twice.csv", [(name, f"{name} {turn}") for turn in range(2) for name in names])
    server.files["/data/set/twice.csv"] = table.read_bytes()
    for part in ("train", "held_out"):
        here = open_source(Source(str(table), part=part))
        there = open_source(Source(f"{server.url}/data/set/twice.csv", part=part))
        assert here.fingerprint == there.fingerprint and here.ids.tolist() == there.ids.tolist()
        assert len(there) == (108 if part == "train" else 6)


# -- S3 ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_s3(s3, bucket, tables):
    for path in tables.rglob("*"):
        if path.is_file():
            bucket.upload_file(str(path), "bucket", f"set/{path.relative_to(tables)}")
    s3.requests.clear()
    return s3


def of_pictures(s3):
    return [(method, status) for method, path, status in s3.requests if "/images/" in path]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_in_s3(in_s3, bucket, tables, kind):
    here = open_source(Source(str(tables / kind)))
    there = open_source(Source(f"s3://bucket/set/{kind}"))
    assert there.fingerprint == here.fingerprint and read_all(there) == read_all(here)
    count = 0 if kind == "images.parquet" else COUNT
    assert of_pictures(in_s3) == [("GET", 200)] * count
    asked = len(in_s3.requests)
    assert read_all(there) == read_all(here) and len(in_s3.requests) == asked
    again = open_source(Source(f"s3://bucket/set/{kind}"))
    assert read_all(again) == read_all(here) and of_pictures(in_s3)[count:] == [("GET", 304)] * count
    if count:
        bucket.delete_object(Bucket="bucket", Key="set/images/5.jpg")
        bucket.upload_file(str(tables / "images/6.jpg"), "bucket", "set/images/7.jpg")
        good, bad = read_all(open_source(Source(f"s3://bucket/set/{kind}")))
        assert good[7].image == good[6].image
        assert [str(error) for error in bad.values()] == [
            f"{kind}:row 5: Cannot read 's3://bucket/set/images/5.jpg': there is no such file"
        ]


def test_pictures_in_s3_that_cannot_be_used(in_s3, tmp_path, monkeypatch):
    paths = [
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3://no-such-bucket/a.jpg",
        "s3://b a d/x.jpg",
        "s3://bucket/\x01",
    ]
    samples = open_source(Source(str(write_csv(tmp_path / "bad.csv", [(path, "x") for path in paths]))))
    assert len(read_all(samples)[1]) == len(paths)
    monkeypatch.setattr(picture_files, "MAX_IMAGE_BYTES", 100)
    large = open_source(Source("s3://bucket/set/pairs.csv"))
    assert "has more bytes than the limit of 100" in read_all(large)[1][0].reason


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken"])
def test_credentials_that_expire_are_no_bad_sample(in_s3, code):
    table = open_source(Source("s3://bucket/set/pairs.csv"))
    in_s3.refuses = [code] * 3
    with pytest.raises(StoreError, match="the server answered 400; see that the credentials in the environment"):
        table.read(0)
    in_s3.refuses = ["RequestTimeout"]
    assert table.read(0)
    in_s3.refuses = ["KeyTooLongError"]
    with pytest.raises(BadSample, match="the server answered 400"):
        table.read(1)


@pytest.mark.parametrize("answer", ["400", "405", "416", "451"])
def test_an_answer_about_one_picture_is_a_bad_sample(server, tmp_path, answer):
    (tmp_path / "odd.csv").write_text(f"image,caption\n{server.url}/odd.jpg,a picture\n")
    server.fails = lambda method, path: answer
    with pytest.raises(BadSample, match=f"the server answered {answer}"):
        open_source(Source(str(tmp_path / "odd.csv"))).read(0)


def test_roots_by_url(tmp_path):
    (tmp_path / "coco.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(ValueError, match=r"root must be a folder, got 'http://host/images'"):
        open_source(Source(str(tmp_path / "coco.json"), root="http://host/images"))

"""Which of the tables below a folder are the test split."""

import os

import pytest

from fullbatch.evaluation.datacomp import ArrowRows, files_of_test_split

arrow = pytest.importorskip("pyarrow")


def put(path, rows, when=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.table({"image": ["x"] * rows, "caption": [f"{path.name} {row}" for row in range(rows)]})
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    if when is not None:
        os.utime(path, (when, when))


def rows_of(folder):
    return len(ArrowRows(folder, "image", "caption"))


def test_of_a_saved_dictionary_only_the_test_split(tmp_path):
    for split, rows in (("train", 29), ("validation", 7), ("test", 5)):
        for part in range(2):
            put(tmp_path / f"{split}/data-{part:05d}-of-00002.arrow", rows)
    put(tmp_path / "test/cache-0123.arrow", 3)
    assert rows_of(tmp_path) == 10
    assert [str(path.relative_to(tmp_path)) for path in files_of_test_split(tmp_path)] == [
        "test/data-00000-of-00002.arrow",
        "test/data-00001-of-00002.arrow",
    ]


def test_of_a_cache_only_the_test_split_of_the_newest_revision(tmp_path):
    config = tmp_path / "nlphuji___flickr_1k_test/TEST"
    for revision, rows, when in (("1.1.0/aaa", 4, 3000), ("1.1.0/bbb", 5, 1000), ("1.0.0/ccc", 6, 2000)):
        put(config / revision / "flickr_1k_test-train.arrow", 20, when + 5000)
        put(config / revision / "flickr_1k_test-test.arrow", rows, when)
    put(config / "1.1.0/ddd.incomplete/flickr_1k_test-test.arrow", 1, 9000)
    assert rows_of(config.parent) == 4
    os.utime(config / "1.1.0/bbb/flickr_1k_test-test.arrow", (4000, 4000))
    assert rows_of(config.parent) == 5
    assert rows_of(config / "1.1.0") == 5  # the version's folder is named by the user
    os.utime(config / "1.1.0/aaa/flickr_1k_test-test.arrow", (4000, 4000))
    with pytest.raises(ValueError, match="holds 2 tables"):
        rows_of(config.parent)


def test_the_only_table_is_the_test(tmp_path):
    put(tmp_path / "data-00000-of-00001.arrow", 3)
    assert rows_of(tmp_path) == 3


@pytest.mark.parametrize(
    "files",
    [
        ("train/data-00000-of-00001.arrow", "validation/data-00000-of-00001.arrow"),
        ("TEST/1.1.0/aaa/x-test.arrow", "default/1.1.0/aaa/x-test.arrow"),
        ("a-test.arrow", "b-test.arrow"),
        ("data-00000-of-00001.arrow", "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"),
        ("one/test/data-00000-of-00001.arrow", "two/test/data-00000-of-00001.arrow"),
    ],
)
def test_several_candidates_are_an_error(tmp_path, files):
    for file in files:
        put(tmp_path / file, 2)
    with pytest.raises(ValueError, match="holds 2 tables that may be the test split") as caught:
        rows_of(tmp_path)
    assert files[0] in str(caught.value) and files[-1].split("/")[0].split("-")[0] in str(caught.value)

import os
import pickle

import pytest

from fullbatch.data import table_files
from fullbatch.data.sample import BadSample
from fullbatch.data.table_files import CsvTable, ParquetTable
from tests.data.making import jpeg, read_all, write_csv, write_images


def csv_table(path, **options):
    return CsvTable([str(path)], **options)


@pytest.mark.parametrize(("ending", "separator"), [(".csv", ","), (".csv", "\t"), (".csv", ";"), (".tsv", "\t")])
def test_separators(tmp_path, ending, separator):
    rows = [(name, f"a, b; c {i}") for i, name in enumerate(write_images(tmp_path, 3))]
    table = csv_table(write_csv(tmp_path / f"a{ending}", rows, separator=separator))
    good, bad = read_all(pickle.loads(pickle.dumps(table)))
    assert not bad and [good[i].captions for i in range(3)] == [(f"a, b; c {i}",) for i in range(3)]
    assert good[2].image == jpeg(seed=2) and good[2].name == f"a{ending}:row 2"


def test_columns_are_found_or_named(tmp_path):
    name = write_images(tmp_path, 1)[0]
    path = write_csv(tmp_path / "a.csv", [("7", name, "one", "two", "")], ("id", "file_path", "text", "alt", "more"))
    assert csv_table(path).read(0).captions == ("one",)
    assert csv_table(path, captions=("alt", "text", "more")).read(0).captions == ("two", "one")
    with pytest.raises(
        ValueError, match=r"a.csv' has no column 'al'; did you mean 'alt'\? Its columns are 'id', .*\?image="
    ):
        csv_table(path, captions=("al",))
    strange = write_csv(tmp_path / "b.csv", [(name, "x")], ("where", "what"))
    with pytest.raises(
        ValueError, match=r"b.csv' has no column with the usual name of an image column. .*'where', 'what'"
    ):
        csv_table(strange)
    assert csv_table(strange, image="where", captions=("what",)).read(0).captions == ("x",)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match=r"empty.csv' has no column"):
        csv_table(tmp_path / "empty.csv")


def test_several_files_each_with_its_root(tmp_path):
    paths = []
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        rows = [(name, f"{part} {i}") for i, name in enumerate(write_images(tmp_path / part, 2))]
        paths.append(str(write_csv(tmp_path / part / "t.csv", rows)))
    table = CsvTable(paths)
    assert [table.read(i).captions[0] for i in range(4)] == ["a 0", "a 1", "b 0", "b 1"]
    assert csv_table(paths[0], root=str(tmp_path / "b")).read(0).captions == ("a 0",)


def test_bad_rows_keep_their_place(tmp_path):
    write_images(tmp_path, 2)
    outside = tmp_path / "outside.jpg"
    outside.write_bytes(jpeg())
    root = tmp_path / "images"
    os.symlink(outside, root / "link.jpg")
    os.mkfifo(root / "pipe.jpg")
    (root / "empty.jpg").write_bytes(b"")
    (tmp_path / "images" / "t.csv").write_bytes(
        b"\xef\xbb\xbffilepath,title\r\n"
        b"0.jpg,first\r\n"
        b"\r\n"  # 0 is above: an empty line is no sample
        b"1.jpg\r\n"
        b"1.jpg,a,b\r\n"
        b"../outside.jpg,x\r\n"
        b"link.jpg,x\r\n"
        b"missing.jpg,x\r\n"
        b"pipe.jpg,x\r\n"
        b"empty.jpg,x\r\n"
        b"1.jpg,\xff\xfe\r\n"
        b"1.jpg,a\0b\r\n"
        b"1\0.jpg,a\r\n"
        b"1.jpg,  \r\n"
        b",x\r\n"
        b'1.jpg,"two\r\nlines"\r\n' + f"{outside},absolute\r\n".encode() + b'1.jpg,"unclosed\r\n0.jpg,x\r\n'
    )
    good, bad = read_all(csv_table(root / "t.csv"))
    assert {i: s.captions[0] for i, s in good.items()} == {
        0: "first", 13: "two\r\nlines", 14: "absolute", 15: "unclosed\r\n0.jpg,x"
    }  # fmt: skip
    reasons = [
        "1 fields where the header has 2", "3 fields", "leads out of the folder", "leads out of", "No such file",
        "not a regular file", "zero bytes", "not valid UTF-8", "UTF-8", "cannot read", "empty", "not an image path",
    ]  # fmt: skip
    for index, reason in zip(range(1, 13), reasons, strict=True):
        assert reason in bad[index].reason, (index, bad[index])


def test_a_field_too_long_for_the_csv_module_costs_its_row(tmp_path):
    names = write_images(tmp_path, 2)
    rows = [(names[0], "one"), (names[1], "x" * 200_000), (names[1], "three")]
    good, bad = read_all(csv_table(write_csv(tmp_path / "t.csv", rows)))
    assert sorted(good) == [0, 2] and "field limit" in str(bad[1])


def test_fingerprints_follow_content_not_place(tmp_path):
    for place in ("a", "b", "c"):
        (tmp_path / place).mkdir()
        write_csv(tmp_path / place / "t.csv", [("x.jpg", "longer" if place == "c" else "one")])
    prints = [csv_table(tmp_path / place / "t.csv").fingerprint for place in "abc"]
    assert prints[0] == prints[1] != prints[2]


@pytest.fixture
def arrow():
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    return pyarrow


def write_parquet(arrow, path, rows, image_type, caption_type, names=("image", "caption"), group=2):
    images = arrow.array([image for image, _ in rows], image_type)
    captions = arrow.array([caption for _, caption in rows], caption_type)
    arrow.parquet.write_table(arrow.table([images, captions], names=list(names)), path, row_group_size=group)
    return path


def test_parquet_of_bytes(arrow, tmp_path):
    rows = [(jpeg(seed=i), f"caption {i}") for i in range(7)]
    paths = [
        write_parquet(arrow, str(tmp_path / f"{part}.parquet"), rows[part::2], arrow.binary(), arrow.string())
        for part in range(2)
    ]
    table = ParquetTable(paths)
    assert len(table) == 7
    copy = pickle.loads(pickle.dumps(table))
    for index, (image, caption) in enumerate(rows[0::2] + rows[1::2]):
        assert copy.read(index).image == image and table.read(index).captions == (caption,)
    assert copy.read(4).name == "1.parquet:row 0" and copy.fingerprint == table.fingerprint


def test_parquet_of_structs_paths_and_lists(arrow, tmp_path):
    names = write_images(tmp_path, 2)
    struct = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    rows = [
        ({"bytes": b"x", "path": "7.jpg"}, ["a", " b "]),
        ({"bytes": None, "path": names[1]}, ["c", None]),
        (None, ["d"]),
        ({"bytes": b"x", "path": None}, None),
        ({"bytes": None, "path": "../x"}, ["e"]),
    ]
    path = write_parquet(arrow, str(tmp_path / "s.parquet"), rows, struct, arrow.list_(arrow.string()))
    good, bad = read_all(ParquetTable([path]))
    assert good[0].image == b"x" and good[0].captions == ("a", "b")
    assert good[1].image == jpeg(seed=1) and good[1].captions == ("c",)
    assert ["missing" in bad[2].reason, "empty" in bad[3].reason, "leads out" in bad[4].reason] == [True] * 3
    path = write_parquet(
        arrow, str(tmp_path / "p.parquet"), [(names[0], "x")], arrow.string(), arrow.large_string(), ("path", "TEXT")
    )
    assert ParquetTable([path]).read(0).image == jpeg()


def test_parquet_keeps_few_row_groups(arrow, tmp_path, monkeypatch):
    rows = [(bytes(1000), "x")] * 20
    path = write_parquet(arrow, str(tmp_path / "a.parquet"), rows, arrow.binary(), arrow.string())
    monkeypatch.setattr(table_files, "_ROW_GROUP_BYTES", 5000)
    table = ParquetTable([path])
    assert len(read_all(table)[0]) == 20 and len(table._loaded) == 2


@pytest.mark.parametrize("column", ["image", "caption"])
def test_parquet_values_that_python_has_not(arrow, tmp_path, column):
    long = arrow.array([2**62], arrow.duration("s"))
    columns = {"image": arrow.array([b"x"]), "caption": arrow.array(["y"]), column: long}
    arrow.parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(BadSample, match=r"a\.parquet:row 0: cannot be read: "):
        ParquetTable([str(tmp_path / "a.parquet")]).read(0)


def test_parquet_errors(arrow, tmp_path, monkeypatch):
    path = write_parquet(arrow, str(tmp_path / "a.parquet"), [(b"x", "y")], arrow.binary(), arrow.string(), ("i", "c"))
    with pytest.raises(
        ValueError, match=r"a.parquet' has no column with the usual name of an image column. .*'i', 'c'"
    ):
        ParquetTable([path])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"b.parquet' is not a readable parquet file"):
        ParquetTable([str(tmp_path / "b.parquet")])
    rows = [(os.urandom(5000), "y")] * 4
    path = write_parquet(arrow, str(tmp_path / "c.parquet"), rows, arrow.binary(), arrow.string())
    table = ParquetTable([path])
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(bytes(range(255)) * 8)
    with pytest.raises(BadSample, match="cannot be read"):
        table.read(0)
    assert table.read(3).captions == ("y",)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install .fullbatch\[parquet\]"):
        ParquetTable([path])

from dataclasses import replace

import pytest

from fullbatch.config.data import BUILTIN, Data, Source
from fullbatch.data.sample import CocoCaptions, ImageFolder
from fullbatch.data.sources import builtin_path, expand_braces, expand_pattern, open_source, shuffle_for
from fullbatch.data.table_files import CsvTable, ParquetTable
from fullbatch.data.tar_shards import TarShards
from tests.data.making import captioned, read_all, write_coco, write_csv, write_images, write_shard


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("a.tar", ["a.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{008..010}.tar", ["008.tar", "009.tar", "010.tar"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("x{,y}", ["x", "xy"]),
        ("{abc}{1..}", ["{abc}{1..}"]),
    ],
)
def test_braces(text, paths):
    assert expand_braces(text) == paths


def test_too_many_braces():
    with pytest.raises(ValueError, match="more than 1,000,000 paths"):
        expand_braces("{0..999999}{0..999999}")


def test_patterns(tmp_path):
    for name in ("b1.tar", "b0.tar", "c.tar", "odd{0..1}[x].tar"):
        (tmp_path / name).touch()

    def names(pattern):
        return [path.removeprefix(f"{tmp_path}/") for path in expand_pattern(pattern)]

    assert names(f"{tmp_path}/b*.tar") == ["b0.tar", "b1.tar"]
    assert names(f"{tmp_path}/c.tar::{tmp_path}/b{{0..1}}.tar") == ["c.tar", "b0.tar", "b1.tar"]
    assert names(f"{tmp_path}/odd{{0..1}}[x].tar") == ["odd{0..1}[x].tar"]
    assert names(f"{tmp_path}/{{c,b?}}.tar") == ["c.tar", "b0.tar", "b1.tar"]


def test_patterns_that_match_nothing(tmp_path):
    for number in range(8):
        (tmp_path / f"0000{number}.tar").touch()
    with pytest.raises(
        ValueError, match=r"There is no '.*/00008.tar' \(of '.*\{00000..00331\}.tar'\); '.*' holds '00000.tar'"
    ):
        expand_pattern(f"{tmp_path}/{{00000..00331}}.tar")
    with pytest.raises(ValueError, match=r"Nothing matches '.*\*.csv'; .* and 2 more\."):
        expand_pattern(f"{tmp_path}/*.csv")
    with pytest.raises(ValueError, match=r"There is no '.*no/a.tar'; there is no folder '.*no' either"):
        expand_pattern(f"{tmp_path}/no/a.tar")
    with pytest.raises(ValueError, match="empty pattern"):
        expand_pattern(f"{tmp_path}/00000.tar::")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pipe:aws s3 cp x -", "is no place: samples are drawn at random"),
        ("hdfs://a/b.tar", "hdfs:// is no store that can be read; there are s3, gs"),
        (
            "https://x.org/a.json",
            "only tar shards, CSV and parquet are read by URL; copy what is of kind coco",
        ),
        ("https://x.org/a", "Cannot tell from its name"),
        ("https://x.org/a.tar.gz", "is packed"),
    ],
)
def test_places_that_are_refused(path, words):
    with pytest.raises(ValueError, match=words):
        open_source(Source(path))


def test_auto_decides_by_the_name(tmp_path):
    names = write_images(tmp_path / "pictures", 2)
    write_shard(tmp_path / "a.tar", captioned(2))
    (tmp_path / "shards").mkdir()
    for number in range(2):
        write_shard(tmp_path / "shards" / f"{number}.TAR", captioned(2, first=2 * number))
    write_csv(tmp_path / "pictures" / "t.tsv", [(names[0], "x")], separator="\t")
    write_coco(tmp_path / "pictures" / "c.json", {names[0]: ["x"]})
    for path, kind, length in [
        ("a.tar", TarShards, 2),
        ("shards", TarShards, 4),
        ("shards/*.TAR", TarShards, 4),
        ("pictures/t.tsv", CsvTable, 1),
        ("pictures/c.json", CocoCaptions, 1),
        ("pictures", ImageFolder, 2),
    ]:
        samples = open_source(Source(str(tmp_path / path)))
        assert isinstance(samples, kind) and len(samples) == length and samples.name == str(tmp_path / path)
        assert len(read_all(samples)[0]) == length
    (tmp_path / "t.txt").write_text("path\tcaption\n")
    assert len(open_source(Source(str(tmp_path / "t.txt"), kind="csv"))) == 0


def test_a_folder_of_parquet_files(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pyarrow.table({"jpg": [b"x"], "txt": ["y"]})
    for number in range(2):
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    samples = open_source(Source(str(tmp_path)))
    assert isinstance(samples, ParquetTable) and len(read_all(samples)[0]) == 2


def test_errors_say_what_to_do(tmp_path):
    (tmp_path / "x.bin").touch()
    (tmp_path / "a.tar").touch()
    (tmp_path / "a.csv").write_text("path,caption\n")
    with pytest.raises(ValueError, match=r"Cannot tell from its name what '.*x.bin' is: .*\?kind=tar"):
        open_source(Source(str(tmp_path / "x.bin")))
    with pytest.raises(ValueError, match="mixes csv and tar"):
        open_source(Source(str(tmp_path / "a.*")))
    with pytest.raises(ValueError, match="names 2 files or folders"):
        open_source(Source(str(tmp_path / "a.*"), kind="coco"))
    with pytest.raises(ValueError, match=r"holds no .parquet file; '.*' holds 'a.csv'"):
        open_source(Source(str(tmp_path), kind="parquet"))


def test_builtin_sets():
    with pytest.raises(ValueError, match=r"no built-in set 'emojis'; did you mean 'emoji'\? There are emoji"):
        open_source(Source("emojis", kind="builtin"))
    with pytest.raises(ValueError, match=r"no split 'new_styl'; did you mean 'new_style'\?"):
        builtin_path("emoji", "new_styl")


@pytest.mark.parametrize(("name", "split"), [(name, split) for name, splits in BUILTIN.items() for split in splits])
def test_builtin_sets_are_whole(name, split):
    try:
        builtin_path(name, split)
    except ValueError as error:
        pytest.skip(str(error))
    good, bad = read_all(open_source(Source(name, split=split)))
    assert len(good) > 100 and not bad


@pytest.mark.parametrize(
    ("disk", "inner", "rotational", "chosen"),
    [
        ("pci0/ata1/block/sda", "sda1", "1", "blocks"),
        ("pci0/ata1/block/sda", "", "1", "blocks"),
        ("pci0/nvme/block/nvme0n1", "nvme0n1p2", "0", "full"),
        ("pci0/virtio3/block/vda", "vda1", "1", "full"),  # what a virtual machine says of it is no matter
        ("virtual/block/loop0", "", "1", "full"),
    ],
)
def test_blocks_are_chosen_for_a_disk_that_rotates(tmp_path, monkeypatch, disk, inner, rotational, chosen):
    queue = tmp_path / "devices" / disk / "queue"
    queue.mkdir(parents=True)
    (queue / "rotational").write_text(f"{rotational}\n")
    here = queue.parent / inner
    here.mkdir(exist_ok=True)
    monkeypatch.setattr("fullbatch.data.sources._disk_of", lambda path: here)
    data = Data(data=(f"{tmp_path}/{{000..009}}.tar",))
    assert shuffle_for(data) == chosen
    assert shuffle_for(replace(data, in_memory=True)) == "full" and shuffle_for(Data()) == "full"
    assert shuffle_for(replace(data, shuffle="blocks")) == "blocks"


def test_a_volume_rotates_if_its_disk_does(tmp_path, monkeypatch):
    volume, disk = tmp_path / "virtual/block/dm-0", tmp_path / "pci0/ata1/block/sda"
    for folder, rotational in ((volume, "0"), (disk, "1")):
        (folder / "queue").mkdir(parents=True)
        (folder / "queue" / "rotational").write_text(rotational)
    (volume / "slaves").mkdir()
    (volume / "slaves" / "sda").symlink_to(disk)
    monkeypatch.setattr("fullbatch.data.sources._disk_of", lambda path: volume)
    assert shuffle_for(Data(data=("x.tar",))) == "blocks"


def test_where_no_disk_is_known_the_shuffle_is_full(tmp_path):
    for path in (f"{tmp_path}/absent/*.tar", "/proc/self/*.tar", "~/\0.tar", f"file://{tmp_path}/x.tar"):
        assert shuffle_for(Data(data=(path,))) == "full"
    assert shuffle_for(Data(data=("emoji", "s3://bucket/x.tar"))) == "blocks"

"""DataComp's 38 evaluation tasks: where they lie, what counts in each, and over which of them one averages.

Keys, sizes and main metrics are those of its tasklist.yml; FairFace and UTKFace have no main metric and do not count.
"""

# N: candidate images of all questions   Q: questions   D: width

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fullbatch import distributed
from fullbatch.data.picture_files import PictureFiles
from fullbatch.data.sample import BadSample, RawSample, Samples, fingerprint_of
from fullbatch.data.table_files import image_of_field, sample_of_row
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.result import Average, Result

_PART = re.compile(r"(?:-\d+-of-(\d+))?\.arrow$")  # NAME-00000-of-00002.arrow: one of two files of a table
_VERSION = re.compile(r"\d+\.\d+\.\d+")
MainMetric = Literal[
    "accuracy", "mean_per_class", "f1_macro", "worst_group", "worst_group_top5", "mean_r1", "jaccard_10_12"
]


@dataclass(frozen=True)
class Entry:
    key: str  # DataComp's, which names the folder
    name: str  # as its tables have it
    size: int  # images (of WinoGAViL: questions) in the test
    main: MainMetric = "accuracy"  # the metric that counts
    also: str = ""  # another name the folder may have

    def find(self, root: Path) -> Path | None:
        """Its folder below ``root``, named as in DataComp's download, as in CLIP_benchmark's data sets, or bare."""
        bare = self.key.rsplit("/", 1)[-1]
        for stem in dict.fromkeys((self.key.replace("/", "-"), bare, self.also or bare)):
            for place in (f"wds_{stem}_test", f"wds_{stem}", stem, f"hf_cache/nlphuji___{stem}"):
                if (root / place).is_dir():
                    return root / place
        return None

    @property
    def expected(self) -> str:
        """The name under which DataComp's download has it."""
        kind, _, bare = self.key.rpartition("/")
        if kind in ("retrieval", "misc"):
            return f"hf_cache/nlphuji___{bare}"
        return f"wds_{bare if kind == 'fairness' else self.key.replace('/', '-')}_test"


ENTRIES = (
    Entry("imagenet1k", "ImageNet 1k", 50_000),
    Entry("imagenet_sketch", "ImageNet Sketch", 50_889),
    Entry("imagenetv2", "ImageNet v2", 10_000),
    Entry("imagenet-a", "ImageNet-A", 7_500),
    Entry("imagenet-o", "ImageNet-O", 2_000),
    Entry("imagenet-r", "ImageNet-R", 30_000),
    Entry("objectnet", "ObjectNet", 18_574),
    Entry("vtab/caltech101", "Caltech-101", 6_085, "mean_per_class"),
    Entry("vtab/cifar100", "CIFAR-100", 10_000),
    Entry("vtab/clevr_count_all", "CLEVR Counts", 15_000),
    Entry("vtab/clevr_closest_object_distance", "CLEVR Distance", 15_000),
    Entry("vtab/dtd", "Describable Textures", 1_880),
    Entry("vtab/eurosat", "EuroSAT", 5_400),
    Entry("vtab/flowers", "Oxford Flowers-102", 6_149, "mean_per_class"),
    Entry("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", 711),
    Entry("vtab/pcam", "PatchCamelyon", 32_768),
    Entry("vtab/pets", "Oxford-IIIT Pet", 3_669, "mean_per_class"),
    Entry("vtab/resisc45", "RESISC45", 6_300),
    Entry("vtab/svhn", "SVHN", 26_032),
    Entry("sun397", "SUN397", 108_754),
    Entry("cifar10", "CIFAR-10", 10_000),
    Entry("country211", "Country211", 21_100),
    Entry("fgvc_aircraft", "FGVC Aircraft", 3_333, "mean_per_class"),
    Entry("food101", "Food-101", 25_250),
    Entry("gtsrb", "GTSRB", 12_630),
    Entry("mnist", "MNIST", 10_000),
    Entry("voc2007", "Pascal VOC 2007", 14_976),
    Entry("renderedsst2", "Rendered SST2", 1_821),
    Entry("cars", "Stanford Cars", 8_041),
    Entry("stl10", "STL-10", 8_000),
    Entry("retrieval/flickr_1k_test_image_text_retrieval", "Flickr", 1_000, "mean_r1", also="flickr30k"),
    Entry("retrieval/mscoco_2014_5k_test_image_text_retrieval", "MSCOCO", 5_000, "mean_r1", also="mscoco_captions"),
    Entry("misc/winogavil", "WinoGAViL", 3_563, "jaccard_10_12"),
    Entry("wilds/iwildcam", "iWildCam", 42_791, "f1_macro"),
    Entry("wilds/camelyon17", "Camelyon17", 85_054),
    Entry("wilds/fmow", "FMoW", 22_108, "worst_group"),
    Entry("fairness/dollar_street", "Dollar Street", 3_503, "worst_group_top5"),
    Entry("fairness/geode", "GeoDE", 12_488, "worst_group"),
)

_SHIFTS = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
_VTAB = (*(entry.key for entry in ENTRIES if entry.key.startswith("vtab/")), "sun397")
_PAIRED = tuple(entry.key for entry in ENTRIES if entry.key.startswith("retrieval/"))

# DataComp's own groups, then those that the papers add.
GROUPS: dict[str, tuple[str, ...]] = {
    "ImageNet": ("imagenet1k",),
    "ImageNet dist. shifts": _SHIFTS,
    "VTAB": _VTAB,
    "Retrieval with WinoGAViL": (*_PAIRED, "misc/winogavil"),
    "DataComp average": tuple(entry.key for entry in ENTRIES),
    "ImageNet and variants": ("imagenet1k", *_SHIFTS),
    "Retrieval": _PAIRED,
    "Fairness": ("fairness/dollar_street", "fairness/geode"),
}


def averages(main_of_key: Mapping[str, float]) -> tuple[Average, ...]:
    made = []
    for name, keys in GROUPS.items():
        values = [main_of_key[key] for key in keys if key in main_of_key]
        made.append(Average(name, sum(values) / len(values) if values else None, len(values), len(keys)))
    return tuple(made)


class ArrowRows(Samples):
    """The rows of the test split below a folder, or of the only table there; columns as saved.  Hugging Face's datasets
    leaves such tables: DataComp's download puts Flickr, MSCOCO and WinoGAViL so."""

    def __init__(self, folder: Path, *columns: str) -> None:
        self.files = files_of_test_split(folder)
        self.name, self.folder, self._columns, self._table = folder.name, str(folder), list(columns), None
        there = self._rows().column_names
        if missing := [column for column in columns if column not in there]:
            raise ValueError(f"{self.files[0]} has no column {', '.join(missing)}; its columns are {', '.join(there)}.")
        described = [part for path in self.files for part in (path.name, path.stat().st_size, path.stat().st_mtime_ns)]
        self.fingerprint, self.count = fingerprint_of("arrow", *columns, *described), int(self._rows().num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}

    def row(self, index: int) -> dict[str, Any]:
        sliced = self._rows().select(self._columns).slice(index, 1)
        return dict(sliced.to_pylist()[0])

    def column(self, name: str) -> list[Any]:
        return list(self._rows().column(name).to_pylist())

    def _rows(self) -> Any:
        if self._table is None:
            try:
                import pyarrow as pa
            except ImportError:
                raise ValueError(f'Reading {self.name!r} needs pyarrow: pip install "fullbatch[parquet]".') from None
            try:
                tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in self.files]
                self._table = pa.concat_tables(tables)
            except (OSError, ValueError) as error:  # pyarrow's errors are these
                raise ValueError(f"{self.files[0]} is not a readable table of datasets: {error}.") from None
        return self._table


def files_of_test_split(folder: Path) -> list[Path]:
    """The files of the test split, named NAME-test.arrow or lying in test/; of several cached revisions, the newest.
    ValueError where several tables remain: together they would be another test."""
    files = [path for path in folder.rglob("*.arrow") if not path.name.startswith("cache-")]
    files = sorted(path for path in files if not path.parent.name.endswith(".incomplete"))  # a download cut off
    if not files:
        raise ValueError(f"The folder {str(folder)!r} holds no .arrow file of a test split.")
    named = [path for path in files if _PART.sub("", path.name).endswith("-test")]
    inside = [path for path in files if "test" in path.relative_to(folder).parent.parts]
    tables: dict[tuple[Path, str], list[Path]] = {}
    for path in named or inside or files:
        part = _PART.search(path.name)
        of = part[1] if part is not None and part[1] else "1"
        tables.setdefault((path.parent, f"{_PART.sub('', path.name)} of {of}"), []).append(path)
    candidates = _newest(list(tables.values()))
    if len(candidates) > 1:
        few = ", ".join(str(files[0].relative_to(folder)) for files in candidates[:4])
        raise ValueError(
            f"The folder {str(folder)!r} holds {len(candidates)} tables that may be the test split "
            f"({few}{', ...' if len(candidates) > 4 else ''}); leave only the one to measure there."
        )
    return candidates[0]


def _newest(tables: list[list[Path]]) -> list[list[Path]]:
    """Where all are revisions of one thing, as the cache keeps them (CONFIG/VERSION/HASH/), the one written last."""
    homes = {files[0].parent.parent.parent for files in tables}
    revisions = {files[0].parent for files in tables}
    cached = all(_VERSION.fullmatch(revision.parent.name) for revision in revisions)
    if len(homes) > 1 or len(revisions) < len(tables) or not cached:
        return tables
    written = [max(path.stat().st_mtime_ns for path in files) for files in tables]
    return [files for files, when in zip(tables, written, strict=True) if when == max(written)]


class ArrowPairs(ArrowRows):
    """Images with their captions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "image", "caption")
        if not self.count:
            raise ValueError(f"The tables in {self.folder!r} hold no row.")

    def _read(self, index: int) -> RawSample:
        return sample_of_row(
            f"{self.name}:row {index}", PictureFiles(self.folder), self.row(index), "image", ("caption",)
        )


class CandidateImages(ArrowRows):
    """The images among which an association is sought, WinoGAViL's: one after the other, row by row."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "candidate_images", "cue", "candidates", "associations")
        self.candidates: list[list[str]] = self.column("candidates")
        self._places = [(row, place) for row, names in enumerate(self.candidates) for place in range(len(names))]
        self.count = len(self._places)

    def _read(self, index: int) -> RawSample:
        row, place = self._places[index]
        label, images = f"{self.name}:row {row}, candidate {place}", self.row(row)["candidate_images"]
        if len(images) != len(self.candidates[row]):
            raise BadSample(label, f"{len(images)} images for {len(self.candidates[row])} candidates")
        image = image_of_field(label, PictureFiles(self.folder), images[place])
        return RawSample(label, image, (self.candidates[row][place],))


def prompt_of_cue(cue: str) -> str:
    """
    >>> prompt_of_cue("Orange"), prompt_of_cue("bear")
    ('An orange', 'A bear')
    """
    cue = cue.lower()
    return f"An {cue}" if cue[:1] in tuple("aeiou") else f"A {cue}"


def associations(task: str, folder: Path, embedder: Embedder) -> Result:
    """The mean Jaccard index; main is that of questions with ten or twelve candidates, as in DataComp."""
    samples = distributed.together(lambda: CandidateImages(folder))
    images = embedder.images(samples)
    cues, right = samples.column("cue"), samples.column("associations")
    text_QD = embedder.captions([prompt_of_cue(cue) for cue in cues])
    row_of_id = {sample: row for row, sample in enumerate(images.ids.tolist())}
    scores: list[tuple[int, float, float]] = []  # candidates, score, that of guessing
    first, left_out = 0, 0
    for question, candidates in enumerate(samples.candidates):
        there = [row_of_id[place] for place in range(first, first + len(candidates)) if place in row_of_id]
        first += len(candidates)
        is_right = [candidate in right[question] for candidate in candidates]
        if len(there) < len(candidates) or not any(is_right):
            left_out += 1
            continue
        similarities = (images.image_ND[there] @ text_QD[question]).tolist()
        guessing = jaccard_of_guessing(len(candidates), sum(is_right))
        scores.append((len(candidates), jaccard(similarities, is_right), guessing))
    many = [(score, guessing) for size, score, guessing in scores if size >= 10]
    if not many:
        raise ValueError(f"{str(folder)!r} holds no question with ten or more candidates, which are those that count.")
    metrics = {"jaccard_10_12": fmean(score for score, _ in many), "jaccard": fmean(score for _, score, _ in scores)}
    if few := [score for size, score, _ in scores if size <= 6]:
        metrics["jaccard_5_6"] = fmean(few)
    counts = {"questions": len(samples.candidates), "images": len(images.ids), "left_out": left_out}
    notes = (f"{left_out:,} questions left out: an image could not be read, or none is right",) if left_out else ()
    chance, most = fmean(guessing for _, guessing in many), max(size for size, _, _ in scores)
    return Result(task, metrics, "jaccard_10_12", chance, most, counts=counts, notes=notes)


def jaccard(similarities: Sequence[float], right: Sequence[bool]) -> float:
    """Take as many of the most similar as are right (of equals the first): what both share over what they have
    together."""
    count = sum(right)
    taken = sorted(range(len(right)), key=lambda place: -similarities[place])[:count]
    common = sum(right[place] for place in taken)
    return common / (2 * count - common)


def jaccard_of_guessing(candidates: int, right: int) -> float:
    """Its mean over all choices of ``right`` among ``candidates``."""
    ways = math.comb(candidates, right)
    return sum(
        math.comb(right, common) * math.comb(candidates - right, right - common) / ways * common / (2 * right - common)
        for common in range(1, right + 1)
    )

"""DataComp's 38 evaluation tasks: where they lie, what counts in each, and over which of them one averages.

Keys, sizes and main metrics are those of its tasklist.yml; FairFace and UTKFace have no main metric and do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullbatch.evaluation.result import Average

MainMetric = Literal[
    "accuracy", "mean_per_class", "f1_macro", "worst_group", "worst_group_top5", "mean_r1", "jaccard_10_12"
]


@dataclass(frozen=True)
class Entry:
    """key     DataComp's, which names the folder
    name    as its tables have it
    size    images (of WinoGAViL: questions) in the test
    main    the metric that counts
    also    another name the folder may have
    """

    key: str
    name: str
    size: int
    main: MainMetric = "accuracy"
    also: str = ""

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


def averages(main_of_key: Mapping[str, float], groups: Mapping[str, Sequence[str]] = GROUPS) -> tuple[Average, ...]:
    made = []
    for name, keys in groups.items():
        values = [main_of_key[key] for key in keys if key in main_of_key]
        made.append(Average(name, sum(values) / len(values) if values else None, len(values), len(keys)))
    return tuple(made)

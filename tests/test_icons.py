"""The icon corpus, on icon sets made up here: names to captions, the choice, the held-out pairs, the pack and back."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fullbatch.data.images import decode
from fullbatch.data.tar_shards import TarShards

FOLDER = Path(__file__).parents[1] / "benchmarks/icons"
sys.path.insert(0, str(FOLDER))  # its scripts import each other by name, as scripts do

import icon_choice
import icon_names
import icon_pack
import icon_sets
from icon_names import Icon
from unpack import unpack

EMOJI = {
    "1f600": icon_sets.Emoji("grinning face", ("face", "smile", "happy"), "smileys emotion"),
    "1f1eb-1f1f7": icon_sets.Emoji("flag: France", ("FR",), "flags"),
}
BRANDS = icon_sets.Brands(words=frozenset({"figma"}), names=frozenset({"figma", "apple"}))


def icon_set(*names: str, prefix: str = "made", kind: str = "UI 24px", **fields: object) -> icon_sets.IconSet:
    plain = icon_sets.IconSet(prefix, "Made", "We", "", "MIT", "", "1", kind, dict.fromkeys(names, ""), {}, {}, {}, {})
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def captions(icons: icon_sets.IconSet) -> dict[str, tuple[str, ...]]:
    found = icon_names.captioned(icons, icon_names.EmojiNames(EMOJI), BRANDS)
    return {icon.name: icon.captions for icon in found}


def icon(caption: str, set: str = "made", name: str = "", style: str = "") -> Icon:
    return Icon(set, name or caption.replace(" ", "-"), (caption,), "", style)


# ---------------------------------------------------------------------------------------------------------------------
# names


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("arrow-circle-down-outline", "arrow circle down"),
        ("audio-wave-02", "audio wave"),
        ("folder2", "folder"),
        ("dice-6", "dice 6"),
        ("file-mp3", "file mp3"),
        ("traffic-light", "traffic light"),
        ("home-light", "home"),
        ("bell-24px", "bell"),
        ("outline", "outline"),
    ],
)
def test_names_become_captions_without_style_and_number(name, caption):
    styled = ("home", "home-light", *(f"thing{letter}-light" for letter in "abcdefghijkl"))
    assert captions(icon_set(name, *styled))[name] == (caption,)


def test_endings_that_the_set_lists_are_styles():
    icons = icon_set(
        "photo-20-solid", "photo-solid", "photo", "battery-40-solid", styles={"": "", "solid": "", "20-solid": ""}
    )
    found = captions(icons)
    assert {found[name] for name in ("photo-20-solid", "photo-solid", "photo")} == {("photo",)}


def test_prefixes_that_the_set_lists_are_styles():
    found = icon_names.captioned(
        icon_set("round-alarm", "alarm", style_prefixes={"round": "Round"}), icon_names.EmojiNames({}), BRANDS
    )
    assert [(one.caption, one.style) for one in found] == [("alarm", "round"), ("alarm", "")]


def test_a_category_follows_the_name():
    icons = icon_set("pan", "arrow-up", category_of={"pan": "HomeKitchen", "arrow-up": "Arrow"})
    assert captions(icons) == {"pan": ("pan", "pan, home kitchen"), "arrow-up": ("arrow up",)}


def test_logos_are_left_out():
    names = ("figma-circle", "apple", "apple-green", "social-share", "city-logo", "anchor")
    assert set(captions(icon_set(*names, category_of={"anchor": "Brands"}))) == {"apple-green"}
    assert "apple" in captions(icon_set("apple", kind="Thematic"))


def test_names_without_a_word_are_left_out():
    assert captions(icon_set("4k-1", "a", "x-2", "one-two-three-four-five-six-seven-eight-nine")) == {}


def test_emoji_take_unicode_names_and_keywords():
    icons = icon_set("grinning-face", "smiley", "smiley-dark-skin-tone", kind="Emoji", hexcodes={"smiley": "1F600"})
    found = captions(icons)
    assert set(found) == {"grinning-face", "smiley"}
    assert found["smiley"][0] == "grinning face"
    assert set(found["smiley"][1].split(", ")) == {"grinning face", "smile", "happy"}
    assert found["smiley"][2] == "grinning face, smileys emotion"


def test_flags_are_named_by_country():
    assert captions(icon_set("fr", "zz", "fr-idf", prefix="flagpack", kind="Flags / Maps"))["fr"][0] == "flag france"


# ---------------------------------------------------------------------------------------------------------------------
# sets


@pytest.mark.parametrize(
    ("prefix", "license", "category", "wanted"),
    [
        ("tabler", "MIT", "UI 24px", True),
        ("openmoji", "CC-BY-SA-4.0", "Emoji", False),
        ("ps", "CC-BY-NC-4.0", None, False),
        ("simple-icons", "CC0-1.0", "Logos", False),
        ("devicon", "MIT", "Programming", False),
        ("line-md", "MIT", "Material", False),
    ],
)
def test_permissive_sets_without_logos_take_part(prefix, license, category, wanted):
    assert icon_sets.is_wanted(prefix, {"license": {"spdx": license}, "category": category}) == wanted


def test_a_set_is_read_without_withdrawn_icons(tmp_path):
    content = {
        "icons": {
            "home": {"body": "<path/>"},
            "old": {"body": "<path/>", "hidden": True},
            "wide": {"body": "", "width": 32},
        },
        "height": 24,
        "width": 24,
        "categories": {"Buildings": ["home"]},
        "chars": {"1f600": "home"},
    }
    (tmp_path / "made.json").write_text(json.dumps(content))
    info = {"name": "Made", "author": {"name": "We"}, "license": {"spdx": "MIT"}}
    icons = icon_sets.read_set(tmp_path / "made.json", info)
    assert list(icons.icons) == ["home", "wide"]
    assert 'viewBox="0 0 24 24"><path/></svg>' in icons.icons["home"]
    assert 'viewBox="0 0 32 24"' in icons.icons["wide"]
    assert icons.category_of == {"home": "Buildings"} and icons.hexcodes == {"home": "1f600"}


def test_a_package_that_npm_cannot_fetch_is_named(tmp_path, monkeypatch):
    (tmp_path / "npm").write_text("#!/bin/sh\necho 'npm error 404 not found' >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ValueError, match=r"could not fetch made@1\.0\.0: npm error 404"):
        icon_sets.download("made", "1.0.0", "00", tmp_path / "cache")


def test_a_package_with_other_content_is_an_error(tmp_path):
    (tmp_path / "made-1.0.0.tgz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="expected it to start with 00ff"):
        icon_sets.download("made", "1.0.0", "00ff", tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# the choice


def test_a_drawing_keeps_two_looks():
    styles = ("", "outline", "filled", "duotone", "outline sharp", "filled rounded")
    icons = [icon("home", name="-".join(["home", *style.split()]), style=style) for style in styles]
    assert [one.name for one in icon_choice.some_styles(icons)] == ["home", "home-filled"]
    sizes = [icon("home", name=f"home-{size}-filled", style=f"{size} filled") for size in (16, 24, 48)]
    assert [one.name for one in icon_choice.some_styles(sizes)] == ["home-24-filled"]


def test_no_caption_dominates():
    icons = [icon("home", f"set{number % 9}", f"home-{number}") for number in range(90)]
    kept = [icons[index] for index in icon_choice.capped(icons)]
    assert len(kept) == icon_choice.PER_CAPTION
    assert max(Counter(one.set for one in kept).values()) <= 2  # in turn from nine sets


def test_a_large_set_keeps_the_names_that_others_use(monkeypatch):
    monkeypatch.setattr(icon_choice, "PER_SET", 2)
    icons = [icon("zyzzyva"), icon("home"), icon("bell"), icon("home", "other"), icon("bell", "other")]
    assert icon_choice.most_shared(icons) == [1, 2, 3, 4]


def test_pictures_that_are_there_already_are_dropped():
    icons = [icon("home", "a"), icon("house", "b"), icon("home", "c"), icon("home", "d"), icon("house", "e")]
    thumbnails = np.zeros((5, 256), np.uint8)
    thumbnails[2] = 2  # hardly another home
    thumbnails[3] = 200
    thumbnails[4] = 2  # the first to be drawn so under this name
    assert icon_choice.distinct(icons, ["one", "one", "two", "three", "four"], thumbnails) == [0, 3, 4]


def many_icons() -> list[Icon]:
    things, changes = ("home", "bell", "cat", "tree", "book", "car"), ("off", "plus", "lock", "star", "circle", "heart")
    texts = [f"{thing} {change}" for thing in things for change in changes]
    icons = [icon(text, f"set{number}") for text in texts for number in range(3)]
    return icons + [icon("plus home", "set4"), icon("homes plus", "set5"), icon("battery 4"), icon("rareword home")]


def test_whole_concepts_are_held_out():
    icons = many_icons()
    train, test = icon_choice.held_out(icons, 12)
    tested = [icons[index].caption for index in test]
    trained = {icons[index].caption for index in train}
    assert len(set(tested)) == len(tested) == 12
    assert {icon_choice.concept(text) for text in tested}.isdisjoint(map(icon_choice.concept, trained))
    assert not {"battery 4", "rareword home"} & set(tested)
    words = Counter(word for index in train for word in icons[index].caption.split())
    assert all(words[word] >= icon_choice.WORD_SEEN for text in tested for word in text.split())
    assert icon_choice.held_out(icons, 12) == (train, test)


def test_word_order_and_plural_make_no_new_concept():
    assert (
        len({icon_choice.concept(text) for text in ("arrow circle down", "down arrow circle", "arrows circle down")})
        == 1
    )
    assert icon_choice.concept("bus") != icon_choice.concept("bu")


def test_too_few_concepts_are_an_error():
    with pytest.raises(ValueError, match="100 are wanted"):
        icon_choice.held_out(many_icons(), 100)


# ---------------------------------------------------------------------------------------------------------------------
# the pack


@pytest.mark.parametrize("shape", [(5, 64, 64), (8, 64, 64), (11, 64, 64, 3)])
def test_sheets_come_back(shape):
    icons = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(icon_pack.untiled(icon_pack.tiled(icons), len(icons)), icons)


def small_pack(path: Path, trained: int = 45, tested: int = 5) -> dict[str, np.ndarray]:
    """Every second icon is coloured; the pixels of each by its name."""
    rng = np.random.default_rng(0)
    splits = ["train"] * trained + ["test"] * tested
    greys = {f"grey-{n}": rng.integers(0, 16, (64, 64), dtype=np.uint8) * 17 for n in range(0, len(splits), 2)}
    colours = {f"colour-{n}": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for n in range(1, len(splits), 2)}
    entries = [
        icon_pack.Entry("made", name, splits[int(name.split("-")[1])], "", "shapes", (name, f"{name}, shapes"))
        for name in (*greys, *colours)
    ]
    sheets = {}
    for kind, pictures in (("grey", list(greys.values())), ("colour", list(colours.values()))):
        for number, part in enumerate((pictures[:10], pictures[10:])):
            sheets[f"{kind}-{number:04d}-{len(part)}"] = icon_pack.encoded_sheet(np.stack(part))
    icon_pack.write_pack(path, {"made": {"title": "Made", "license": "MIT"}}, entries, sheets, "# Authors\n")
    return {**greys, **colours}


@pytest.mark.parametrize("which", ["all", "name"])
def test_a_pack_becomes_shards_that_training_reads(tmp_path, monkeypatch, which):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pictures = small_pack(tmp_path / "icons.tar")
    assert unpack(tmp_path / "icons.tar", tmp_path / "data", which, workers=1) == {"train": 45, "test": 5}
    train = TarShards([str(path) for path in sorted((tmp_path / "data").glob("train-*.tar"))])
    test = TarShards([str(tmp_path / "data/test-00000.tar")])
    assert (len(train), len(test)) == (45, 5)
    for samples, count in ((train, 2 if which == "all" else 1), (test, 1)):
        for index in range(len(samples)):
            sample = samples.read(index)
            expected = pictures.pop(sample.captions[0])
            shown = np.asarray(decode(sample.image, "", 10_000))
            assert np.array_equal(shown, expected if expected.ndim == 3 else np.stack([expected] * 3, axis=2))
            assert len(sample.captions) == count
    assert not pictures
    with tarfile.open(tmp_path / "data/test-00000.tar") as shard:
        record = json.loads(shard.extractfile(shard.getnames()[1]).read())
    assert (record["set"], record["license"], record["category"]) == ("made", "MIT", "shapes")
    assert (tmp_path / "data/ATTRIBUTION.md").read_text() == "# Authors\n"


def test_icons_of_a_set_may_lie_together(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_pack(tmp_path / "icons.tar")
    names = {}
    for by_set in (True, False):
        unpack(tmp_path / "icons.tar", tmp_path / str(by_set), "name", 1, by_set)
        shards = TarShards([str(path) for path in sorted((tmp_path / str(by_set)).glob("train-*.tar"))])
        names[by_set] = [shards.read(index).captions[0] for index in range(45)]
    assert names[True] == sorted(names[False]) != names[False]


def test_the_same_icons_give_the_same_bytes(tmp_path):
    for name in ("one.tar", "two.tar"):
        small_pack(tmp_path / name)
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_a_file_that_is_no_pack_is_an_error_in_one_line(tmp_path):
    (tmp_path / "icons.tar").write_text("not a tar")
    command = [sys.executable, str(FOLDER / "unpack.py"), str(tmp_path / "icons.tar"), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "is not a pack" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# the whole build, where the renderer is installed


def test_drawing():
    pytest.importorskip("resvg_py")
    from icon_drawing import draw

    def svg(body: str) -> str:
        return icon_sets.as_svg({"body": body, "width": 24, "height": 24}, {})

    grey = draw(svg('<path fill="currentColor" d="M2 2h20v10H2z"/>'))
    assert grey is not None and grey.is_grey and grey.pixels.shape == (64, 64)
    assert set(np.unique(grey.pixels % 17)) == {0} and grey.pixels.min() == 0
    colour = draw(svg('<path fill="#f00" d="M2 2h20v20H2z"/>'))
    assert colour is not None and not colour.is_grey and tuple(colour.pixels[32, 32]) == (255, 0, 0)
    assert draw(svg('<path fill="#fff" d="M2 2h20v20H2z"/>')) is None
    assert draw("<svg") is None
    assert grey.digest != colour.digest and grey.thumbnail().shape == (16, 16)

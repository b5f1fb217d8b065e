"""Damaged files: every reader is given files that it reads and we write, each with a mutation drawn from its number.

    python benchmarks/deaths/mutations.py FOLDER --count 10000      # again: goes on after the last one

A reader may answer with a value, or refuse with a ValueError or OSError, which the command line prints as a sentence.
Anything else would be a traceback.  Where a file has a checksum, a value must be the undamaged one.  A reader that
takes longer than a minute hangs.  Lines about what went wrong are kept in FOLDER/mutations.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests make the small data and models

import torch
import yaml
from campaign import in_child
from death_cases import cases, digest, make_inputs

import fullbatch as fb
from fullbatch.config.data import Source
from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, read_yaml
from fullbatch.data.images import EvalTransform
from fullbatch.data.sample import BadSample
from fullbatch.data.sources import open_source
from fullbatch.data.tar_shards import load_array
from fullbatch.find.index import PictureIndex
from fullbatch.finetuning.record import read_record
from fullbatch.report.collect import read_run
from fullbatch.report.page import write_page
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder
from fullbatch.training_run import train
from fullbatch.trials.comparison import planned_in
from fullbatch.trials.storage import open_storage, plan_to_go_on_with, storage_of
from fullbatch.trials.trial import outcome_of

LIMIT = 60  # seconds; machines are busy
TOGETHER = 400  # mutations that a process makes before another takes its place
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    -1e308,
    math.nan,
    math.inf,
    "",
    "\0",
    "x" * 5000,
    "../..",
    [],
    {},
    [[]],
    {"a": 1},
)


@dataclass(frozen=True)
class Reader:
    name: str
    place: str  # its files, below the templates
    files: tuple[str, ...]  # patterns below that: which of them are damaged
    read: Callable[[Path], Any]
    checked: bool = False  # whether a checksum tells any damage
    share: int = 8  # of all mutations; what takes long has 1


# -- mutations --------------------------------------------------------------------------------------------------------


def mutated(raw: bytes, suffix: str, draw: random.Random) -> tuple[str, bytes]:
    """What was done, and what came of it."""
    if suffix in (".json", ".yaml", ".jsonl") and draw.random() < 0.6:
        return draw_value(raw, suffix, draw)
    at = draw.randrange(len(raw) + 1)
    span = min(draw.choice([1, 4, 16, 64, 512, 4096]), max(1, len(raw) - at))
    kind = draw.choice(["flip", "cut", "zero", "twice", "without", "noise", "empty"])
    match kind:
        case "flip":
            changed = bytearray(raw)
            for _ in range(draw.choice([1, 1, 2, 8])):
                if changed:
                    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            return kind, bytes(changed)
        case "cut":
            return kind, raw[:at]
        case "zero":
            return kind, raw[:at] + bytes(span) + raw[at + span :]
        case "twice":
            return kind, raw[: at + span] + raw[at:]
        case "without":
            return kind, raw[:at] + raw[at + span :]
        case "noise":
            return kind, raw[:at] + draw.randbytes(span) + raw[at + span :]
    return kind, b""


def draw_value(raw: bytes, suffix: str, draw: random.Random) -> tuple[str, bytes]:
    """A value of another type, an extreme one, or a key too few or too many."""
    lines = raw.decode().splitlines() if suffix == ".jsonl" else [raw.decode()]
    which = draw.randrange(len(lines))
    tree = (yaml.safe_load if suffix == ".yaml" else json.loads)(lines[which])
    places = list(_places(tree))
    if not places:
        return "value", raw
    owner, key = draw.choice(places)
    kind = draw.choice(["value", "value", "without a key", "another key"])
    if kind == "value" or not isinstance(owner, dict):
        owner[key] = draw.choice(ODD)
    elif kind == "without a key":
        del owner[key]
    else:
        owner[f"{key}x"] = owner.pop(key)
    if suffix == ".yaml":
        return kind, yaml.safe_dump(tree, explicit_end=True).encode()
    lines[which] = json.dumps(tree)
    return kind, "\n".join(lines).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


# -- readers ----------------------------------------------------------------------------------------------------------


def samples(name: str) -> Callable[[Path], str]:
    def read(folder: Path) -> str:
        source, transform = open_source(Source.parse(str(folder / name))), EvalTransform(16)
        found: list[Any] = []
        for number in range(len(source)):
            try:
                sample = source.read(number)
                found.append((sample.captions, transform(sample.image, sample.name)))
            except BadSample as bad:
                found.append((str(bad),))
        return digest(found)

    return read


def last_state(run: Path) -> str:
    """Of the one checkpoint there is; "" where it is known to be damaged."""
    good = checkpoint.last_good(run / "checkpoints")
    return "" if good is None else digest(checkpoint.read(good))


def going_on(run: Path) -> None:
    folder = Folder(run)
    train(folder.read_config(), run)


def of_trial(search: Path) -> object:
    storage = storage_of(search, None)
    plan = plan_to_go_on_with(search, storage)
    return plan, open_storage(storage).get_all_studies()


def loaded(path: Path) -> None:
    fb.load(str(path), device="cpu")


def page(folder: Path) -> None:
    write_page([folder], folder / "page.html")


def readers(encoder: fb.Encoder, pictures: Path) -> list[Reader]:
    return [
        Reader("CSV", "sources", ("table.csv",), samples("table.csv")),
        Reader("folder of pictures", "sources", ("pictures/*",), samples("pictures")),
        Reader("tar shard", "sources", ("shard.tar",), samples("shard.tar")),
        Reader("parquet", "sources", ("table.parquet",), samples("table.parquet")),
        Reader("index of a shard", "index", ("*.npy",), lambda folder: _array(folder), checked=True),
        Reader("config", "run", ("config.yaml",), lambda run: Folder(run).read_config()),
        Reader("recipe", "run", ("config.yaml",), lambda run: from_dict(RunConfig, read_yaml(run / "config.yaml"))),
        Reader("checkpoint", "run", ("checkpoints/*/*.pt",), last_state, checked=True),
        Reader("manifest", "run", ("checkpoints/*/manifest.json",), last_state),
        Reader("run folder, gone on with", "planned", ("batches/*", "*.jsonl", "*.json", "model/*"), going_on, share=1),
        Reader("run folder, its data", "run", ("*.jsonl", "*.json", "config.yaml"), read_run),
        Reader("run folder, its page", "run", ("*.jsonl", "*.json"), page, share=1),
        Reader("fine-tuning", "tuned", ("finetune.json", "tuned/measured.json"), read_record),
        Reader("comparison", "compared", ("plan.yaml",), planned_in),
        Reader("comparison, its page", "compared", ("comparison.json", "runs/*/*.json"), page, share=1),
        Reader("outcome of a run", "compared", ("runs/*/outcome.json",), lambda at: _outcomes(at)),
        Reader("search", "searched", ("search.yaml", "study.db"), of_trial, share=2),
        Reader("search, its page", "searched", ("search.json", "trials/*/*.json"), page, share=1),
        Reader(
            "index of pictures",
            "pictures",
            ("index.json", "files.jsonl", "embeddings.f32"),
            lambda place: PictureIndex(pictures, encoder, place).update(),
            share=2,
        ),
        Reader("exported model", "exported", ("*.safetensors",), loaded, share=1),
        Reader("trained model", "run", ("config.yaml", "model/*"), loaded, share=1),
    ]


def _array(folder: Path) -> str:
    arrays = [load_array(path) for path in sorted(folder.glob("*.npy"))]
    return "" if any(array is None for array in arrays) else digest(arrays)


def _outcomes(comparison: Path) -> list[object]:
    return [outcome_of(run) for run in (comparison / "runs").iterdir()]


def make_templates(inputs: Path, folder: Path) -> None:
    """What each reader reads, whole."""
    import pyarrow
    import pyarrow.parquet

    from fullbatch.cli import main

    made, work = {case.name: case for case in cases(inputs, folder / "made")}, folder / "made"
    sources = folder / "sources"
    (sources / "pictures").mkdir(parents=True)
    rows = []
    for number, path in enumerate(sorted((inputs / "pictures").glob("*.png"))[:6]):
        shutil.copy(path, sources / "pictures")
        (sources / "pictures" / f"{path.stem}.txt").write_text(f"picture {number}")
        rows.append((f"pictures/{path.name}", f"picture {number}"))
    lines = ["image,caption", *(",".join(row) for row in rows)]
    (sources / "table.csv").write_text("\n".join(lines) + "\n")
    raw = [(sources / name).read_bytes() for name, _ in rows]
    table = pyarrow.table({"image": raw, "caption": [caption for _, caption in rows]})
    pyarrow.parquet.write_table(table, sources / "table.parquet")
    shutil.copy(inputs / "shard.tar", sources)
    os.environ["FULLBATCH_CACHE"] = str(folder / "index")
    open_source(Source.parse(str(sources / "shard.tar")))
    os.environ["FULLBATCH_CACHE"] = str(folder / "cache")
    names = {"train": "run", "train, ordered plans": "planned", "finetune": "tuned", "compare": "compared"}
    for name, place in (names | {"search": "searched", "find": "pictures"}).items():
        if main(list(made[name].command)):
            raise RuntimeError(f"{name} failed")
        (result,) = work.iterdir()
        if place in ("run", "planned"):  # one checkpoint each, and of the second one in the middle
            for extra in checkpoint.checkpoints(result / "checkpoints")[1 if place == "planned" else 0 : -1]:
                shutil.rmtree(extra)
        if place == "planned":
            shutil.rmtree(checkpoint.checkpoints(result / "checkpoints")[-1])
        shutil.move(result, folder / place)
    shutil.copytree(inputs / "base" / "exported", folder / "exported")


# -- the campaign -----------------------------------------------------------------------------------------------------


class Hung(BaseException):
    pass


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hung


def one(number: int, seed: int, all_readers: list[Reader], templates: Path, scratch: Path) -> dict[str, Any]:
    draw = random.Random(f"{seed} {number}")
    reader = draw.choices(all_readers, [reader.share for reader in all_readers])[0]
    here = scratch / reader.place
    if not here.is_dir():
        shutil.copytree(templates / reader.place, here)
    files = sorted({path for pattern in reader.files for path in here.glob(pattern) if path.is_file()})
    path = draw.choice(files)
    before = intact(reader, templates) if reader.checked else None
    whole = path.read_bytes()
    kind, raw = mutated(whole, path.suffix, draw)
    path.write_bytes(raw)
    told = {"number": number, "reader": reader.name, "file": path.name, "mutation": kind}
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(LIMIT)
    try:
        value = reader.read(here)
        answer = "silently wrong" if reader.checked and value not in ("", before) else "read"
    except (ValueError, OSError) as error:
        answer = "refused" if _is_ours(error) else f"unclear: {type(error).__name__}: {str(error)[:200]}"
    except Hung:
        answer = "hung"
    except Exception:
        answer = f"traceback: {traceback.format_exc()[-900:]}"
    finally:
        signal.alarm(0)
        path.write_bytes(whole)
        if reader.share < 8:  # it may have written, too
            shutil.rmtree(here)
    return told | {"answer": answer}


@functools.cache
def intact(reader: Reader, templates: Path) -> Any:
    return reader.read(templates / reader.place)


def _is_ours(error: Exception) -> bool:
    """Raised by the library, whose sentences name the file or the field, and not by a parser below it; the system names
    the file by itself."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return "fullbatch" in Path(last).parts or getattr(error, "filename", None) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    work = options.folder.resolve()
    inputs, templates, told = work / "inputs", work / "templates", work / "mutations.jsonl"
    torch.set_num_threads(1)
    os.environ["FULLBATCH_CACHE"] = str(work / "cache")
    if not inputs.is_dir():
        in_child(lambda: make_inputs(inputs))
        in_child(lambda: make_templates(inputs, templates))
    done = len(told.read_text().splitlines()) if told.is_file() else 0
    while done < options.count:
        first, last = done, min(done + TOGETHER, options.count)

        def some(first: int = first, last: int = last) -> None:
            sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
            shutil.rmtree(work / "scratch", ignore_errors=True)
            encoder = fb.load(str(inputs / "model"), device="cpu")
            ours = readers(encoder, inputs / "pictures")
            for number in range(first, last):
                answer = one(number, options.seed, ours, templates, work / "scratch")
                with told.open("a") as file:
                    file.write(json.dumps(answer) + "\n")

        with suppress(RuntimeError):
            in_child(some)
        now = len(told.read_text().splitlines()) if told.is_file() else 0
        if now < last:  # the process died of it
            with told.open("a") as file:
                file.write(json.dumps({"number": now, "reader": "?", "answer": "the process died"}) + "\n")
            now += 1
        done = now
    counts = Counter((line["reader"], line["answer"].partition(":")[0]) for line in map(json.loads, told.open()))
    kinds = sorted({kind for _, kind in counts})
    print("| reader | " + " | ".join(kinds) + " |")
    for reader in dict.fromkeys(name for name, _ in counts):
        print(f"| {reader} | " + " | ".join(str(counts[reader, kind]) for kind in kinds) + " |")


if __name__ == "__main__":
    main()

"""The README.md of an exported model, as model hubs expect it: how to load it, where it comes from, what it is worth.
Names of runs, files and tasks are somebody else's text: none becomes markup, and no path of this machine shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fullbatch.config.messages import local_name, plain
from fullbatch.config.run import AXES
from fullbatch.finetuning.record import FILE, MEASURED, TUNED
from fullbatch.loading import Opened
from fullbatch.models.design import OpenClipDesign, PairDesign, ViewsDesign
from fullbatch.models.onnx_towers import PREPROCESS, SMALL_TEXT
from fullbatch.models.saved import Format
from fullbatch.models.tokenizers import Tokenizer
from fullbatch.models.two_towers import TwoTowers
from fullbatch.report import wording as say
from fullbatch.report.collect import Fields, RunData, fields_of, read_run, records_of

CARD = "README.md"
_MARK = "<!-- written by fullbatch export -->"
_NO_LICENSE = "**Not chosen yet.** Set `license` at the top of this file before you publish it."
_ZERO_SHOT = "zero-shot-image-classification"
_TASKS = {"retrieval": "image-text-retrieval", "knn": "image-classification", "linear": "image-classification"}
_LIBRARIES: dict[Format, str] = {"open_clip": "open_clip", "huggingface": "transformers", "onnx": "onnx"}


@dataclass(frozen=True)
class TaskValue:
    """What the exported weights reached on a task; None where it is not known."""

    task: str
    metric: str
    value: float
    chance: object = None
    size: object = None  # among how many


@dataclass(frozen=True)
class Origin:
    """The run that made the weights."""

    run: RunData
    step: int
    scores: tuple[TaskValue, ...]


def check_license(license: str | None) -> None:
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise ValueError(f"--license {license!r} must be written as hubs do: mit, apache-2.0, cc-by-4.0, other.")


# -- what is known of the weights --------------------------------------------------------------------------------------


def origin_of(path: Path, step: int, average: bool) -> Origin:
    """Of a run folder or one of its checkpoints.  Only numbers of these very weights count: of this step, and where the
    run kept an average, of it or of what it averages."""
    run = read_run(path if (path / "config.yaml").is_file() else path.absolute().parent.parent)
    kept = run.setting("training", "ema") is not None
    return Origin(run, step, tuple(_measured_at(run.path, step, average if kept else None)))


def _measured_at(folder: Path, step: int, average: bool | None) -> Iterable[TaskValue]:
    """The run's own numbers and those of `fullbatch evaluate`; of a task that was measured twice, the later.
    ``average`` is None where the run kept none."""
    own, measured = folder / "results.json", []
    for path in (own, *sorted(folder.glob("evaluation*.json"))):
        content = _read(path)
        # a run measures its average, where it keeps one
        of_average = content.get("average") if path != own or average is None else True
        if content.get("step") != step or of_average is not average:
            continue
        times = fields_of(content, "times")
        for result in records_of(content, "results"):
            task, main = str(result.get("task")), str(result.get("main"))
            value, at = result.get(main), times.get(task)
            if say.is_number(value):
                score = TaskValue(task, main, float(value), result.get("chance"), result.get("size"))
                measured.append((at if say.is_number(at) else path.stat().st_mtime, score))
    return {score.task: score for _, score in sorted(measured, key=lambda pair: pair[0])}.values()


def origin_of_tuned(path: Path) -> Origin | None:
    """Of what a fine-tuning kept; None for any other exported model, whose run is not known."""
    folder = path.absolute().parent
    if path.name != TUNED or not (folder / FILE).is_file() or not (folder / "config.yaml").is_file():
        return None
    run, epoch = read_run(folder), _read(path / MEASURED)
    chances, scores = fields_of(run.finetune, "chances"), []
    for name, value in fields_of(epoch, "values").items():
        task, _, metric = name.rpartition(" ")
        if say.is_number(value):
            scores.append(TaskValue(task, metric, float(value), chances.get(name)))
    return Origin(run, int(epoch.get("step") or 0), tuple(scores))


def _read(path: Path) -> Fields:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# -- the page ----------------------------------------------------------------------------------------------------------


def write_card(folder: Path, card: str) -> bool:
    """False where the user has written a README.md of their own, which stays."""
    path = folder / CARD
    if path.is_file() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return False
    path.write_text(card, encoding="utf-8")
    return True


def model_card(
    opened: Opened,
    format: Format,
    origin: Origin | None,
    license: str | None = None,
    repository: str | None = None,
    folder: Path | None = None,
) -> str:
    """``repository`` is where the folder will lie on a hub; without it, the card says FOLDER.  ``folder`` is where the
    export lies here."""
    run = local_name(opened.model.design.name).removesuffix(".json") if origin is None else origin.run.name
    name = _title(repository.rsplit("/", 1)[-1] if repository else run)
    model, scores = opened.model, () if origin is None else origin.scores
    sections = [
        f"# {name}".replace("_", r"\_"),
        _lead(model),
        "## Load it",
        *_loading(model, format, repository, folder),
        "## How it was trained",
        _training(opened, origin),
        "## Results",
        _results(scores),
        "## Licence",
        f"`{license}`" if license else _NO_LICENSE,
        _MARK,
    ]
    return f"---\n{_front_matter(name, model, format, scores, license)}---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(name: str, model: TwoTowers, format: Format, scores: Sequence[TaskValue], license: str | None) -> str:
    fields: dict[str, Any] = {} if license is None else {"license": license}
    fields["library_name"] = _LIBRARIES.get(format, "fullbatch")
    views = isinstance(model.design, ViewsDesign)
    fields["pipeline_tag"] = "image-feature-extraction" if views else _ZERO_SHOT
    kinds = {"huggingface": ["open_clip"], "onnx": ["onnxruntime"]}.get(format, [])
    fields["tags"] = ["fullbatch", "contrastive-learning", *([] if views else ["clip"]), *kinds]
    if scores:
        fields["metrics"] = sorted({"accuracy" if "accuracy" in score.metric else "recall" for score in scores})
        fields["model-index"] = [{"name": name, "results": [_indexed(score) for score in scores]}]
    text: str = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)
    choose = "# license: choose one before you publish this, such as mit, apache-2.0, cc-by-4.0 or other\n"
    return text if license is not None else choose + text


def _indexed(score: TaskValue) -> dict[str, Any]:
    """As a hub's leaderboards read it."""
    kind, _, source = score.task.partition(":")
    source = plain(local_name(source or kind), 120)
    dataset = re.sub(r"[^\w.-]+", "-", re.split(r"[?|]", source)[0]).strip("-.").lower() or "custom"
    return {
        "task": {"type": _TASKS.get(kind, _ZERO_SHOT), "name": kind.replace("_", "-")},
        "dataset": {"type": dataset, "name": source},
        "metrics": [
            {"type": score.metric, "value": round(score.value, 4), "name": say.metric_name(score.metric)},
        ],
    }


def _lead(model: TwoTowers) -> str:
    design, millions = model.design, sum(weight.numel() for weight in model.parameters()) / 1e6
    match design:
        case OpenClipDesign():
            what = f"A CLIP-style model, {_code(design.name.removesuffix('.json'))} in open_clip's terms"
        case PairDesign():
            what = f"A CLIP-style model of the image tower {_code(design.image_tower)} and the text tower "
            what += _code(design.text_tower)
        case ViewsDesign():
            what = f"An image encoder, {_code(design.tower)}, trained on two views of each image"
    reads = f", captions of {model.context_length} tokens" if model.context_length else ""
    sizes = f"images of {model.image_size} x {model.image_size} pixels{reads}, embeddings of width {model.width}"
    return f"{what}: {millions:.1f} M weights, {sizes}. Exported by fullbatch."


# -- how to load it ----------------------------------------------------------------------------------------------------

_TRANSFORMERS = """\
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

model, processor = CLIPModel.from_pretrained("{place}"), CLIPProcessor.from_pretrained("{place}")
texts = ["a photo of a cat", "a photo of a dog"]
inputs = processor(text=texts, images=Image.open("picture.jpg"), return_tensors="pt", padding=True, truncation=True)
probabilities = model(**inputs).logits_per_image.softmax(dim=-1)"""

_OPEN_CLIP = """\
import open_clip
import torch
from PIL import Image

model, _, preprocess = open_clip.create_model_and_transforms("{place}")
tokenizer = open_clip.get_tokenizer("{place}")
with torch.no_grad():
    image = model.eval().encode_image(preprocess(Image.open("picture.jpg")).unsqueeze(0), normalize=True)
    texts = model.encode_text(tokenizer(["a photo of a cat", "a photo of a dog"]), normalize=True)
similarities = image @ texts.T"""

_FULLBATCH = """\
import fullbatch as fb
{download}
model = fb.load({place})
similarities = model.similarity(model.encode_image("picture.jpg"), model.encode_text(["a cat", "a dog"]))"""

_FULLBATCH_VIEWS = """\
import fullbatch as fb
{download}
embedding = fb.load({place}).encode_image("picture.jpg")"""

_DOWNLOADED = "from huggingface_hub import snapshot_download\n"

_ONNX_IMAGE = """\
import json
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

folder = Path({place})
wanted = json.loads((folder / "preprocess.json").read_text())
size = wanted["image"]["size"]
picture = Image.open("picture.jpg").convert("RGBA")
picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
square = ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
pixels = np.asarray(square).transpose(2, 0, 1)[None]  # uint8; the file itself normalises
image = onnxruntime.InferenceSession(folder / "image.onnx").run(None, {{"pixels": pixels}})[0]"""

_ONNX_TOKENS = """

from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokens = np.array([row.ids for row in tokenizer.encode_batch(["a photo of a cat", "a photo of a dog"])])"""

_ONNX_OPEN_CLIP_TOKENS = """

from open_clip.tokenizer import {kind}

tokenizer = {kind}({arguments})
tokens = tokenizer(["a photo of a cat", "a photo of a dog"]).numpy()"""

_ONNX_TEXT = """
texts = onnxruntime.InferenceSession(folder / "text.onnx").run(None, {"tokens": tokens})[0]
similarities = image @ texts.T"""


def _onnx_text(model: TwoTowers, folder: Path | None) -> str:
    """By tokenizer.json, unless the export says that it cannot do what the model's tokenizer does."""
    text = {} if folder is None else fields_of(_read(folder / PREPROCESS), "text")
    if not isinstance(model.tokenize, Tokenizer):
        return ""
    if text.get("tokenizer_file", True) is not None:
        return _ONNX_TOKENS + _ONNX_TEXT
    own = model.tokenize.hugging_face is None
    options = {"context_length": model.context_length, **model.tokenize.options}
    arguments = ["str(folder)"] * (not own) + [f"{name}={value!r}" for name, value in options.items()]
    kind = "SimpleTokenizer" if own else "HFTokenizer"
    return _ONNX_OPEN_CLIP_TOKENS.format(kind=kind, arguments=", ".join(arguments)) + _ONNX_TEXT


def _loading(model: TwoTowers, format: Format, repository: str | None, folder: Path | None) -> list[str]:
    """A block of code for each program that reads the folder."""
    by_open_clip = f"hf-hub:{repository}" if repository else "local-dir:FOLDER"
    here = f'snapshot_download("{repository}")' if repository else '"FOLDER"'
    download = _DOWNLOADED if repository else ""
    views = isinstance(model.design, ViewsDesign)
    blocks = []
    if format == "onnx":
        code = download + _ONNX_IMAGE.format(place=here) + _onnx_text(model, folder)
        blocks.append(("onnxruntime", code))
    if format == "huggingface":
        blocks.append(("transformers", _TRANSFORMERS.format(place=repository or "FOLDER")))
    if format in ("huggingface", "open_clip"):
        blocks.append(("open_clip", _OPEN_CLIP.format(place=by_open_clip)))
    if format != "onnx":
        code = _FULLBATCH_VIEWS if views else _FULLBATCH
        blocks.append(("fullbatch", code.format(place=here, download=download)))
    texts = [f"With {library}:\n\n```python\n{code}\n```" for library, code in blocks]
    if format == "onnx":
        small = f"`{SMALL_TEXT}`, if it is there, is the text tower in 8 bits; the same file has its measured cosines."
        texts.append(f"`{PREPROCESS}` and the metadata of each file say what they take as input. {small}")
    return texts


# -- where it comes from, what it is worth -----------------------------------------------------------------------------


def _training(opened: Opened, origin: Origin | None) -> str:
    if origin is None:
        return "Not known: it was exported from weights without their run."
    run = origin.run
    optimizer, rate, decay = (
        say.setting_text(run.setting("optimizer", name)) for name in ("optimizer", "lr", "weight_decay")
    )
    schedule = say.setting_text(run.setting("schedule", "schedule"))
    frozen = [tower for tower in ("image", "text") if run.setting("model", f"lock_{tower}")]
    axes = {axis: run.setting("objective", axis) for axis in AXES[1:]}
    seen = [(seconds, pairs) for step, seconds, pairs in run.clock if step <= origin.step]
    share = run.setting("data", "data_share")
    versions = fields_of(run.environment, "versions")
    rows: list[tuple[str, object]] = [
        ("data", run.setting("data", "data")),
        ("share of the data", say.percent(share) if share not in (None, 1, 1.0) else None),
        ("started from", _start(run)),
        ("method", run.method),
        ("but for its", {axis: choice for axis, choice in axes.items() if choice is not None} or None),
        ("its settings", run.setting("objective", "settings") or None),
        ("LoRA, rank", run.setting("model", "lora_rank")),
        ("locked towers", frozen or None),
        ("batch size", f"{run.batch_size:,}"),
        ("steps", f"{origin.step:,}"),
        ("pairs seen", f"{seen[-1][1]:,}" if seen else None),
        ("training time", say.duration(seen[-1][0]) if seen and seen[-1][0] else None),
        ("optimizer", f"{optimizer}, lr {rate}, weight decay {decay}, {schedule} schedule"),
        ("precision", run.setting("training", "precision")),
        ("temperature at the end", f"{opened.temperature:.4g}"),
        ("bias at the end", None if opened.bias is None else f"{opened.bias:.4g}"),
        ("seed", run.setting("training", "seed")),
        ("versions", {name: versions[name] for name in ("fullbatch", "torch") if name in versions} or None),
    ]  # fmt: skip
    cells = [(name, _cell(value)) for name, value in rows if value is not None]
    return _table(("setting", "value"), cells)


def _start(run: RunData) -> object:
    """The weights before the first step: of the whole model, else of either tower."""
    whole = run.finetune.get("model") or run.setting("model", "pretrained")
    towers = [(tower, run.setting("model", f"{tower}_weights")) for tower in ("image", "text")]
    parts = [
        f"{tower} tower: {'its own weights' if given is True else local_name(str(given))}"
        for tower, given in towers
        if given
    ]
    return whole or parts or "random weights"


def _results(scores: Sequence[TaskValue]) -> str:
    if not scores:
        return "These weights were not measured."
    rows = [
        (
            _code(score.task),
            _title(say.metric_name(score.metric)),
            say.value_text(score.value, score.metric),
            say.value_text(score.chance, score.metric),
            say.times(say.ratio(score.value, score.chance)),
            say.count_text(score.size),
        )
        for score in scores
    ]
    head = ("task", "metric", "value", "chance", f"{say.TIMES} chance", "among")
    end = "Chance is what guessing gives. Nothing else was measured: not on other data, and not for bias or safety."
    return f"{_table(head, rows)}\n\n{end}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_code, value)) or say.NOTHING
    return _code(say.setting_text(value))


def _code(text: object) -> str:
    """In a code span nothing is markup; a | would end a cell of a table."""
    inner = plain(local_name(str(text)), 160).replace("`", "'").replace("|", "\\|")
    return f"`{inner}`" if inner else say.NOTHING


def _title(name: str) -> str:
    """Words and numbers: whatever else a folder may be called, it is no markup."""
    return re.sub(r"[^\w.+@\u2192-]+", " ", plain(name, 80)).strip(" .+-") or "model"

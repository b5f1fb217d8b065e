"""Two towers as ONNX files, for programs without torch: pixels or tokens in, unit embeddings out, any number at a time.
Every file is run by onnxruntime and compared with torch before it is kept."""

# B: rows   C: channels   H, W: pixels of a side   L: tokens   D: width of the embedding

from __future__ import annotations

import copy
import json
import logging
import re
import string
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullbatch.config.extras import require_extra
from fullbatch.config.messages import local_name
from fullbatch.models.clip_model import cleaning_steps, write_tokenizer
from fullbatch.models.timm_towers import TwoViews
from fullbatch.models.tokenizers import Tokenizer
from fullbatch.models.two_towers import TwoTowers
from fullbatch.models.weights import first_line

IMAGE, TEXT, SMALL_TEXT = "image.onnx", "text.onnx", "text.int8.onnx"
PREPROCESS = "preprocess.json"
_BESIDE = ".data"  # weights of a file that would be larger than ONNX allows
FILES = (*(name + end for name in (IMAGE, TEXT, SMALL_TEXT) for end in ("", _BESIDE)), PREPROCESS)
PIXELS, TOKENS, EMBEDDINGS, FEATURES = "pixels", "tokens", "embeddings", "features"  # inputs and outputs
TOLERANCE = 1e-4  # the most that a number of a unit embedding may differ from torch's
_MOST_BYTES = 1 << 30  # of weights inside a file; protobuf ends at 2 GiB
_TRACED, _TRIED = 2, (1, 5)  # rows with which a tower is recorded, and with which it is compared

_THINGS = (
    "cat", "red apple", "wooden bridge", "bus in the rain", "child's drawing", "map of Europe", "bowl of soup", "page",
)  # fmt: skip
_WORDINGS = (
    "a photo of a {}", "{}", "A {} seen from above, at night!", "the words \u201c{}\u201d on a sign", "no {} at all",
    "two people beside a {}, laughing", "a small {} & a large one", "an old postcard of a {}",
)  # fmt: skip
CAPTIONS = tuple(wording.format(thing) for wording in _WORDINGS for thing in _THINGS)


def write_onnx(model: TwoTowers, folder: Path, temperature: float, bias: float | None) -> None:
    """``image.onnx`` and ``text.onnx``, with what they want as input in their metadata and in ``preprocess.json``, and
    the tokenizer's files.  A model without a text tower has the first alone."""
    plain = _plain(model)
    about = _about(model, temperature, bias)
    folder.mkdir(parents=True, exist_ok=True)
    about["image"]["largest_difference"] = _write_tower(_ImageTower(plain), _noise(model), folder / IMAGE, about)
    if isinstance(model.tokenize, Tokenizer):
        about["text"]["tokenizer_file"] = _write_tokenizer(model, folder)
        rows_BL = model.tokenize([" ".join(CAPTIONS), "", *CAPTIONS[::25]])
        about["text"]["largest_difference"] = _write_tower(_TextTower(plain), rows_BL, folder / TEXT, about)
    _write_json(folder / PREPROCESS, about)


def require_onnx(wish: str) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime", "transformers"):
        require_extra(package, "onnx", wish)


def _about(model: TwoTowers, temperature: float, bias: float | None) -> dict[str, Any]:
    """What a program that runs the files must know."""
    mean, std = model.design.mean, model.design.std
    assert mean is not None and std is not None
    about: dict[str, Any] = {
        "model": local_name(model.design.name),
        "width": model.width,
        "temperature": temperature,
        "bias": bias,
        "image": {
            "file": IMAGE,
            "input": PIXELS,
            "type": "uint8",
            "layout": "BCHW, RGB",
            "transparency": "white",  # what shows through
            "size": model.image_size,
            "resize": "shortest side to size",
            "interpolation": "bicubic",
            "crop": "center",
            "mean": [round(value, 8) for value in mean],
            "std": [round(value, 8) for value in std],
            "normalization": "inside the file",
        },
    }
    if isinstance(model.tokenize, Tokenizer):
        about["text"] = {
            "file": TEXT,
            "input": TOKENS,
            "type": "int64",
            "layout": "BL",
            "context_length": model.context_length,
            "padding": model.tokenize.padding,
            "tokenizer": local_name(model.tokenize.name),
        }
    return about


# -- towers ------------------------------------------------------------------------------------------------------------


class _ImageTower(nn.Module):
    def __init__(self, model: TwoTowers) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, pixels_BCHW: Tensor) -> tuple[Tensor, ...]:
        outputs = [self.model.encode_image(pixels_BCHW)]
        if isinstance(self.model, TwoViews):
            outputs.append(self.model.features(pixels_BCHW))
        return tuple(outputs)


class _TextTower(nn.Module):
    """Captions as they are padded: how many tokens are real is for the host to know, and a file has no host."""

    def __init__(self, model: TwoTowers) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, tokens_BL: Tensor) -> tuple[Tensor, ...]:
        return (self.model.encode_text(tokens_BL),)


def _plain(model: TwoTowers) -> TwoTowers:
    """A copy in full precision, LoRA's changes merged, that recomputes nothing."""
    plain = copy.deepcopy(model, {id(model.tokenize): model.tokenize}).cpu().float().eval().requires_grad_(False)
    module: Any
    for module in plain.modules():
        if hasattr(module, "lora_A"):
            module.merge()
        if hasattr(module, "grad_checkpointing"):
            module.grad_checkpointing = False
    return plain


def _write_tower(tower: _ImageTower | _TextTower, rows: Tensor, path: Path, about: dict[str, Any]) -> float:
    """The file, with its part of ``about`` as metadata; the largest difference to torch that it makes."""
    part = about["image" if isinstance(tower, _ImageTower) else "text"]
    with torch.no_grad():
        wanted = [tower(rows[:count]) for count in _TRIED]
        outputs = [EMBEDDINGS, FEATURES][: len(wanted[0])]
        with _as_one_sentence(f"{path.name} cannot be made of {about['model']!r}"), _quiet():
            program: Any = torch.onnx.export(
                tower.eval(),
                (rows[:_TRACED],),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=[part["input"]],
                output_names=outputs,
                verbose=False,
            )
            _forget_places(program.model)
            shared = {name: about[name] for name in ("model", "width", "temperature", "bias")}
            program.model.metadata_props.update({key: _text(value) for key, value in (shared | part).items()})
            size = sum(weight.const_value.nbytes for weight in program.model.graph.initializers.values())
            program.save(str(path), external_data=size > _MOST_BYTES)
    run = Session(path)
    differences = [
        float(np.abs(mine - theirs.numpy()).max() / max(1.0, float(theirs.abs().max())))
        for count, rows_of in zip(_TRIED, wanted, strict=True)
        for mine, theirs in zip(run(rows[:count].numpy()), rows_of, strict=True)
    ]
    largest = max(differences)
    if not largest <= TOLERANCE:  # nan is no agreement either
        raise ValueError(
            f"{path.name}: onnxruntime's embeddings differ from torch's by up to {largest:.1e}, more than "
            f"{TOLERANCE:.0e}, so that nothing was written; export with --format safetensors."
        )
    return largest


def _forget_places(program: Any) -> None:
    """The exporter notes for every node by which lines of which files on this machine it came about."""
    for part in (program.graph, *program.functions.values()):
        part.metadata_props.clear()
        for node in part.all_nodes():
            node.metadata_props.clear()


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _noise(model: TwoTowers) -> Tensor:
    """Pictures of blots, large and small."""
    draw = torch.Generator().manual_seed(0)
    sides = [max(1, model.image_size // 2**power) for power in range(max(_TRIED))]
    blots = [torch.rand(1, 3, side, side, generator=draw) for side in sides]
    shape = (model.image_size, model.image_size)
    return torch.cat([(255.0 * F.interpolate(blot, shape)).to(torch.uint8) for blot in blots])


class Session:
    """An ONNX file with one input, ready to run on the CPU."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        with _as_one_sentence(f"onnxruntime cannot run {path.name}"):
            self._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def __call__(self, rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        return list(self._session.run(None, {self._input: rows}))


@contextmanager
def _as_one_sentence(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # exporters and runtimes raise errors of many families
        raise ValueError(f"{what} ({first_line(error)}); export it with --format safetensors.") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of every operator it knows in two versions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# -- captions to tokens ------------------------------------------------------------------------------------------------


def _write_tokenizer(model: TwoTowers, folder: Path) -> str | None:
    """``tokenizer.json``, which by itself gives rows of the right length: ``Tokenizer.from_file(FILE)`` of the package
    tokenizers.  None where a tokenizer does what that file cannot say; the files that it has of its own stay."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import normalizers

    assert isinstance(model.tokenize, Tokenizer)
    write_tokenizer(model, folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    fast: Any = FastTokenizer.from_file(str(file))
    own = [] if fast.normalizer is None else [fast.normalizer]
    fast.normalizer = normalizers.Sequence([*cleaning_steps(), *_further_steps(model.tokenize), *own])
    padding = model.tokenize.padding
    fast.enable_truncation(model.context_length)
    fast.enable_padding(length=model.context_length, pad_id=padding, pad_token=fast.id_to_token(padding) or "")
    if [row.ids for row in fast.encode_batch(list(CAPTIONS))] != model.tokenize(CAPTIONS).tolist():
        return None
    fast.save(str(file))
    return file.name


def _further_steps(tokenize: Tokenizer) -> list[Any]:
    """After the cleaning that all captions get; which of open_clip's three ways it is shows in what it does."""
    from tokenizers import Regex, normalizers

    cleaned = tokenize.encoder.clean_fn("A_b!")
    bare = [normalizers.Replace("_", " "), normalizers.Replace(Regex(rf"[{re.escape(string.punctuation)}]"), "")]
    single = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    return [
        *(bare if "_" not in cleaned else ()),
        *([normalizers.Lowercase()] if cleaned.islower() else ()),
        *single,
    ]


# -- the text tower in int8 --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """How near the embeddings of the int8 file are to those of the float one."""

    file: str
    mean_cosine: float
    lowest_cosine: float
    captions: int
    bytes: int
    float_bytes: int


def check_quantizable(model: TwoTowers) -> None:
    require_onnx("--quantize")
    if not isinstance(model.tokenize, Tokenizer):
        raise ValueError(f"{model.design.name} has no text tower for --quantize to make smaller; leave it out.")


def quantize_text(model: TwoTowers, folder: Path) -> Quantized:
    """Beside ``text.onnx``, the same tower with its large matrices in 8 bits; what that costs is measured on some
    captions and written into ``preprocess.json``."""
    check_quantizable(model)
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole, small = folder / TEXT, folder / SMALL_TEXT
    with _as_one_sentence(f"{TEXT} cannot be quantized"), _quiet():
        apart = (folder / (TEXT + _BESIDE)).is_file()
        # of weights 7 bits: with 8, sums of two products overflow on processors without VNNI
        options = {"per_channel": True, "reduce_range": True, "use_external_data_format": apart}
        quantize_dynamic(whole, small, weight_type=QuantType.QInt8, **options)
    assert isinstance(model.tokenize, Tokenizer)
    tokens_BL = model.tokenize(CAPTIONS).numpy()
    float_BD, int8_BD = Session(whole)(tokens_BL)[0], Session(small)(tokens_BL)[0]
    cosines_B = (float_BD * int8_BD).sum(1)
    sizes = [sum(path.stat().st_size for path in folder.glob(f"{name}*")) for name in (SMALL_TEXT, TEXT)]
    quantized = Quantized(small.name, float(cosines_B.mean()), float(cosines_B.min()), len(cosines_B), *sizes)
    about = json.loads((folder / PREPROCESS).read_text(encoding="utf-8"))
    about["text"]["int8"] = asdict(quantized)
    _write_json(folder / PREPROCESS, about)
    return quantized


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

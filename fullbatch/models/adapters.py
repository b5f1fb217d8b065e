"""LoRA through peft: small learned changes of the towers' linear maps, beside weights that stay (Hu et al. 2021).  A
tower with adapters is a locked tower of which every linear map in its layers (of attention and of the MLP) is W + scale
* up @ down, where only ``up`` and ``down`` learn.  ``plain_state`` adds them up: what is exported, evaluated or loaded
from a run is an ordinary model."""

# B: samples   L: tokens   W: width

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.config.extras import require_extra
from fullbatch.config.model import Model
from fullbatch.models.attention import Packing, attend, is_plain

_LISTS = (nn.ModuleList, nn.Sequential)
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"  # in peft's names
_PACKED = "packed_qkv"


class LinearAttention(nn.Module):
    """Self-attention with the weights of an nn.MultiheadAttention, its two projections as linear layers of their own.
    peft has an adapter for nn.MultiheadAttention, but (as of 0.21) it adds its change to the weights before each call
    and takes it off again after, so that rounding moves the base weights, and it adds out_proj's change twice."""

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = source.num_heads
        self.packed_qkv = _linear(source.in_proj_weight, source.in_proj_bias)
        self.out_proj = _linear(source.out_proj.weight, source.out_proj.bias)

    def forward(
        self,
        query_BLW: Tensor,
        key_BLW: Tensor,
        value_BLW: Tensor,
        need_weights: bool,
        attn_mask: Tensor | Packing | None = None,
    ) -> tuple[Tensor, None]:
        """As open_clip's layers call nn.MultiheadAttention: queries, keys and values of the same tokens."""
        assert key_BLW is query_BLW and value_BLW is query_BLW and not need_weights
        out_BLW: Tensor = self.out_proj(attend(self.packed_qkv(query_BLW), self.heads, attn_mask))
        return out_BLW, None


def add_adapters(backbone: nn.Module, config: Model, name: str) -> None:
    """Give the layers of the towers that ``config`` names their adapters; the towers are locked already."""
    assert config.lora_rank is not None
    require_extra("peft", "lora", f"--lora-rank {config.lora_rank}")
    from peft import LoraConfig, inject_adapter_in_model

    targets: list[str] = []
    for tower, parts in (("image", ("visual",)), ("text", ("text", "transformer"))):
        if config.lora_towers in ("both", tower):
            maps = [target for part in parts if hasattr(backbone, part) for target in _targets(backbone, part, name)]
            if not maps:
                other = "text" if tower == "image" else "image"
                raise ValueError(
                    f"The {tower} tower of the model {name!r} has no layers with linear maps, which is where LoRA's "
                    f"adapters go; use --lora-towers {other}, or train without --lora-rank."
                )
            targets += maps
    learning = [weight for weight in backbone.parameters() if weight.requires_grad]
    inject_adapter_in_model(
        LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_scale * config.lora_rank,
            lora_dropout=config.lora_dropout,
            target_modules="|".join(map(re.escape, targets)),
        ),
        backbone,
    )
    for weight in learning:  # peft froze them: a new projection, or a tower without adapters
        weight.requires_grad_(True)


def plain_state(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The state of the same model without adapters, their changes added to its weights; of a plain one, its own."""
    plain: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.endswith((_DOWN, _UP)):
            continue
        layer, base, kind = key.partition(_BASE)
        if base and kind == "weight":
            value = value + (scale * (state[layer + _UP] @ state[layer + _DOWN])).to(value.dtype)
        if layer.endswith(f".{_PACKED}"):
            layer = layer.removesuffix(_PACKED) + "in_proj"
            plain[f"{layer}_{kind}"] = value
        else:
            plain[f"{layer}.{kind}" if base else key] = value
    return plain


def _targets(backbone: nn.Module, part: str, name: str) -> Iterator[str]:
    """The linear maps in a tower's layers: below the members of its lists of modules.  Heads and projections stay as
    they are, since their owners may look at their type or use their weights directly."""
    for where, module in list(backbone.get_submodule(part).named_modules(prefix=part)):
        path = where.split(".")
        above = [backbone.get_submodule(".".join(path[:length])) for length in range(len(path) - 1)]
        if not any(isinstance(module, _LISTS) for module in above):  # strictly below a member of a list
            continue
        if isinstance(module, nn.MultiheadAttention):
            _replace_attention(backbone, where, name)
            yield from (f"{where}.{_PACKED}", f"{where}.out_proj")
        elif isinstance(getattr(module, "in_proj_weight", None), nn.Parameter):
            raise ValueError(
                f"The attention {where} ({type(module).__name__}) of the model {name!r} cannot have LoRA's adapters; "
                "train it without --lora-rank."
            )
        elif type(module) is nn.Linear:
            yield where


def _replace_attention(backbone: nn.Module, where: str, name: str) -> None:
    owner, _, own = where.rpartition(".")
    attention: Any = backbone.get_submodule(where)
    if not is_plain(attention):
        raise ValueError(
            f"The attention {where} of the model {name!r} is not plain self-attention, so that it cannot have LoRA's "
            "adapters; train it without --lora-rank."
        )
    setattr(backbone.get_submodule(owner), own, LinearAttention(attention))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with these very weights; nothing is drawn."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=torch.device("meta"))
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer

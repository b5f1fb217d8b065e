"""Self-attention of open_clip's layers, with the weights of nn.MultiheadAttention but without the copies that it makes;
also over captions that lie in one row, one after the other and without their padding."""

# B: samples   L: tokens of a sample   T: tokens of all samples   W: width   H: heads   K: width of a head

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _varlen_attention() -> Callable[..., Any] | None:
    """Causal attention over sequences of different lengths, where torch has it (from 2.10 on)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    flagged = "is_causal" in inspect.signature(varlen_attn).parameters  # in 2.10; later a window says it
    causal: dict[str, Any] = {"is_causal": True} if flagged else {"window_size": (-1, 0)}
    return partial(varlen_attn, **causal)


_VARLEN = _varlen_attention()


class Packing(NamedTuple):
    """Where captions lie that follow each other in one row of T tokens.  A token attends to those before it in its own
    caption.  It takes the place of an attention mask on its way through open_clip's layers."""

    starts: Tensor  # (B + 1,) where each begins, and the last ends
    padded_T: Tensor  # each token's place if all captions were padded to the longest
    longest: int

    def to(self, dtype: torch.dtype) -> Packing:
        """As a mask is cast on its way."""
        return self


class SelfAttention(nn.MultiheadAttention):
    """A plain nn.MultiheadAttention becomes one by ``of``; its weights and their names stay."""

    causal: bool

    @classmethod
    def of(cls, plain: nn.MultiheadAttention, causal: bool) -> None:
        """``causal``: whether its layer's mask hides what comes after a token, and nothing else."""
        plain.__class__ = cls
        plain.causal = causal  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        query_BLW: Tensor,
        key_BLW: Tensor,
        value_BLW: Tensor,
        need_weights: bool = False,
        attn_mask: Tensor | Packing | None = None,
    ) -> tuple[Tensor, None]:
        """As open_clip's layers call it: queries, keys and values of the same tokens."""
        assert key_BLW is query_BLW and value_BLW is query_BLW and not need_weights
        packed_BLX = F.linear(query_BLW, self.in_proj_weight, self.in_proj_bias)
        mask = attn_mask if isinstance(attn_mask, Packing) or not self.causal else None
        out_BLW: Tensor = self.out_proj(attend(packed_BLX, self.num_heads, mask, self.causal))
        return out_BLW, None


def is_plain(attention: nn.Module) -> bool:
    """Whether it is self-attention and nothing more."""
    if type(attention) is not nn.MultiheadAttention:
        return False
    same = attention._qkv_same_embed_dim and attention.batch_first and not attention.dropout
    return same and attention.bias_k is None and not attention.add_zero_attn


def attend(packed_BLX: Tensor, heads: int, mask: Tensor | Packing | None, causal: bool = False) -> Tensor:
    """Attention from queries, keys and values that lie side by side, X = 3 W; its output is (B, L, W)."""
    size, length, _ = packed_BLX.shape
    packed_BL3HK = packed_BLX.view(size, length, 3, heads, -1)
    if isinstance(mask, Packing):
        return _attend_packed(packed_BL3HK[0], mask).flatten(1).unsqueeze(0)
    q_BHLK, k_BHLK, v_BHLK = packed_BL3HK.permute(2, 0, 3, 1, 4).unbind(0)
    if mask is not None:
        mask = mask.to(q_BHLK.dtype)
        if mask.ndim == 3:  # one a sample and head, in one row
            mask = mask.view(size, heads, length, length)
    mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, mask, is_causal=causal)
    return mixed_BHLK.transpose(1, 2).flatten(2)


def _attend_packed(packed_T3HK: Tensor, packing: Packing) -> Tensor:
    starts, longest = packing.starts, packing.longest
    if _VARLEN is not None and packed_T3HK.is_cuda and packed_T3HK.dtype in (torch.float16, torch.bfloat16):
        mixed_THK: Tensor = _VARLEN(*packed_T3HK.unbind(1), starts, starts, longest, longest)
        return mixed_THK
    rows, shape = len(starts) - 1, packed_T3HK.shape[1:]
    padded = packed_T3HK.new_zeros(rows * longest, *shape).index_copy(0, packing.padded_T, packed_T3HK)
    q_BHLK, k_BHLK, v_BHLK = padded.view(rows, longest, *shape).permute(2, 0, 3, 1, 4).unbind(0)
    mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
    return mixed_BHLK.transpose(1, 2).flatten(0, 1).index_select(0, packing.padded_T)

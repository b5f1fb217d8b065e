"""Retrieval among pairs: for each image the rank of its caption among all captions, and the other way round."""

# N: pairs   C: anchors at a time   D: width

from __future__ import annotations

import torch
from torch import Tensor


def ranks(anchors_ND: Tensor, gallery_ND: Tensor, groups_N: Tensor, chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """How many gallery rows of other groups are nearer than the best row of the anchor's own group, and as near.

    Rows of one group say the same thing (equal captions).
    """
    ahead, level = [], []
    for rows in range(0, len(anchors_ND), chunk):
        sim_CN = anchors_ND[rows : rows + chunk] @ gallery_ND.T
        own_CN = groups_N[rows : rows + chunk, None] == groups_N[None, :]
        best_C1 = sim_CN.masked_fill(~own_CN, -torch.inf).amax(dim=1, keepdim=True)
        others_CN = sim_CN.masked_fill(own_CN, -torch.inf)
        ahead.append((others_CN > best_C1).sum(dim=1))
        level.append((others_CN == best_C1).sum(dim=1))
    return torch.cat(ahead), torch.cat(level)


def hit_share(ahead_N: Tensor, level_N: Tensor, k: int) -> Tensor:
    """How likely the right row is among the first k when rows that are as near come in random order."""
    return ((k - ahead_N).double() / (level_N + 1)).clamp(0.0, 1.0)


def recalls(image_ND: Tensor, text_ND: Tensor, groups_N: Tensor) -> dict[str, float]:
    """R@1, 5, 10 and the median rank.  text_to_image is "image retrieval", image_to_text "text retrieval"."""
    results = {}
    for name, anchors, gallery in (("image_to_text", image_ND, text_ND), ("text_to_image", text_ND, image_ND)):
        ahead_N, level_N = ranks(anchors, gallery, groups_N)
        for k in (1, 5, 10):
            results[f"{name}_r{k}"] = hit_share(ahead_N, level_N, k).mean().item()
        results[f"{name}_median_rank"] = (ahead_N + 0.5 * level_N).median().item() + 1.0
    results["mean_r1"] = 0.5 * (results["image_to_text_r1"] + results["text_to_image_r1"])
    return results

"""Retrieval among pairs: for each image the rank of its caption among all captions, and the other way round."""

# N: pairs   C: anchors at a time   D: width

from __future__ import annotations

import torch
from torch import Tensor


def ranks(anchors_ND: Tensor, gallery_ND: Tensor, groups_N: Tensor, chunk: int = 1024) -> Tensor:
    """How many gallery rows of other groups beat the best row of the anchor's own group; 0 is a hit.

    Rows of one group say the same thing (equal captions); a tie counts half, as it would by chance.
    """
    found = []
    for rows in range(0, len(anchors_ND), chunk):
        sim_CN = anchors_ND[rows : rows + chunk] @ gallery_ND.T
        own_CN = groups_N[rows : rows + chunk, None] == groups_N[None, :]
        best_C1 = sim_CN.masked_fill(~own_CN, -torch.inf).amax(dim=1, keepdim=True)
        others_CN = sim_CN.masked_fill(own_CN, -torch.inf)
        found.append((others_CN > best_C1).sum(dim=1) + 0.5 * (others_CN == best_C1).sum(dim=1))
    return torch.cat(found)


def recalls(image_ND: Tensor, text_ND: Tensor, groups_N: Tensor) -> dict[str, float]:
    """R@1, 5, 10 and the median rank.  text_to_image is "image retrieval", image_to_text "text retrieval"."""
    results = {}
    for name, anchors, gallery in (("image_to_text", image_ND, text_ND), ("text_to_image", text_ND, image_ND)):
        ranks_N = ranks(anchors, gallery, groups_N)
        for k in (1, 5, 10):
            results[f"{name}_r{k}"] = (ranks_N < k).double().mean().item()
        results[f"{name}_median_rank"] = ranks_N.median().item() + 1.0
    results["mean_r1"] = 0.5 * (results["image_to_text_r1"] + results["text_to_image_r1"])
    return results

"""How far are the batches of `--shuffle blocks` from uniform ones?  By what they show of their samples' normalizers.

    python benchmarks/icons/unpack.py icons.tar BY-SET --captions name --by-set     # neighbours are of one set
    python benchmarks/uniformity.py RUN --data 'BY-SET/train-{00000..00019}.tar'

RUN, any trained run, embeds the data once.  Batches are then drawn by each order, and the log g that they show of their
samples is compared with the exact one over the data set: mean squared error and bias, both directions.  Each order has
as many batches, spread over an epoch.
"""

# B: rows of a batch   A: anchors, the rows of all batches of an order   n: samples of the data set   D: width

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fullbatch as fb
from fullbatch.assembly import changed, make_embedder, pick_device
from fullbatch.data.loader import open_pool
from fullbatch.data.order import Blocks, Order
from fullbatch.evaluation.embed import Tables
from fullbatch.loading import load_trained


def embedded(run: Path, data: str) -> tuple[Tables, float]:
    """All samples, and the temperature that the run ended with."""
    trained = load_trained(run)
    config = changed(trained.config, data=(data,), device="auto", precision="fp32")
    place, (pool, _) = pick_device(config), open_pool(config.data)
    model = trained.model.to(place)
    embedder = make_embedder(config, model, model, place)
    tables = embedder.tables(embedder.uncropped(pool, torch.device("cpu")))
    if len(tables.ids_n) < len(pool):
        raise SystemExit(f"{len(pool) - len(tables.ids_n)} samples of {data} could not be read; every one is needed.")
    return tables, trained.temperature


def drawn(order: Order, batch: int, count: int) -> list[Tensor]:
    """So many batches, spread over an epoch."""
    firsts = np.linspace(0, order.epoch_size - batch, count).astype(np.int64) // batch * batch
    return [torch.from_numpy(order.ids(0, np.arange(first, first + batch))) for first in firsts]


def logs(tables: Tables, tau: float, rows: Tensor, anchors: Tensor | None = None) -> Tensor:
    """log g of these anchors among these rows, both directions."""
    image, text = tables.image_nD[rows], tables.text_nD[rows]
    return torch.stack(fb.exact_log_normalizers(image, text, tau, anchors=anchors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", required=True, help="a source whose neighbours are alike")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256], help="their sizes")
    parser.add_argument("--anchors", type=int, default=12_800, help="of each order")
    parser.add_argument("--block", type=int, default=256, help="neighbours that stay together")
    parser.add_argument("--windows", nargs="+", type=int, default=[4, 16, 64], help="blocks that are mixed")
    options = parser.parse_args()

    tables, tau = embedded(options.run, options.data)
    count = len(tables.ids_n)
    orders = {"full": Order((count,), (1.0,), 0)}
    for window in options.windows:
        blocks = Blocks(options.block, window)
        orders[f"{options.block * window:,} mixed"] = Order((count,), (1.0,), 0, blocks)
    print(f"{count:,} samples, τ {tau:.4g}, blocks of {options.block}; squared error of log g, and bias")
    print("| order | " + " | ".join(f"B {size}" for size in options.batches) + " |")
    print("|---" * (1 + len(options.batches)) + "|")
    for name, order in orders.items():
        cells = []
        for size in options.batches:
            batches = drawn(order, size, options.anchors // size)
            exact = logs(tables, tau, torch.arange(count), torch.cat(batches))
            wrong = torch.cat([logs(tables, tau, rows) for rows in batches], dim=1) - exact
            cells.append(f"{wrong.square().mean():.3f}, {wrong.mean():+.3f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Ask a trained model for pictures: captions in, the nearest emoji of a style it was not trained on out, as one PNG.

    fullbatch train --name demo
    python examples/search_emoji.py runs/demo --output emoji.png "red apple" "birthday cake" "umbrella with rain drops"

Without captions, a dozen names from the data set.  A green frame marks the picture that bears the name.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import fullbatch as fb
from fullbatch.config.data import Source
from fullbatch.data.sources import open_source

SHOWN, CELL, TEXT = 6, 72, 220
SOURCE = Source("emoji", split="new_style")
NAMES = (
    "red apple", "umbrella with rain drops", "birthday cake", "alarm clock", "crying face", "tropical fish",
    "bar chart", "evergreen tree", "red heart", "pizza", "wolf", "airplane",
)  # fmt: skip


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("captions", nargs="*", default=list(NAMES))
    parser.add_argument("--output", type=Path, default=Path("emoji.png"))
    return parser.parse_intermixed_args(arguments)  # captions may come after --output


def main() -> None:
    options = parsed()
    model = fb.load(options.run, device="cpu")
    images = model.embedder.images(SOURCE)
    found = model.similarity(model.encode_text(options.captions), images.image_ND).topk(SHOWN, dim=1).indices
    samples = open_source(SOURCE)

    sheet = Image.new("RGB", (TEXT + SHOWN * CELL, len(options.captions) * CELL), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(15)
    for row, caption in enumerate(options.captions):
        draw.text((8, row * CELL + CELL // 2 - 9), caption, fill="black", font=font)
        for column, index in enumerate(found[row].tolist()):
            sample = samples.read(int(images.ids[index]))
            corner = (TEXT + column * CELL + 4, row * CELL + 4)
            sheet.paste(Image.open(io.BytesIO(sample.image)).convert("RGB"), corner)
            if sample.captions[0] == caption:
                box = (corner[0] - 3, corner[1] - 3, corner[0] + 66, corner[1] + 66)
                draw.rectangle(box, outline="#1a9850", width=3)
    sheet.save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()

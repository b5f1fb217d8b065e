"""The page of pictures: HTML, a style and a script, served as they are or written into one file with the results."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from fullbatch.config.messages import clean, plain
from fullbatch.data.sample import BadSample
from fullbatch.find.nearest import Finder, Hit
from fullbatch.find.thumbnails import Thumbnails
from fullbatch.report.blocks import embedded_json
from fullbatch.report.single_file import FOOTER, asset, content_policy, themed
from fullbatch.training.run_folder import replace_text

_FOLDERS = 1000  # that the page offers to choose from
_LINKS = ('<link rel="stylesheet" href="gallery.css">', '<script src="gallery.js" defer></script>')


def html() -> str:
    return asset("fullbatch.find", "gallery.html")


def style() -> str:
    return themed(asset("fullbatch.find", "gallery.css"))


def script() -> str:
    return asset("fullbatch.find", "gallery.js")


def shown_hits(hits: Sequence[Hit]) -> list[tuple[int, float | None, str]]:
    """Number, score and a path that can be shown: whatever a name holds, it is one line."""
    return [(hit.number, None if hit.score is None else round(hit.score, 5), clean(hit.entry.path)) for hit in hits]


def about(finder: Finder) -> dict[str, Any]:
    return {
        "name": plain(finder.index.folder.resolve().name, 80),
        "words": finder.index.encoder.reads_text,
        "pictures": len(finder.pictures),
        "bad": len(finder.index.bad),
        "folders": [(clean(folder), count) for folder, count in islice(finder.folders.items(), _FOLDERS)],
    }


def write_static(finder: Finder, hits: Sequence[Hit], asked: str, output: Path) -> int:
    """One file with the results and their thumbnails, which loads nothing; how many it shows."""
    thumbnails, shown, pictures = Thumbnails(finder.index), [], []
    for hit in hits:
        try:
            small = thumbnails.small(hit.entry)
        except BadSample:  # changed or gone since it was indexed
            continue
        pictures.append(base64.b64encode(small).decode())
        shown.append(hit)
    folder = about(finder)
    data = {"asked": plain(asked), "about": folder, "hits": shown_hits(shown), "pictures": pictures}
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, _self_contained(data, plain(asked, 80) or folder["name"]))
    return len(shown)


def _self_contained(data: dict[str, Any], title: str) -> str:
    policy = content_policy(style(), script())
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{escape(title)}</title>'
    whole = html().replace("<title>fullbatch find</title>", head)
    whole = whole.replace(_LINKS[0], f"<style>{style()}</style>").replace(_LINKS[1], "")
    embedded = f'<script type="application/json" id="data">{embedded_json(data)}</script>'
    return whole.replace("</body>", f"<footer>{FOOTER}</footer>\n{embedded}\n<script>{script()}</script>\n</body>")

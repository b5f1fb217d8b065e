"""The page: one HTML file, one style and one script, served as they are or written into one file with its results."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import fullbatch
from fullbatch.config.messages import clean, plain
from fullbatch.data.sample import BadSample
from fullbatch.training.run_folder import replace_text
from fullbatch.using.search import Finder, Hit
from fullbatch.using.thumbnails import Thumbnails

_FOLDERS = 1000  # that the page offers to choose from
_LINKS = ('<link rel="stylesheet" href="page.css">', '<script src="page.js" defer></script>')


@cache
def asset(name: str) -> str:
    return files("fullbatch.using").joinpath(name).read_text(encoding="utf-8")


def served_page() -> str:
    return asset("page.html")


def shown_hits(hits: Sequence[Hit]) -> list[tuple[int, float | None, str]]:
    """Number, score and a path that can be shown: whatever a name holds, it is one line."""
    return [(hit.number, None if hit.score is None else round(hit.score, 5), clean(hit.entry.path)) for hit in hits]


def about(finder: Finder) -> dict[str, Any]:
    return {
        "name": plain(finder.folder.resolve().name, 80),
        "pictures": len(finder.pictures),
        "bad": len(finder.index.bad),
        "folders": [(clean(folder), count) for folder, count in islice(finder.folders.items(), _FOLDERS)],
    }


def write_static(finder: Finder, hits: Sequence[Hit], asked: str, output: Path) -> int:
    """One file with the results and their thumbnails, which loads nothing; how many it shows."""
    thumbnails, shown, pictures = Thumbnails(finder.index, finder.folder), [], []
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
    style, script = asset("page.css"), asset("page.js")
    policy = (
        f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, separators=(",", ":")).replace("&", "\\u0026").replace("<", "\\u003c")
    whole = asset("page.html").replace(
        "<title>fullbatch find</title>",
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{html.escape(title)}</title>',
    )
    whole = whole.replace(_LINKS[0], f"<style>{style}</style>").replace(_LINKS[1], "")
    end = f'<script type="application/json" id="data">{text}</script>\n<script>{script}</script>\n</body>'
    note = f"<footer>Written by fullbatch {fullbatch.__version__}. This file loads nothing from anywhere.</footer>\n"
    return whole.replace("</body>", note + end)


def _hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

"""What pages of one file share: colours, their own style and script, and a policy by which they may load nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

import fullbatch

FOOTER = f"Written by fullbatch {fullbatch.__version__}. This file loads nothing from anywhere."


@cache
def asset(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def themed(style: str) -> str:
    """A page's own style, after the colours and letters of all pages."""
    return f"{asset('fullbatch.report', 'theme.css')}\n{style}"


def content_policy(style: str, script: str) -> str:
    """This style and this script alone, by their hashes, and pictures inside the file."""
    return (
        f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

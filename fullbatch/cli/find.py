"""``fullbatch find``: a model and a folder of pictures in, the nearest pictures out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlencode

import tyro

if TYPE_CHECKING:
    from fullbatch.find.index import Changes, PictureIndex
    from fullbatch.find.nearest import Finder, Hit

_SHOWN_BAD = 5


def _port(words: list[str]) -> int:
    """
    >>> _port([]), _port(["8000"])
    (0, 8000)
    """
    if words and not (words[0].isdecimal() and int(words[0]) < 65536):
        raise ValueError(f"a port is a whole number in [0, 65535], got {words[0]!r}; put the query before --serve")
    return int(words[0]) if words else 0


_PORT = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=(0, 1),
    metavar="[PORT]",
    instance_from_str=_port,
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [str(value)],
)


@dataclass(frozen=True, kw_only=True)
class _Find:
    """Find pictures of a folder by words or by a picture.  The folder is indexed first: pictures that are new or
    changed are embedded, the others are not read.  Without a query that is all."""

    # a run folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip model's name
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    # of pictures, at any depth
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    # words, such as: a beach - people + a dog
    query: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[QUERY]")] = ()
    like: Path | None = None  # a picture to find others like; with words, both together
    top: int = 20  # pictures to show
    serve: Annotated[int | None, _PORT] = None  # a page to search with, on 127.0.0.1; without a PORT any that is free
    static: Path | None = None  # an HTML file to write, which shows what was found
    index: Path | None = None  # the folder of the index; default: one in the cache folder
    pretrained: str | None = None  # an open_clip model's weights: a tag, or a checkpoint file
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to embed
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of the model
    batch_size: int = 64  # pictures to embed at a time
    # what --serve reads for a search: the embeddings, or a copy in bf16, half as large; the answers are the same
    rows: Literal["fp32", "bf16"] = "fp32"


def find(arguments: list[str]) -> int:
    options = tyro.cli(_Find, args=arguments, prog="fullbatch find")
    for name in ("top", "batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}.")
    from fullbatch.cli.printing import print_lines
    from fullbatch.config.messages import message
    from fullbatch.encoder import load
    from fullbatch.find.index import NotWritable, PictureIndex, require_folder
    from fullbatch.find.nearest import Finder, query_of
    from fullbatch.training.display import progress_bar

    words = " ".join(options.query)
    if options.query and not words.strip():
        raise ValueError("The query is empty and says nothing; leave it out, or say what to find.")
    require_folder(options.folder)
    if options.static is not None and options.static.is_dir():
        inside = options.static / "found.html"
        raise ValueError(f"--static {options.static} is a folder; name a file, such as {inside}.")
    encoder = load(
        options.model,
        options.pretrained,
        device=options.device,
        precision=options.precision,
        batch_size=options.batch_size,
    )
    likes = [] if options.like is None else [(1.0, encoder.encode_image(options.like))]
    query_D = query_of(encoder, words, likes)  # mistakes are told before the work
    index = PictureIndex(options.folder, encoder, options.index)
    is_all = query_D is None and options.serve is None and options.static is None
    try:
        with progress_bar("indexing") as watch:
            changes = index.update(watch)
    except NotWritable as error:
        if is_all or not index.pictures:
            raise
        print(message(f"{error}  Answers are from the {len(index.pictures):,} pictures in it now."), file=sys.stderr)
    else:
        if is_all or changes.embedded or changes.known or changes.gone:
            for line in _changed(index, changes):
                print(line, file=sys.stdout if is_all else sys.stderr)
    if is_all:
        return 0
    finder = Finder(index, options.rows)
    if query_D is not None or options.static is not None:
        hits = finder.find(query_D, options.top)
        if query_D is not None:
            print_lines(f"{hit.score:6.3f}  {options.folder / hit.entry.path}" for hit in hits)
        if options.static is not None:
            _write(finder, hits, words or (f"like {options.like.name}" if options.like else ""), options.static)
    if options.serve is not None:
        _serve(finder, options.serve, words, options.like)
    return 0


def _changed(index: PictureIndex, changes: Changes) -> list[str]:
    from fullbatch.config.messages import message, plain

    counts = {"new": changes.embedded, "known by content": changes.known, "unchanged": changes.unchanged}
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "nothing new"
    gone = f"; {changes.gone:,} gone" if changes.gone else ""
    lines = [message(f"{len(index.pictures):,} pictures of {index.folder} in the index {index.place}: {told}{gone}")]
    if changes.bad:
        lines.append(f"{len(changes.bad):,} cannot be used:")
        lines += [f"  {plain(entry.path)}: {plain(entry.bad)}" for entry in changes.bad[:_SHOWN_BAD]]
        more = len(changes.bad) - _SHOWN_BAD
        lines += [f"  and {more:,} more"] if more > 0 else []
    return lines


def _write(finder: Finder, hits: list[Hit], asked: str, output: Path) -> None:
    from fullbatch.find.gallery import write_static

    count = write_static(finder, hits, asked, output)
    print(f"{count:,} pictures in {output}", file=sys.stderr)


def _serve(finder: Finder, port: int, words: str, like: Path | None) -> None:
    from fullbatch.find.server import HOST, PageServer

    try:
        server = PageServer(finder, port)
    except OSError as error:
        raise ValueError(f"--serve {port}: {HOST}:{port} cannot be used ({error.strerror}); name another.") from None
    with server:
        asked = {"q": words} if words else {}
        if like is not None:
            asked["like"] = server.answers.remember(like.read_bytes(), str(like))
        print(f"{server.url}{'?' + urlencode(asked) if asked else ''}\nCtrl-C stops it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)

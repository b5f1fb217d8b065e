"""A web server with files in memory that serves ranges, and fails, stalls or lies when it is told to."""

from __future__ import annotations

import hashlib
import random
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

# a number: its answer; "drop": none, and the connection is closed; "stall": none; "cut": half of what it announces;
# "short": it announces and sends a byte less; "whole": no range but the file; "replace": another file from then on;
# "other tag": that of another version
Fault = str


class FaultyServer:
    """``faults`` maps the number of a request of that method (from 0) to what goes wrong with it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tags = True  # it sends ETags
        self.requests: list[tuple[str, str, str]] = []  # method, path, range
        self.faults: dict[tuple[str, int], Fault] = {}
        self.fails: Callable[[str, str], Fault | None] = lambda method, path: None  # of every request
        self.released = threading.Event()  # ends stalls
        self.sent = 0  # bytes of files
        self.users: set[str | None] = set()  # what requests named in their Authorization
        self.lock = threading.Lock()
        self.url = ""

    def count(self, method: str) -> int:
        return sum(there == method for there, _, _ in self.requests)

    def note(self, method: str, path: str, span: str) -> Fault | None:
        with self.lock:
            number = self.count(method)
            self.requests.append((method, path, span))
            return self.faults.pop((method, number), None) or self.fails(method, path)


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[FaultyServer]:
    """By https with a ``context``."""
    state = FaultyServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # answers come in two pieces

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            fault = state.note(self.command, self.path, self.headers.get("Range", ""))
            state.users.add(self.headers.get("Authorization"))
            if fault == "drop":
                self.close_connection = True
                return
            if fault == "stall":
                state.released.wait(30)
                self.close_connection = True
                return
            path = unquote(self.path.partition("?")[0])
            if fault == "replace":
                state.files[path] = state.files[path][::-1]
            body = state.files.get(path)
            tag = f'"{hashlib.md5(body or b"").hexdigest()}"'
            if body is not None and fault is None and self.headers.get("If-None-Match") == tag:
                fault = "304"
            if (fault and fault.isdigit()) or body is None:
                self.send_response(int(fault or "404"))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            total = len(body)
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span and int(span[1]) >= total:
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if span and fault != "whole":
                first, last = int(span[1]), min(int(span[2]), total - 1)
                body = body[first : last + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
            else:
                self.send_response(200)
            if fault == "short":
                body = body[:-1]
            self.send_header("Content-Length", str(len(body)))
            if state.tags:
                self.send_header("ETag", '"other"' if fault == "other tag" else tag)
            self.end_headers()
            if self.command == "GET":
                if fault == "cut":
                    body, self.close_connection = body[: len(body) // 2], True
                with suppress(ConnectionError):  # a client may have seen enough
                    for start in range(0, len(body), 1 << 20):
                        piece = body[start : start + (1 << 20)]
                        with state.lock:  # before the client can go on
                            state.sent += len(piece)
                        self.wfile.write(piece)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *words: None  # type: ignore[method-assign]  # of clients that do not trust it
    state.url = f"http{'s' if context else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


FAULTS = ("503", "429", "drop", "cut", "short", "stall")


def often(rng: random.Random, method: str, path: str, faults: Sequence[Fault] = FAULTS) -> Fault | None:
    """A fifth of the ranges fails."""
    return rng.choice(faults) if method == "GET" and rng.random() < 0.2 else None

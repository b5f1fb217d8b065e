"""A store that is far away: every request waits before it is answered, and the server counts what it sends.

    python benchmarks/slow_server.py http FOLDER --latency 0.05      # the files of a folder, also by ranges
    python benchmarks/slow_server.py s3 --latency 0.05               # moto's server, empty

It prints its address, serves as many requests at once as come, and ends when its standard input does.  ``COUNTS`` under
that address answers at once with the requests and bytes since it was asked last.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

COUNTS = "/.counts"
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class SlowAndCounted:
    def __init__(self, application: Application, latency: float) -> None:
        self.application, self.latency = application, latency
        self.requests = self.bytes = 0
        self.lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == COUNTS:
            with self.lock:
                counts = json.dumps({"requests": self.requests, "bytes": self.bytes}).encode()
                self.requests = self.bytes = 0
            start_response("200 OK", [("Content-Length", str(len(counts)))])
            return [counts]
        time.sleep(self.latency)
        answer = b"".join(self.application(environ, start_response))
        with self.lock:
            self.requests += 1
            self.bytes += len(answer) * (environ["REQUEST_METHOD"] == "GET")
        return [answer]


def files_of(folder: Path) -> Application:
    """The files of a folder, with ranges and ETags."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = folder / environ["PATH_INFO"].lstrip("/")
        if not path.is_file():
            start_response("404 Not Found", [("Content-Length", "0")])
            return []
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", environ.get("HTTP_RANGE", ""))
        first, last = (int(span[1]), min(int(span[2] or size), size - 1)) if span else (0, size - 1)
        headers = [("Content-Length", str(last + 1 - first)), ("Accept-Ranges", "bytes"), ("ETag", f'"{size}"')]
        if span:
            headers.append(("Content-Range", f"bytes {first}-{last}/{size}"))
        start_response("206 Partial Content" if span else "200 OK", headers)
        if environ["REQUEST_METHOD"] == "HEAD":
            return []
        with path.open("rb") as file:
            file.seek(first)
            return [file.read(last + 1 - first)]

    return answer


class KeptAlive(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are sent apart

    def log(self, *words: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["http", "s3"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--latency", type=float, default=0.05, help="seconds")
    args = parser.parse_args()
    application: Application = files_of(args.folder)
    if args.kind == "s3":
        from moto.server import DomainDispatcherApplication, create_backend_app

        application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, SlowAndCounted(application, args.latency), True, request_handler=KeptAlive)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

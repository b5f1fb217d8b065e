"""A page on 127.0.0.1 that searches a folder.  Every address begins with a key that changes with each start; pictures
are asked for by number, and no part of an address ever becomes a path."""

from __future__ import annotations

import hmac
import io
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from torch import Tensor

from fullbatch.config.messages import clean
from fullbatch.data.sample import BadSample
from fullbatch.find import gallery
from fullbatch.find.nearest import Finder
from fullbatch.find.thumbnails import SMALL, Thumbnails, jpeg_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger("fullbatch")
HOST = "127.0.0.1"
MOST_HITS = 20_000
MAX_UPLOAD = 32 << 20  # bytes of a picture that is dropped on the page
_UPLOADS = 64  # dropped pictures that are remembered, for the back button
_MAX_WORDS = 1000  # characters of a query
_MAX_LIKES = 16  # pictures of a query
_DRAWN = 4  # pictures decoded at a time: each may take 150 MB, and a PNG four times as much
_CONNECTIONS = 64  # at a time; a browser opens six
_HEAD_SECONDS = 10.0  # from one answer to the end of the next request's head
_BODY_SECONDS = 60.0  # for a picture that is dropped
_PATIENCE = 30.0  # seconds for an answer to be taken
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Refused(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        self.status = status
        super().__init__(reason)


def _not_there() -> Refused:
    return Refused(HTTPStatus.NOT_FOUND, "There is nothing here.")


@dataclass(frozen=True)
class Answer:
    body: bytes
    kind: str
    lasting: bool = False  # the same as long as the server runs

    @classmethod
    def of(cls, values: Any) -> Answer:
        return cls(json.dumps(values).encode(), "application/json")


class PageAnswers:
    """What is at which address, below the key; it knows nothing of sockets."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder
        self.thumbnails = Thumbnails(finder.index)
        self._one_at_a_time = threading.Lock()  # the model, and what is remembered
        self._few_at_a_time = threading.Semaphore(_DRAWN)
        self._uploads: OrderedDict[str, tuple[Tensor, bytes]] = OrderedDict()  # by name: embedding, thumbnail
        self._uploaded = 0
        self._fixed: dict[str, Callable[[], Answer]] = {
            "": lambda: Answer(gallery.html().encode(), "text/html; charset=utf-8"),
            "gallery.css": lambda: Answer(gallery.style().encode(), "text/css; charset=utf-8"),
            "gallery.js": lambda: Answer(gallery.script().encode(), "text/javascript; charset=utf-8"),
            "about": lambda: Answer.of(gallery.about(finder)),
        }

    def get(self, address: str, query: str) -> Answer:
        if address in self._fixed:
            return self._fixed[address]()
        if address == "search":
            return self.search(_values(query))
        match re.fullmatch(r"(thumbnail|picture|dropped)/([0-9]{1,9})", address, re.ASCII):
            case None:
                raise _not_there()
            case found if found[1] == "dropped":
                return Answer(self._dropped(f"d{int(found[2])}")[1], "image/jpeg", lasting=True)
            case found:
                make = self.thumbnails.small if found[1] == "thumbnail" else self.thumbnails.large
                try:
                    with self._few_at_a_time:
                        return Answer(make(self.finder.pictures[self._number(found[2])]), "image/jpeg", lasting=True)
                except BadSample as bad:
                    raise Refused(HTTPStatus.GONE, clean(bad.reason)) from None

    def search(self, values: Mapping[str, str]) -> Answer:
        """q: words; like: pictures such as 12,-40,d1; folder: the number of one; top: at most so many."""
        words, likes = values.get("q", ""), [each for each in values.get("like", "").split(",") if each]
        if len(words) > _MAX_WORDS or len(likes) > _MAX_LIKES:
            raise ValueError(f"A query has at most {_MAX_WORDS} characters and {_MAX_LIKES} pictures.")
        top, number = values.get("top", str(MOST_HITS)), values.get("folder", "")
        if not re.fullmatch("[0-9]{1,9}", top) or not re.fullmatch("[0-9]{0,9}", number):
            raise ValueError("top and folder must be whole numbers.")
        if number and int(number) >= len(self.finder.folders):
            raise _not_there()
        within = list(self.finder.folders)[int(number)] if number else ""
        started = time.perf_counter()
        with self._one_at_a_time:
            query_D = self.finder.query(words, [self._like(each) for each in likes])
            hits = self.finder.find(query_D, min(int(top), MOST_HITS), within)
        elapsed = time.perf_counter() - started
        return Answer.of({"hits": gallery.shown_hits(hits), "seconds": elapsed})

    def drop(self, raw: bytes) -> Answer:
        return Answer.of({"name": self.remember(raw, "the dropped picture")})

    def remember(self, raw: bytes, called: str) -> str:
        """A picture that is in no index: it is embedded, and from now on has a name to search by."""
        encoder = self.finder.index.encoder
        try:
            with self._few_at_a_time:
                square, small = encoder.transform(raw, called), jpeg_of(raw, called, SMALL)
        except BadSample as bad:
            raise ValueError(f"{clean(bad)}.") from None
        with self._one_at_a_time:
            row_D = encoder.embed_squares([square])[0]
            self._uploaded += 1
            name = f"d{self._uploaded}"
            self._uploads[name] = row_D, small
            while len(self._uploads) > _UPLOADS:
                self._uploads.popitem(last=False)
        return name

    def _number(self, text: str) -> int:
        if int(text) >= len(self.finder.pictures):
            raise _not_there()
        return int(text)

    def _dropped(self, name: str) -> tuple[Tensor, bytes]:
        upload = self._uploads.get(name)
        if upload is None:
            raise Refused(HTTPStatus.NOT_FOUND, "That picture is forgotten by now; drop it again.")
        return upload

    def _like(self, text: str) -> tuple[float, Tensor]:
        found = re.fullmatch(r"(-?)(d?)([0-9]{1,9})", text, re.ASCII)
        if found is None:
            raise ValueError("like must be numbers of pictures, such as 12,-40.")
        sign = -1.0 if found[1] else 1.0
        return sign, self._dropped(f"d{found[3]}")[0] if found[2] else self.finder.row(self._number(found[3]))


def _values(query: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(query, max_num_fields=20, errors="replace").items()}


class _TimedReader(io.RawIOBase):
    """A socket to read from until a deadline, however the bytes drip: a socket's own timeout starts anew with each."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire, self.deadline = wire, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError
        self.wire.settimeout(left)
        try:
            return self.wire.recv_into(buffer)
        finally:
            self.wire.settimeout(_PATIENCE)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fullbatch", ""
    timeout = _PATIENCE

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reader = _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.deadline = time.monotonic() + _HEAD_SECONDS
        super().handle_one_request()

    def do_GET(self) -> None:
        self._answer(self._give)

    def do_POST(self) -> None:
        self._answer(self._take)

    def _give(self, address: str, query: str) -> Answer:
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            raise Refused(HTTPStatus.BAD_REQUEST, "A body belongs to no such request.")
        return self.server.answers.get(address, query)

    def _take(self, address: str, query: str) -> Answer:
        if address != "drop":
            raise _not_there()
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not re.fullmatch("[0-9]{1,12}", length):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "The length of the picture is missing.")
        if int(length) > MAX_UPLOAD:
            limit = f"The picture is larger than {MAX_UPLOAD >> 20} MB."
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, limit)
        self._reader.deadline = time.monotonic() + _BODY_SECONDS
        raw = self.rfile.read(int(length))
        if len(raw) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, "The picture was cut off.")
        return self.server.answers.drop(raw)

    def _answer(self, make: Callable[[str, str], Answer]) -> None:
        try:
            self._check_sender()
            parts = urlsplit(self.path)
            key, _, address = parts.path.removeprefix("/").partition("/")
            if parts.scheme or parts.netloc or not hmac.compare_digest(key.encode(), self.server.key.encode()):
                raise _not_there()
            answer = make(address, parts.query)
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        except ValueError as error:  # a query that makes no sense
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (OSError, EOFError):
            self.close_connection = True  # whoever asked is gone
        except Exception:
            log.exception("a request of the page failed")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "That went wrong; the terminal says why.")
        else:
            self._send(HTTPStatus.OK, answer)

    def _check_sender(self) -> None:
        """Only this page, opened under this address: not another site's script, nor one whose name leads here."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            raise Refused(HTTPStatus.FORBIDDEN, "This page has another address.")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise Refused(HTTPStatus.FORBIDDEN, "This page answers itself alone.")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            raise Refused(HTTPStatus.FORBIDDEN, "This page answers itself alone.")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self.close_connection = True  # a body that was not read would be taken for the next request
        self._send(status, Answer.of({"error": reason}))

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        with suppress(OSError):
            self.send_response(status)
            headers = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body)), **_HEADERS}
            headers["Cache-Control"] = "private, max-age=86400, immutable" if answer.lasting else "no-store"
            if self.close_connection:
                headers["Connection"] = "close"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of requests that are not HTTP, or of other methods; nothing of them is repeated."""
        self._refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: object) -> None:
        pass


class PageServer(ThreadingHTTPServer):
    """``with PageServer(finder) as server: server.serve_forever()``"""

    daemon_threads = False  # a thread that is cut off within torch would end the process by an abort
    request_queue_size = 128

    def __init__(self, finder: Finder, port: int = 0) -> None:
        self.answers, self.key = PageAnswers(finder), secrets.token_urlsafe(16)
        self._open = threading.BoundedSemaphore(_CONNECTIONS)
        self._connections: set[socket.socket] = set()
        super().__init__((HOST, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.key}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._open.acquire(timeout=_HEAD_SECONDS + 1.0):  # by then those who ask for nothing are out
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.discard(request)
            self._open.release()

    def server_close(self) -> None:
        """Answers that are being made are waited for; who asks for nothing is sent away."""
        for connection in tuple(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break; what went wrong in an answer is logged there."""

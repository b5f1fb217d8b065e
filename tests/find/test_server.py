"""The server under attack: it answers its own page alone, and shows nothing but pictures of the index."""

import contextlib
import http.client
import io
import json
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from fullbatch.find import server as server_module
from fullbatch.find.server import MAX_UPLOAD
from tests.find.making import HOSTILE, picture, serving, write_hostile, write_pictures
from tests.waiting import HANG, wait_for

SECRET = "a secret beside the pictures"


@pytest.fixture(scope="module")
def finder(indexed, tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    write_pictures(place / "pictures", 12)
    write_hostile(place / "pictures" / "<b>hostile<")
    (place / "secret.txt").write_text(SECRET)
    (place / "pictures" / "secret.txt").write_text(SECRET)
    (place / "pictures" / "bad.png").write_text(SECRET)
    return indexed(place / "pictures", place / "index")


class Reply:
    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self):
        return json.loads(self.body)


def request(server, address, method="GET", body=None, headers=None, keyed=True):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANG)
    connection.putrequest(method, f"/{server.key}/{address}" if keyed else address, skip_host=True)
    given = {"Host": f"127.0.0.1:{server.server_port}", **({} if body is None else {"Content-Length": str(len(body))})}
    for name, value in {**given, **(headers or {})}.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    try:
        return Reply(connection.getresponse())
    finally:
        connection.close()


def spoken(server, raw):
    """What is answered to these bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=HANG) as wire:
        wire.sendall(raw)
        wire.shutdown(socket.SHUT_WR)
        answer = b""
        while part := wire.recv(65536):
            answer += part
    return answer


def png(seed=1):
    raw = io.BytesIO()
    picture(seed).save(raw, "png")
    return raw.getvalue()


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_it_searches_and_shows(server, finder):
    about = request(server, "about").json
    assert about["pictures"] == 12 + len(HOSTILE) == len(finder.pictures) and about["bad"] == 1
    hits = request(server, "search?q=a+cat").json["hits"]
    assert [hit[0] for hit in hits] == [hit.number for hit in finder.find(finder.query("a cat"), 100)]
    few = request(server, "search?q=a+cat+-+a+dog&top=3").json["hits"]
    assert [hit[0] for hit in few] == [hit.number for hit in finder.find(finder.query("a cat - a dog"), 3)]
    alike = request(server, "search?like=5").json["hits"]
    assert alike[0][:2] == [5, 1.0]
    everything = request(server, "search").json["hits"]
    assert [hit[0] for hit in everything] == list(range(len(finder.pictures))) and everything[0][1] is None
    names = [name for name, _ in about["folders"]]
    inside = request(server, f"search?q=a+cat&folder={names.index('below')}").json["hits"]
    assert len(inside) == 4 and all(hit[2].startswith("below/") for hit in inside)
    for kind, side in (("thumbnail", 24), ("picture", 24)):
        reply = request(server, f"{kind}/0")
        assert reply.headers["Content-Type"] == "image/jpeg" and "immutable" in reply.headers["Cache-Control"]
        assert Image.open(io.BytesIO(reply.body)).size == (side, 20)


def test_thumbnails_are_made_once(server, finder, monkeypatch):
    first = request(server, "thumbnail/3").body
    monkeypatch.setattr("fullbatch.find.thumbnails.read_file", lambda *_: pytest.fail("the file was read again"))
    assert request(server, "thumbnail/3").body == first


def test_a_dropped_picture_is_searched_by(server, finder, encoder):
    number = next(place for place, entry in enumerate(finder.pictures) if entry.path == "0003.png")
    name = request(server, "drop", "POST", (finder.index.folder / "0003.png").read_bytes()).json["name"]
    assert request(server, f"search?like={name}&top=1").json["hits"][0][:2] == [number, 1.0]
    assert request(server, f"dropped/{name[1:]}").headers["Content-Type"] == "image/jpeg"
    both = request(server, f"search?like={name},-{number}")
    assert both.status == 400 and "cancel each other" in both.json["error"]


def test_dropped_pictures_are_forgotten_in_the_end(server, monkeypatch):
    monkeypatch.setattr(server_module, "_UPLOADS", 2)
    names = [request(server, "drop", "POST", png(seed)).json["name"] for seed in range(3)]
    statuses = [request(server, f"search?like={name}").status for name in names]
    assert statuses == [404, 200, 200]
    assert "drop it again" in request(server, f"search?like={names[0]}").json["error"]


# -- attacks -----------------------------------------------------------------------------------------------------------

PATHS = (
    "../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "..\\secret.txt", "thumbnail/../../secret.txt",
    "thumbnail/0/../../../secret.txt", "picture/%2e%2e%2fsecret.txt", "picture/bad.png", "picture/secret.txt",
    "picture/0000.png", "picture//etc/passwd", "/etc/passwd", "//etc/passwd", "file:///etc/passwd", "picture/-1",
    "picture/1e3", "picture/0x1", "picture/99999999", "picture/9999999999999999999", "picture/0%00", "picture/٣",
    "thumbnail/0;a", "thumbnail/", "thumbnail", "gallery.py", "server.py", "index.json", "gallery.html", "dropped/0",
    "dropped/999", ".thumbnails", "search/", "about/", "gallery.css/../gallery.py", "%00", "search?like=../0",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_address_is_a_path(server, path):
    raw = path.encode()
    head = b"GET /%s/%s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (server.key.encode(), raw, server.server_port)
    bare = b"GET /%s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (raw, server.server_port)
    for answer in (spoken(server, head), spoken(server, bare)):
        assert re.match(rb"HTTP/1.1 (404|400)", answer), answer[:100]
        assert SECRET.encode() not in answer and b"root:" not in answer


@pytest.mark.parametrize("address", ["/", "/about", "/search?q=a", "/thumbnail/0", "/x/about", "/favicon.ico", "*", ""])
def test_without_the_key_there_is_nothing(server, address):
    raw = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (address.encode() or b"/", server.server_port)
    answer = spoken(server, raw)
    assert answer.startswith(b"HTTP/1.1 404")
    assert server.key.encode() not in answer


def test_the_key_is_no_mere_beginning(server):
    for key in (server.key[:-1], server.key + "x", server.key.swapcase(), "", "%C3%A9"):
        assert request(server, f"/{key}/about", keyed=False).status == 404


def hosts(server):
    port = server.server_port
    return (
        "evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", "127.0.0.1", "",
        f"127.0.0.1.evil.example:{port}",
        f"127.0.0.1:{port}.evil.example", f"0.0.0.0:{port}", f"[::1]:{port}", f"localhost.:{port}", f"127.1:{port}",
        f"127.0.0.1:{port}@evil.example", None,
    )  # fmt: skip


def test_other_hosts_are_refused(server):
    """A name of the attacker's that leads to 127.0.0.1 (DNS rebinding) comes with that name as Host."""
    for host in hosts(server):
        for address, method in (("", "GET"), ("search?q=a", "GET"), ("thumbnail/0", "GET"), ("drop", "POST")):
            body = png() if method == "POST" else None
            reply = request(server, address, method, body, headers={"Host": host})
            assert reply.status == 403, host
            assert reply.json == {"error": "This page has another address."}
    twice = b"GET /%s/about HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nHost: evil.example\r\n\r\n"
    assert spoken(server, twice % (server.key.encode(), server.server_port)).startswith(b"HTTP/1.1 403")
    assert request(server, "about", headers={"Host": f"localhost:{server.server_port}"}).status == 200


def test_other_origins_are_refused(server):
    port = server.server_port
    foreign = (
        "https://evil.example",
        "null",
        f"http://127.0.0.1:{port + 1}",
        f"https://127.0.0.1:{port}",
        "file://",
        "",
    )
    foreign += (f"http://localhost:{port}", f"http://127.0.0.1:{port}.evil.example")
    for origin in foreign:
        for address, method in (("search?q=a", "GET"), ("drop", "POST"), ("thumbnail/0", "GET")):
            reply = request(server, address, method, png() if method == "POST" else None, headers={"Origin": origin})
            assert reply.status == 403 and "hits" not in reply.body.decode(), origin
    for site in ("cross-site", "same-site", "else"):
        assert request(server, "thumbnail/0", headers={"Sec-Fetch-Site": site}).status == 403
    own = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
    assert request(server, "search?q=a", headers=own).status == 200
    assert request(server, "", headers={"Sec-Fetch-Site": "none"}).status == 200


def test_every_answer_forbids_what_it_can(server):
    addresses = (
        "",
        "about",
        "search",
        "gallery.js",
        "gallery.css",
        "thumbnail/0",
        "picture/1",
        "nothing",
        "search?like=x",
    )
    for address in addresses:
        headers = request(server, address).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';") and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert not [name for name in headers if name.lower().startswith("access-control")]


BODIES = {
    "no picture": (b"hello", 400),
    "nothing": (b"", 400),
    "a script": (b"<script>alert(1)</script>", 400),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", 400),
    "a cut picture": (png()[:60], 400),
}


@pytest.mark.parametrize("what", BODIES)
def test_what_is_dropped_and_no_picture_is_refused(server, what):
    body, status = BODIES[what]
    reply = request(server, "drop", "POST", body)
    assert reply.status == status and reply.json["error"].startswith("the dropped picture: ")


def test_bodies_that_are_too_large_or_of_unknown_size_are_not_read(server):
    head = b"POST /%s/drop HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % (server.key.encode(), server.server_port)
    cases = {
        b"Content-Length: %d\r\n\r\n" % (MAX_UPLOAD + 1): 413,
        b"Content-Length: 999999999999\r\n\r\n": 413,
        b"Content-Length: -1\r\n\r\n": 411,
        b"Content-Length: 1_0\r\n\r\n": 411,
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n": 411,
        b"\r\n": 411,
        b"Content-Length: 50\r\n\r\ncut off": 400,
    }
    for rest, status in cases.items():
        assert spoken(server, head + rest).startswith(b"HTTP/1.1 %d" % status), rest
    smuggled = b"GET /%s/about HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 5\r\n\r\nGET /"
    answer = spoken(server, smuggled % (server.key.encode(), server.server_port))
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_bad_requests_are_answered_or_dropped(server):
    key, port = server.key.encode(), server.server_port
    for method in (b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"PROPFIND"):
        answer = spoken(server, b"%s /%s/about HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (method, key, port))
        assert answer.startswith(b"HTTP/1.1 501"), method
    assert spoken(server, b"POST /%s/search HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (key, port))[9:12] == b"404"
    long, many = b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n"
    noise = os.urandom(500) + b"\r\n\r\n"
    for raw in (b"\r\n\r\n", b"\x16\x03\x01\x02", noise, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", long, many):
        answer = spoken(server, raw)
        assert SECRET.encode() not in answer and b"Traceback" not in answer and key not in answer
    for query in ("q=" + "a" * 1001, "like=" + "1," * 20, "like=x", "like=--1", "top=-1", "top=x", "folder=x", "q=a+-"):
        reply = request(server, f"search?{query}")
        assert reply.status == 400 and set(reply.json) == {"error"}, query
    assert request(server, "search?" + "a=b&" * 50).status == 400
    assert request(server, "search?folder=999").status == request(server, "search?like=99999").status == 404
    assert request(server, "search?q=%FF%FE%00").status == 200
    assert request(server, "about").status == 200, "it is still there"


def test_what_has_changed_since_is_not_shown(indexed, tmp_path):
    write_pictures(tmp_path / "pictures", 5)
    (tmp_path / "secret.png").write_text(SECRET)
    with serving(indexed(tmp_path / "pictures", tmp_path / "index")) as server:
        assert request(server, "picture/0").status == 200
        (tmp_path / "pictures" / "0000.png").unlink()
        (tmp_path / "pictures" / "0000.png").symlink_to(tmp_path / "secret.png")
        picture(77).save(tmp_path / "pictures" / "0001.png")
        (tmp_path / "pictures" / "0003.png").unlink()
        replies = [request(server, f"{kind}/{number}") for kind in ("picture", "thumbnail") for number in (0, 1, 2)]
        assert [reply.status for reply in replies] == [410] * 6
        assert all(SECRET not in reply.body.decode() for reply in replies)
        assert request(server, "search?q=a").status == 200


def test_names_are_one_clean_line(server):
    names = [hit[2] for hit in request(server, "search").json["hits"]]
    assert not [name for name in names if re.search("[\x00-\x1f\u202e]", name)]
    raw = request(server, "search")
    assert raw.headers["Content-Type"] == "application/json"


def test_a_failure_within_tells_the_page_nothing(server, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(server.answers.finder, "find", broken)
    reply = request(server, "search?q=a")
    assert reply.status == 500 and SECRET not in reply.body.decode()
    assert SECRET in caplog.text, "but it is on the terminal"


def test_it_listens_on_this_machine_alone(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.key}/" and len(server.key) >= 22


def dripping(server, head, count):
    """So many connections that send a byte after another, and never end; a function that hangs up."""
    wires = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(count)]
    over = threading.Event()

    def drip():
        while not over.wait(0.05):
            for wire in wires:
                with contextlib.suppress(OSError):
                    wire.sendall(b"X")

    for wire in wires:
        wire.sendall(head)
    thread = threading.Thread(target=drip)
    thread.start()

    def hang_up():
        over.set()
        thread.join()
        for wire in wires:
            wire.close()

    return hang_up


def test_whoever_never_ends_a_head_does_not_lock_others_out(server, monkeypatch):
    monkeypatch.setattr(server_module, "_HEAD_SECONDS", 2.0)  # which the head below has, too
    hang_up = dripping(server, b"GET /", server_module._CONNECTIONS + 1)
    try:
        assert request(server, "about").status == 200
    finally:
        hang_up()


def test_a_body_that_never_ends_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(server_module, "_BODY_SECONDS", 0.3)
    head = b"POST /%s/drop HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 9999\r\n\r\n"
    hang_up = dripping(server, head % (server.key.encode(), server.server_port), server_module._CONNECTIONS)
    try:
        assert request(server, "about").status == 200
    finally:
        hang_up()


@pytest.mark.parametrize("requests", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests(server, finder, requests):
    """From eight sides at once, good and bad ones; it answers them all, and leaves no thread behind."""
    count = len(finder.pictures)
    before = threading.active_count()

    def ask(number):
        match number % 5:
            case 0:
                return request(server, f"search?q=word{number % 50}&top=5").status == 200
            case 1:
                return request(server, f"thumbnail/{number % count}").status == 200
            case 2:
                return request(server, f"picture/../{number}").status == 404
            case 3:
                return request(server, "about", headers={"Host": "evil.example"}).status == 403
            case _:
                return request(server, f"search?like={number % count}&top=5").status == 200

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(requests)))
    assert request(server, "about").status == 200
    wait_for(lambda: threading.active_count() <= before + 2)  # a thread ends a moment after its answer is there

import logging
import os
import shutil
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from fullbatch.config.data import Source
from fullbatch.data import block_cache as block_cache_module
from fullbatch.data import remote
from fullbatch.data.block_cache import block_cache
from fullbatch.data.remote import RemoteBlock, RemoteFile, fetch_whole, look_up, matching
from fullbatch.data.store_requests import StoreError
from tests.data.faulty_server import serving

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "_STALLED", 30.0)  # on a busy machine, too
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        server.files["/a.tar"] = CONTENT
        yield server


def test_ranges_and_versions(server):
    file = look_up(f"{server.url}/a.tar")
    assert file.size == len(CONTENT) and file.version
    assert file.fetch(300, 50) == CONTENT[300:350] and server.requests[-1][2] == "bytes=300-349"
    server.files["/a.tar"] = CONTENT[::-1]
    assert look_up(file.url).version != file.version and look_up(file.url).key != file.key


def test_a_server_that_tells_no_version_is_named_once(server, caplog):
    server.tags = False
    remote._warn_of_no_version.cache_clear()
    with caplog.at_level(logging.WARNING, "fullbatch"):
        assert look_up(f"{server.url}/a.tar").fetch(0, 10) == CONTENT[:10]
    assert caplog.messages == [
        f"{server.url} sends no ETag or time of its files: one that another of its size replaces goes unnoticed."
    ]


@pytest.mark.parametrize("fault", ["503", "500", "429", "stall", "cut", "short", "other tag"])
@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_what_passes_is_tried_again_and_said(server, caplog, fault, times, monkeypatch):
    file = look_up(f"{server.url}/a.tar")
    server.faults = {("GET", number): fault for number in range(times)}
    if fault == "stall":

        def wait(seconds):
            if not server.faults:  # the next answer comes, and may be late
                monkeypatch.setattr(remote, "_STALLED", 30.0)

        monkeypatch.setattr(remote, "_STALLED", 1.0)
        monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=wait))
    with caplog.at_level(logging.WARNING, "fullbatch"):
        assert file.fetch(0, 1000) == CONTENT[:1000]
    assert [f"try {attempt} of 5" in line for attempt, line in enumerate(caplog.messages, 2)] == [True] * times
    assert "0.08 s" in caplog.messages[-1] if times == 4 else "0.01 s" in caplog.messages[-1]


def test_connections_may_break(server):
    file = look_up(f"{server.url}/a.tar")
    server.faults = {("GET", number): "drop" for number in range(4)}  # aiohttp tries again by itself on an old one
    assert file.fetch(0, 1000) == CONTENT[:1000]


def test_looking_up_is_tried_again_too(server):
    server.fails = lambda method, path: "503" if len(server.requests) <= 4 else None  # fsspec tries HEAD, then GET
    assert look_up(f"{server.url}/a.tar").size == len(CONTENT)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("503", "after 5 tries: the server answered 503"),
        pytest.param("stall", "after 5 tries: no answer in 0.5 s", marks=pytest.mark.slow),
        ("short", "after 5 tries: 999 bytes came of 1,000"),
        ("other tag", r'after 5 tries: its bytes came with version "other", and the store says it is "[0-9a-f]+"\.'),
        ("404", "there is no such file"),
        ("407", "the server answered 407; name the proxy's user and password"),
        ("403", "the server answered 403; see that the credentials in the environment are"),
        ("whole", "does not serve parts of files"),
    ],
)
def test_what_lasts_is_one_sentence(server, fault, words, monkeypatch):
    file = look_up(f"{server.url}/a.tar")
    if fault == "stall":
        monkeypatch.setattr(remote, "_STALLED", 0.5)
    server.fails = lambda method, path: fault if method == "GET" else None
    before = server.count("GET")
    with pytest.raises(StoreError, match=words) as told:
        file.fetch(0, 1000)
    assert file.url in str(told.value) and "\n" not in str(told.value)
    assert server.count("GET") - before == (5 if "tries" in words else 1)


def test_a_store_that_is_gone(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/a.tar"
        with pytest.raises(StoreError, match="after 5 tries: Cannot connect to host"):
            look_up(url)  # nobody listens there, and nobody else is given that port meanwhile


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_certificate_that_is_not_trusted_is_the_stores_fault(server, tmp_path):
    """It is a ValueError of aiohttp's; it lasts, for a file that is looked up and for a picture."""
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-keyout", key]
    subprocess.run([*made, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(context) as untrusted:
        for ask in (look_up, lambda url: fetch_whole(url, 1000)):
            with pytest.raises(StoreError, match=r"^Cannot read 'https://[^\n]*/a.jpg': .*CERTIFICATE") as told:
                ask(f"{untrusted.url}/a.jpg")
            assert type(told.value) is StoreError


def test_a_file_that_is_replaced_under_the_run(server):
    file = look_up(f"{server.url}/a.tar")
    server.faults["GET", 0] = "replace"
    with pytest.raises(StoreError, match="was replaced during the run"):
        file.fetch(0, 1000)


def test_a_file_that_is_replaced_by_a_longer_one_where_no_answer_names_a_version(server):
    server.tags = False
    file = look_up(f"{server.url}/a.tar")
    assert file.fetch(0, 10) == CONTENT[:10] and server.requests[-1][0] == "HEAD"
    server.files["/a.tar"] += b"more"
    with pytest.raises(StoreError, match="was replaced during the run"):
        file.fetch(0, 1000)


@pytest.mark.parametrize("length", [500, 9_900])
@pytest.mark.parametrize("tags", [True, False])
def test_a_file_that_is_replaced_by_a_shorter_one(server, length, tags):
    """The bytes asked for are gone (416), or some of them are (fewer come)."""
    server.tags = tags
    file = look_up(f"{server.url}/a.tar")
    server.files["/a.tar"] = CONTENT[:length]
    with pytest.raises(StoreError, match="was replaced during the run"):
        file.fetch(9_500, 700)


def test_a_weak_tag_names_the_same_version(server):
    file = look_up(f"{server.url}/a.tar")
    weak = RemoteFile(file.url, file.size, f"W/{file.version}")
    asked = len(server.requests)
    assert weak.fetch(0, 10) == CONTENT[:10] and len(server.requests) == asked + 1


def test_nothing_of_a_file_costs_nothing(server, monkeypatch):
    """As an empty caption in a shard: the second time in a folder that takes no blocks."""
    file = look_up(f"{server.url}/a.tar")
    for _ in range(2):
        assert file.read(100, 0) == file.read(len(CONTENT), 0) == file.read(len(CONTENT), 10) == b""
        block_cache().put("too large", bytes(10))
    assert server.count("GET") == 0


def test_where_no_block_can_be_kept_only_what_is_wanted_is_fetched(server, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 4096)
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0.000001")
    file = look_up(f"{server.url}/a.tar")
    for start in (5000, 6000, 4000):
        assert file.read(start, 200) == CONTENT[start : start + 200]
    RemoteBlock(file, 2).keep()  # ahead of use
    assert [span for method, _, span in server.requests if method == "GET"] == [
        "bytes=4096-8191", "bytes=6000-6199", "bytes=4000-4095", "bytes=4096-4199",
    ]  # fmt: skip
    monkeypatch.setattr(block_cache_module, "_RESTS", 0.0)
    block_cache().put("another", bytes(4096))
    assert file.read(5000, 200) == CONTENT[5000:5200] and server.requests[-1][2] == "bytes=4096-8191"


def test_a_whole_file_in_place_of_a_part_is_not_read(server):
    server.files["/large.tar"] = bytes(50 << 20)
    file = look_up(f"{server.url}/large.tar")
    server.faults["GET", 0] = "whole"
    with pytest.raises(StoreError, match="does not serve parts of files"):
        file.fetch(0, 1000)
    server.faults["GET", 1] = "whole"
    assert look_up(f"{server.url}/a.tar").fetch(0, len(CONTENT)) == CONTENT  # unless the part is the whole


def test_a_child_makes_a_client_of_its_own_and_leaves_the_parents_alone(server):
    file = look_up(f"{server.url}/a.tar")
    child = os.fork()
    if child == 0:
        os._exit(0 if file.fetch(0, 10) == CONTENT[:10] else 1)
    assert os.waitpid(child, 0)[1] == 0
    server.fails = lambda method, path: None
    assert file.fetch(10, 10) == CONTENT[10:20] and server.count("GET") == 2


def test_threads_that_come_at_once_use_one_client(server, monkeypatch):
    import fsspec

    made, make = [], fsspec.filesystem

    def slowly(*words, **options):
        time.sleep(0.05)
        made.append(make(*words, **options))
        return made[-1]

    remote._store.cache_clear()
    monkeypatch.setattr(fsspec, "filesystem", slowly)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(look_up, [f"{server.url}/a.tar"] * 4))) == 1
    assert len(made) == 1


def test_reading_by_way_of_the_cache(server, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 4096)
    file = look_up(f"{server.url}/a.tar")
    for _ in range(2):
        assert file.read(4000, 5000) == CONTENT[4000:9000] and file.read(10_000, 1000) == CONTENT[10_000:]
    assert [span for method, _, span in server.requests if method == "GET"] == [
        "bytes=0-4095", "bytes=4096-8191", "bytes=8192-10239",
    ]  # fmt: skip
    monkeypatch.setenv("FULLBATCH_CACHE_GB", "0")
    assert file.read(4000, 5000) == CONTENT[4000:9000] and server.requests[-1][2] == "bytes=4000-8999"


def _read_all(file):
    os._exit(0 if file.read(0, len(CONTENT)) == CONTENT else 1)


def test_processes_that_want_the_same_block_fetch_it_once(server, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_BYTES", 4096)
    file = look_up(f"{server.url}/a.tar")
    processes = [get_context("fork").Process(target=_read_all, args=(file,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4 and server.count("GET") == 3


def test_a_store_in_memory():
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("b", "a"):
        store.pipe_file(f"/remote_test/{name}.tar", CONTENT)
    assert matching("memory://remote_test/*.tar") == ["memory://remote_test/a.tar", "memory://remote_test/b.tar"]
    file = look_up("memory://remote_test/a.tar")
    assert file.fetch(5, 5) == CONTENT[5:10]
    store.pipe_file("/remote_test/a.tar", CONTENT)
    with pytest.raises(StoreError, match="was replaced"):
        file.fetch(5, 5)
    with pytest.raises(StoreError, match="no such file"):
        look_up("memory://remote_test/c.tar")
    with pytest.raises(ValueError, match="Nothing matches"):
        matching("memory://remote_test/*.csv")


def test_what_cannot_be_read_at_all(monkeypatch):
    with pytest.raises(ValueError, match="ftp:// is no store that can be read; there are s3, gs, hf, http, https"):
        look_up("ftp://host/a.tar")
    with pytest.raises(ValueError, match="a web server lists no files"):
        matching("https://host/*.tar")
    monkeypatch.setitem(remote._PACKAGES, "gs", ("no_such_package", "gs"))
    with pytest.raises(ValueError, match=r"Reading gs:// needs the package no_such_package; .*'fullbatch\[gs\]'"):
        look_up("gs://bucket/a.tar")


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{SECRET}@host/a.tar",
        f"https://me:{SECRET}/x@host/a.tar",
        f"https://{SECRET}@host/a.tar?weight=2",
        f"a.tar::https://me:{SECRET}@host/a.tar",
        f"https://host/a.tar?token={SECRET}",
        f"https://host/a.tar?weight=x&token={SECRET}",
        f"https://host/a.tar?X-Amz-Signature={SECRET}",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(text):
    with pytest.raises(ValueError, match=r"(?i)source") as told:
        Source.parse(text)
    assert SECRET not in str(told.value)


def test_a_web_servers_credentials_come_from_netrc(server, tmp_path, monkeypatch):
    look_up(f"{server.url}/a.tar")
    assert server.users == {None}
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pass\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    look_up(f"{server.url}/a.tar")
    assert server.users == {None, "Basic bWU6cGFzcw=="}


def test_errors_leave_out_what_redirects_may_sign():
    assert SECRET not in remote._judged(OSError(f"cannot reach 'https://x/a?X-Sig={SECRET}&b=1'"))[1]


@pytest.mark.parametrize(
    "url", ["s3://bucket/{000..331}.tar", "hf://datasets/me/set@v1/a.tar", "https://h:80/x@2/a.tar"]
)
def test_urls_as_sources(url):
    source = Source.parse(f"{url}?weight=2&captions=alt")
    assert source.path == url and source.weight == 2 and Source.parse(str(source)) == source


def test_files_are_told_apart():
    files = [RemoteFile("s3://a", 1, "x"), RemoteFile("s3://b", 1, "x"), RemoteFile("s3://a", 2, "x")]
    assert len({file.key for file in [*files, RemoteFile("s3://a", 1, "y")]}) == 4

"""Stores on this machine: a faulty web server (faulty_server.py), and moto's S3 server, which can fail too."""

import random
import threading

import pytest

from fullbatch.data import remote


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Small blocks, short waits, a cache of its own; answers may be late, as they are on a busy machine."""
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "_STALLED", 30.0)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 4096)
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class FaultyS3:
    """moto's server, with faults in the answers to some requests for objects."""

    def __init__(self, answer):
        self.answer, self.share, self.rng, self.faults = answer, 0.0, random.Random(0), 0
        self.requests = []  # method, path, status
        self.refuses = []  # codes of the next answers to GET, each a 400

    def __call__(self, environ, start_response):
        hit = environ["REQUEST_METHOD"] in ("GET", "HEAD") and self.rng.random() < self.share
        self.faults += hit
        if hit and self.rng.random() < 0.5:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if self.refuses and environ["REQUEST_METHOD"] == "GET":
            start_response("400 Bad Request", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{self.refuses.pop(0)}</Code><Message>no</Message></Error>".encode()]
        noted = [environ["REQUEST_METHOD"], environ["PATH_INFO"]]

        def start(status, *others):
            self.requests.append((*noted, int(status.split()[0])))
            return start_response(status, *others)

        body = b"".join(self.answer(environ, start))
        return [body[: len(body) // 2] if hit else body]


@pytest.fixture
def s3(quick, monkeypatch):
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    from werkzeug.serving import WSGIRequestHandler, make_server

    faulty = FaultyS3(server_module.DomainDispatcherApplication(server_module.create_backend_app))
    monkeypatch.setattr(WSGIRequestHandler, "log", lambda *words: None)
    server = make_server("127.0.0.1", 0, faulty, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    remote._store.cache_clear()  # clients know the endpoint of their time
    yield faulty
    remote._store.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bucket(s3):
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    for entry in client.list_objects_v2(Bucket="bucket").get("Contents", ()):
        client.delete_object(Bucket="bucket", Key=entry["Key"])
    client.delete_bucket(Bucket="bucket")

"""The shared store on a real S3-compatible server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.message_texts import Messages
from tests.s3 import BUCKET, S3Server
from xray_runtime.kernel.store.shared import DamagedError, SharedStore, StorageError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "data")
    yield server
    server.kill()


@pytest.fixture
def shared(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> SharedStore:
    """A prefix of this test's own."""
    for name, value in server.variables.items():
        monkeypatch.setitem(os.environ, name, value)
    return opened(f"s3://{BUCKET}/{request.node.name}")


def opened(url: str) -> SharedStore:
    # fsspec keeps one client a bucket, with the credentials it was made with.
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    return SharedStore(url)


def files(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_directories_go_there_and_back(shared: SharedStore, tmp_path: Path) -> None:
    shared.check()
    (tmp_path / "x" / "head").mkdir(parents=True)
    (tmp_path / "x" / "model").write_bytes(os.urandom(11_000_000))
    (tmp_path / "x" / "head" / "h").write_bytes(b"head")
    (tmp_path / "x" / "empty").write_bytes(b"")
    assert shared.index("a/b") is None
    shared.put("a/b", tmp_path / "x")
    shared.put("a/c", tmp_path / "x")
    assert shared.names("a") == ["b", "c"]
    (tmp_path / "y").mkdir()
    shared.get("a/b", tmp_path / "y")
    assert files(tmp_path / "y") == files(tmp_path / "x")
    shared.remove("a/b")
    shared.remove("a/b")
    assert shared.names("a") == ["c"]


def test_a_changed_object_is_found(
    shared: SharedStore, server: S3Server, tmp_path: Path, message_texts: Messages
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model").write_bytes(b"weights")
    shared.put("a", tmp_path / "x")
    (stored,) = [path for path in server.objects.rglob("model") if shared.url.rsplit("/", 1)[1] in path.parts]
    stored.write_bytes(b"weightz")
    (tmp_path / "y").mkdir()
    with message_texts.raises(DamagedError):
        shared.get("a", tmp_path / "y")


def test_a_server_that_is_away_delays(shared: SharedStore, server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model").write_bytes(b"weights")
    server.kill()
    done = threading.Thread(target=shared.put, args=("a", tmp_path / "x"))
    done.start()
    time.sleep(2)
    assert done.is_alive()
    server.start()
    done.join(120)
    (tmp_path / "y").mkdir()
    assert shared.get("a", tmp_path / "y") is not None
    assert files(tmp_path / "y") == files(tmp_path / "x")


def test_an_unusable_store_is_named_at_once(
    shared: SharedStore, monkeypatch: pytest.MonkeyPatch, message_texts: Messages
) -> None:
    with message_texts.raises(StorageError):
        SharedStore("s3://absent/x").check()
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "wrong")
    with message_texts.raises(StorageError) as refused:
        opened(shared.url).write("a", b"x")
    assert "wrong" not in str(refused.value)

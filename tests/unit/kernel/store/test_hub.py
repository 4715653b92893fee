"""Names on a hub: one line where it cannot be reached, before anything is computed, and no limit on its answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from xray_runtime.kernel import network
from xray_runtime.kernel.store import hub
from xray_runtime.kernel.store.hub import OutsideError, check_on_hub


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for scheme in ("http", "https"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme.upper()}_PROXY", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    check_on_hub.cache_clear()
    yield
    check_on_hub.cache_clear()


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def cached(tmp_path: Path, name: str) -> None:
    main = tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "refs" / "main"
    main.parent.mkdir(parents=True)
    main.write_text("c" * 40)


def test_a_hub_that_refuses_is_one_line_even_where_a_copy_is_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The port of a server that is gone.
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{gone}")
    said = (
        r"^base\.model: 'org/name': cannot reach the Hugging Face hub \(127\.0\.0\.1: .*refused\); give a directory, "
        r"or set HF_HUB_OFFLINE=1 with a cached copy$"
    )
    with pytest.raises(OutsideError, match=said):
        check_on_hub("org/name", "base.model", "model")
    cached(tmp_path, "org/name")
    with pytest.raises(OutsideError, match=said):
        check_on_hub("org/name", "base.model", "model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_on_hub("org/name", "base.model", "model")
    with pytest.raises(OutsideError, match=r"^prepare\.source: 'org/name' cannot be looked up .* not downloaded"):
        check_on_hub("org/name", "prepare.source", "dataset")


def test_an_address_that_never_answers_takes_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # As looking up a name does where its server is away: the socket's own limit does not count there.
    release, ended = threading.Event(), threading.Event()

    def never(*_: Any, **__: Any) -> None:
        release.wait(60)
        ended.set()
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(network, "CONNECT_S", 0.2)
    with pytest.raises(OutsideError, match="cannot reach the Hugging Face hub"):
        check_on_hub("org/name", "base.model", "model")
    assert not ended.is_set()
    release.set()


def test_a_slow_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    asked: list[float] = []

    class Slow:
        def model_info(self, name: str, timeout: float) -> Any:
            time.sleep(0.5)
            asked.append(timeout)
            return SimpleNamespace(sha="a" * 40)

    monkeypatch.setattr(huggingface_hub, "HfApi", Slow, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(network, "CONNECT_S", 0.3)
    assert hub.commit("org/name", "base.model", "model") == "a" * 40
    assert asked == [hub.ANSWER_S]


def test_a_proxy_is_what_has_to_answer(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
    assert hub.unreachable("https://hub.invalid") is not None
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    assert hub.unreachable("https://hub.invalid") is None


@pytest.mark.parametrize("value", ["smollm2-135m", "./here", "model.gguf", "here"])
def test_invalid_hub_names_send_no_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(hub, "unreachable", lambda endpoint: pytest.fail("asked"))
    check_on_hub(value, "base.model", "model")

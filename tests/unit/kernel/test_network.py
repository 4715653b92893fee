"""Addresses of servers: one line within seconds where one does not answer, and no proxy for loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from xray_runtime.kernel import network
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.network import check_addresses, exempt_loopback, require_mlflow


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_S", 0.5)
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    require_mlflow.cache_clear()


@contextlib.contextmanager
def server(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


@contextlib.contextmanager
def gone() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def another_protocol() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection = listener.accept()[0]
            connection.sendall(b"220 mail.example ready\r\n")
            connection.recv(1024)
            connection.close()

        threading.Thread(target=greet, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("name", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (gone(), "does not answer (Connection refused); must be "),
        (silent(), "does not answer ("),
        (another_protocol(), "does not answer ("),
        (server(502, b"Bad Gateway"), "gives HTTP 502)"),
        (server(404, b""), "gives HTTP 404)"),
        (server(200, b"<html>another page</html>"), "gives HTTP 200)"),
        (contextlib.nullcontext("http://host.invalid:5000"), "does not answer ("),
        (contextlib.nullcontext("http://127.0.0.1:99999"), "does not answer ("),
    ],
    ids=["gone", "silent", "another protocol", "bad gateway", "no page", "another page", "unknown host", "no port"],
)
def test_a_server_that_does_not_answer_is_one_line(
    name: str, what: contextlib.AbstractContextManager[str], said: str
) -> None:
    what = what if not hasattr(what, "_recreate_cm") else what._recreate_cm()
    with what as address, pytest.raises(ConfigError) as caught:
        check_addresses({name: address})
    text = str(caught.value)
    assert text.startswith(f"{name}: {address!r} ")
    assert said in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "status", "body"),
    [
        ("PREFECT_API_URL", 200, b"true"),
        ("PREFECT_API_URL", 401, b""),
        ("MLFLOW_TRACKING_URI", 200, b'{"experiment": {}}'),
        ("MLFLOW_TRACKING_URI", 404, b'{"error_code": "RESOURCE_DOES_NOT_EXIST"}'),
        ("MLFLOW_TRACKING_URI", 403, b""),
    ],
)
def test_servers_that_answer_are_taken(name: str, status: int, body: bytes) -> None:
    with server(status, body) as address:
        check_addresses({name: address})


@pytest.mark.parametrize("address", ["sqlite:////data/mlflow.db", "databricks", "mlruns", "file:///data/mlruns"])
def test_stores_without_a_host_are_not_asked(address: str) -> None:
    check_addresses({"MLFLOW_TRACKING_URI": address})


@pytest.mark.parametrize(
    ("name", "address"),
    [("MLFLOW_TRACKING_URI", "postgresql://user:secret@127.0.0.1:{port}/mlflow"), ("RAY_ADDRESS", "127.0.0.1:{port}")],
)
def test_other_protocols_are_only_connected_to(name: str, address: str) -> None:
    with silent() as listening:
        check_addresses({name: address.format(port=listening.rpartition(":")[2])})
    with gone() as unused, pytest.raises(ConfigError, match=rf"^{name}: .*127\.0\.0\.1: Connection refused") as caught:
        check_addresses({name: address.format(port=unused.rpartition(":")[2])})
    assert "secret" not in str(caught.value)


def test_no_address_is_no_request() -> None:
    check_addresses({})
    check_addresses({"PREFECT_API_URL": "", "MLFLOW_TRACKING_URI": "", "RAY_ADDRESS": "auto"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"no_proxy": "example.com"}, "example.com,127.0.0.1,localhost,::1"),
        ({"no_proxy": "localhost, 127.0.0.1"}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "example.com"}, "example.com,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_loopback_needs_no_proxy(given: dict[str, str], expected: str) -> None:
    environment = dict(given)
    exempt_loopback(environment)
    assert (environment["no_proxy"], environment["NO_PROXY"]) == (expected, expected)


def test_requests_to_loopback_pass_a_dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import requests

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(200, b"{}") as address:
        with pytest.raises(ConfigError, match="does not answer"):
            check_addresses({"MLFLOW_TRACKING_URI": address})
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("no_proxy", "")
        exempt_loopback()
        check_addresses({"MLFLOW_TRACKING_URI": address})
        # The clients of Prefect and of MLflow.
        assert httpx.get(address).text == "{}"
        assert requests.get(address, timeout=10).text == "{}"

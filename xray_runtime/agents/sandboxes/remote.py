"""Sandboxes behind a service, which may stand for Docker or a cloud. Its three calls, as JSON:

    POST   URL/sandboxes          {"limits": {...}, "files": tar.gz in base64 or null, "gateway": url or null} → {"id"}
    POST   URL/sandboxes/ID/run   {"command": [...], "stdin": text, "variables": {...}}
                                  → {"code": n, "output": end of its standard output} or {"broken": limit}
    DELETE URL/sandboxes/ID       ends what runs, and removes it

The service holds the limits of `base.Limits`, and lets the sandbox reach the gateway alone.
"""

from __future__ import annotations

import base64
import io
import logging
import tarfile
import threading
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from xray_runtime.agents.sandboxes.base import Box, Ended, Program
from xray_runtime.agents.worker_process import in_short
from xray_runtime.kernel.bounded_http import PLAIN, parsed, read
from xray_runtime.kernel.credentials import key_header

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""Time for an answer, after a program's own limit."""
OUTPUT_CHARS = 65_536


class RemoteSandbox:
    """`base.Sandbox`. The service's key is that of its host in XRAY_API_KEYS."""

    def __init__(self, url: str) -> None:
        self._url, self._client = url.rstrip("/"), httpx.Client(headers=key_header(url) | PLAIN, timeout=GRACE_S)
        self._limits: dict[str, float] = {}
        """Sandbox → seconds of a run."""
        self._runs = set[Future[Ended]]()

    def start(self, box: Box) -> str:
        files = None if box.files is None else base64.b64encode(_packed(box.files)).decode()
        try:
            answer = self._ask(
                "sandboxes", GRACE_S, {"limits": asdict(box.limits), "files": files, "gateway": box.gateway}
            )
            name = answer["id"]
            if not isinstance(name, str) or not name.isalnum():
                raise ValueError(f"the id {name!r} is not letters and digits")
        except (httpx.HTTPError, ValueError, KeyError, RuntimeError) as error:
            raise OSError(f"{self._url}: {in_short(error)}") from error
        self._limits[name] = box.limits.timeout_s
        return name

    def run(self, name: str, program: Program) -> Future[Ended]:
        ended = Future[Ended]()
        self._runs.add(ended)
        ended.add_done_callback(self._runs.discard)
        threading.Thread(target=lambda: ended.set_result(self._run(name, program)), daemon=True).start()
        return ended

    def stop(self, name: str) -> None:
        if self._limits.pop(name, None) is None:
            return
        try:
            with self._client.stream("DELETE", f"{self._url}/sandboxes/{name}") as answer:
                answer.raise_for_status()
        except (httpx.HTTPError, RuntimeError) as error:
            log.warning("%s: sandbox %s was not removed: %s", self._url, name, in_short(error))

    def address(self, gateway: str) -> str:
        return gateway

    def close(self) -> None:
        for name in list(self._limits):
            self.stop(name)
        wait(list(self._runs), GRACE_S)
        self._client.close()

    def _run(self, name: str, program: Program) -> Ended:
        try:
            answer = self._ask(f"sandboxes/{name}/run", self._limits[name] + GRACE_S, asdict(program))
            return _ended(answer)
        except (httpx.HTTPError, ValueError, KeyError, RuntimeError) as error:
            return Ended(infrastructure=f"{self._url}: {in_short(error)}")

    def _ask(self, path: str, timeout_s: float, body: dict[str, Any]) -> dict[str, Any]:
        with self._client.stream("POST", f"{self._url}/{path}", json=body, timeout=timeout_s) as answer:
            if not answer.is_success:
                raise RuntimeError(f"status {answer.status_code}")
            content = parsed(read(answer, timeout_s))
        if not isinstance(content, dict):
            raise ValueError("the answer is not an object")
        return content


def _ended(answer: dict[str, Any]) -> Ended:
    if answer.get("broken") is not None:
        return Ended(broken=str(answer["broken"]))
    code, output = answer["code"], answer["output"]
    if not isinstance(code, int) or isinstance(code, bool) or not isinstance(output, str):
        raise ValueError(f"code = {code!r} and output = {str(output)[:50]!r} must be a number and a text")
    return Ended(code, output[-OUTPUT_CHARS:])


def _packed(directory: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(directory, ".")
    return content.getvalue()

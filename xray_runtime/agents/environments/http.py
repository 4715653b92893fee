"""Environments behind HTTP.

    def shop():
        return from_http("http://localhost:8000/shop")()

    POST /reset      {"task": {...}, "seed": n}          → {"episode": name} and the fields of a Start
    POST /step       {"episode": name, "reply": text}    → the fields of a Step
    DELETE /NAME     ends an episode; optional for servers

Missing fields have the defaults of `Start` and `Step`; unknown fields are refused. Every reset begins a new episode: a
repeated one gets another name, and one whose process was killed is never deleted, so servers should expire episodes.
API keys come from the environment, as for scoring services.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from xray_runtime.kernel.bounded_http import PLAIN, certificates
from xray_runtime.kernel.credentials import has_login, key_header, strip_credentials
from xray_runtime.methods.common.environment_protocol import Environment, Start, Step
from xray_runtime.rewards.remote import post
from xray_runtime.rewards.source import described

CONNECTS, PAUSE_S = 4, 0.5
"""Connections are retried. A request that was sent is not, since the server may have processed it."""
CLOSE_S = 5.0

T = TypeVar("T", Start, Step)


def from_http(url: str, timeout_s: float = 25.0) -> Callable[[], Environment]:
    """A factory of environments behind an HTTP server. A wrong or missing answer fails the episode.

    Args:
        timeout_s: limit for one answer; it should be below the stage's `environment.timeout_s`.

    Raises:
        ValueError: `url` is not an HTTP address or holds a login, or the time is not positive.
    """
    if not re.fullmatch(r"https?://[^\s?#/]+[^\s?#]*", url) or has_login(url):
        shown = strip_credentials(url)
        raise ValueError(f"url = {shown!r} is not allowed: must be http(s)://HOST/PATH, without a login or a query")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s = {timeout_s!r} is not allowed: must be above 0")
    return partial(_HttpEnvironment, url.rstrip("/"), timeout_s)


class _HttpEnvironment:
    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client = httpx.AsyncClient(headers=key_header(url) | PLAIN, timeout=timeout_s, verify=certificates())
        self._episode: str | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        answer = await self._ask("/reset", {"task": task, "seed": seed})
        episode = answer.pop("episode", None)
        if not isinstance(episode, str) or not episode:
            raise ValueError(f"{self._url}/reset: episode is {episode!r}: must be a name (text)")
        self._episode = episode
        return self._as(Start, "/reset", answer)

    async def step(self, reply: str) -> Step:
        return self._as(Step, "/step", await self._ask("/step", {"episode": self._episode, "reply": reply}))

    async def close(self) -> None:
        if self._episode is not None:
            with contextlib.suppress(httpx.HTTPError):
                url = f"{self._url}/{quote(self._episode, safe='')}"
                async with self._client.stream("DELETE", url, timeout=CLOSE_S):
                    pass  # its answer is not read
        await self._client.aclose()

    async def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        url = self._url + path
        try:
            # httpx limits single reads, so a server that sends a byte from time to time would never time out.
            async with asyncio.timeout(self._timeout_s):
                answer = await self._post(url, request)
        except TimeoutError as error:
            raise ValueError(f"{url}: no answer within timeout_s = {self._timeout_s:g}") from error
        except httpx.HTTPError as error:
            raise ValueError(f"{url}: {error if str(error) else described(error)}") from error
        if not isinstance(answer, dict):
            raise ValueError(f"{url}: the answer is a {type(answer).__name__}: must be a JSON object")
        return answer

    async def _post(self, url: str, request: dict[str, Any]) -> Any:
        for attempt in range(CONNECTS):
            try:
                return await post(self._client, url, request)
            except httpx.ConnectError:
                if attempt == CONNECTS - 1:
                    raise
            await asyncio.sleep(PAUSE_S * 2**attempt)

    def _as(self, kind: type[T], path: str, answer: dict[str, Any]) -> T:
        known = [field.name for field in fields(kind)]
        unknown = sorted(set(answer) - set(known))
        if unknown:
            raise ValueError(f"{self._url}{path}: {unknown[0]!r} is not allowed: fields are {', '.join(known)}")
        # The worker checks values, as for every environment.
        return kind(**answer)

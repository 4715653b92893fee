"""The client of one server: vLLM's own routes, its answers bounded in size and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from pydantic import TypeAdapter, ValidationError

from xray_runtime.engines.generators.server.model import Architecture
from xray_runtime.engines.sampling import Reply, Sampling
from xray_runtime.engines.top_tokens import TopTokens
from xray_runtime.kernel.bounded_http import PLAIN, beginning, parsed, read_async
from xray_runtime.kernel.credentials import key_header
from xray_runtime.kernel.errors import cause_line

CONNECT_S = 5.0
LOWEST_LOGPROB = -9999.0
IDLE_S = 2.0
"""A connection is used again if it was idle for less; the server closes it after 5 s."""


class ServerError(Exception):
    """A server answers with an error, or not at all; one line without its address."""


@dataclass(frozen=True, kw_only=True)
class Description(Architecture):
    """A server's model, and how it computes."""

    groups: list[list[str]]
    """The tensors, those together that must be written together."""
    dtype: str
    device: str
    threads: int
    max_length: int
    """Longest prompt and reply together, in tokens."""


_DESCRIPTION = TypeAdapter(Description)


class Connection:
    """The client of the server at `address`, within an event loop.

    Every method raises ServerError if the server does not answer as it should, or not within `timeout_s`.
    """

    def __init__(self, client: httpx.AsyncClient, address: str, timeout_s: float) -> None:
        self._client, self._address, self._timeout_s = client, address.rstrip("/"), timeout_s
        self._headers = PLAIN | key_header(address)

    async def describe(self) -> Description:
        found = await self._post("/collective_rpc", {"method": "xray_description"})
        try:
            return _DESCRIPTION.validate_python(found["results"][0])
        except (KeyError, IndexError, TypeError, ValidationError) as error:
            raise ServerError(f"it describes no model ({cause_line(error)})") from None

    async def weights(self) -> str:
        """The name of the weights that it holds."""
        return str((await self._request("GET", "/weight_info")).get("weight_version"))

    async def begin_update(self) -> None:
        """Stop what runs, empty caches, and begin a weight update. Until its end the weights have no name."""
        await self._post("/pause?mode=abort")
        await self._post("/update_weight_version", {"new_version": ""})
        await self._post("/collective_rpc", {"method": "xray_abandon_update"})
        await self._post("/start_weight_update")

    async def update(self, chunk: bytes) -> None:
        """Send a chunk of weights, as `encoded`."""
        await self._request("POST", "/update_weights", chunk)

    async def finish_update(self, weights: str) -> None:
        """End the update: the server holds `weights`, and samples again."""
        await self._post("/finish_weight_update", {"weight_version": weights})
        await self._post("/resume")

    async def generate(self, prompt: list[int], seed: int, sampling: Sampling, weights: str) -> Reply:
        """A reply, all of whose tokens were sampled with `weights`."""
        answer = await self._post(
            "/inference/v1/generate", {"token_ids": prompt, "sampling_params": _parameters(seed, sampling)}
        )
        try:
            [choice] = answer["choices"]
            token_ids = [int(token) for token in choice["token_ids"]]
            logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
            top = _top_tokens(choice["logprobs"]["content"], sampling.reported) if sampling.reported else None
            reason, held = choice["finish_reason"], [str(span["version"]) for span in choice["weight_versions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"its answer is not a reply ({type(error).__name__}: {error})") from None
        if held != [weights]:
            raise ServerError("it samples with other weights: it was started again, or another run uses it")
        if reason not in ("stop", "length") or len(token_ids) != len(logprobs):
            raise ServerError(f"its reply is not complete (it ended with {reason!r})")
        return Reply(token_ids, logprobs, top=top)

    async def _post(self, path: str, body: object = None) -> Any:
        return await self._request("POST", path, None if body is None else json.dumps(body).encode())

    async def _request(self, method: str, path: str, content: bytes | None = None) -> Any:
        headers = self._headers | ({} if content is None else {"Content-Type": "application/json"})
        try:
            return await asyncio.wait_for(self._answer(method, path, headers, content), self._timeout_s)
        except TimeoutError:
            raise ServerError(f"no answer within timeout_s = {self._timeout_s:g}") from None
        except httpx.HTTPError as error:
            raise ServerError(f"{type(error).__name__}: {error or 'no answer'}") from None

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], content: bytes | None) -> Any:
        url = self._address + path
        async with self._client.stream(method, url, headers=headers, content=content) as response:
            answer = await read_async(response)
        if response.status_code == httpx.codes.NOT_FOUND:
            raise ServerError(f"it has no {path}: start it with `xray generator`")
        if not response.is_success:
            raise ServerError(f"status {response.status_code} {beginning(answer)}")
        return parsed(answer) if answer else None


def client(timeout_s: float) -> httpx.AsyncClient:
    """The connections to all servers."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)), limits=limits)


def _top_tokens(content: list[Any], reported: int) -> TopTokens:
    """The likeliest tokens at each place of a reply; a server says −9999 for −∞, which JSON has not."""
    places = [sorted(entry["top_logprobs"], key=lambda each: int(each["rank"]))[:reported] for entry in content]
    ids = np.array([[int(each["token_id"]) for each in place] for place in places], np.int32)
    logprobs = np.array([[float(each["logprob"]) for each in place] for place in places], np.float32)
    return TopTokens(ids, np.where(logprobs > LOWEST_LOGPROB, logprobs, -np.inf))


def _parameters(seed: int, sampling: Sampling) -> dict[str, object]:
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed,
        # The sampled token is one of them, and may be none of the likeliest.
        "logprobs": 1 + sampling.reported if sampling.reported else 0,
        "detokenize": False,
        # The server's model may name end tokens of its own.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
    }

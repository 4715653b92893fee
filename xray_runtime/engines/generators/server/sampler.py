"""All servers as one sampler: spreads prompts, drops what fails, and brings the weights up to date."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.engines.generators.server.chunks import chunks
from xray_runtime.engines.generators.server.connection import Connection, Description, ServerError, client
from xray_runtime.engines.generators.server.model import Architecture, architecture, difference
from xray_runtime.engines.sampling import Reply, Sampler, Sampling
from xray_runtime.engines.sync.versioned import Tensors
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.signs import part_done

if TYPE_CHECKING:
    import httpx

    from xray_runtime.engines.generators.server import ServerConfig

log = logging.getLogger(__name__)


class NoServersError(RuntimeError):
    """No server can sample; the message names each with its problem."""


@dataclass
class _Server:
    address: str
    is_current: bool = False
    """Whether it holds the weights to sample with, as far as is known."""
    problem: str = ""
    failed_at: float = -float("inf")

    def drop(self, problem: ServerError) -> None:
        if self.is_current:
            log.warning("%s is not used for now: %s", self.address, problem)
        self.is_current, self.problem, self.failed_at = False, str(problem), time.monotonic()


Do = Callable[[_Server, Connection], Coroutine[Any, Any, None]]


class ServerSampler(Sampler):
    """The servers of `config`, which hold a model like the one in `directory`.

    Nothing is sent before it is needed: `catch_up` brings all weights to a server that does not hold them, `write` an
    update to the others.

    Raises:
        ConfigError: a server has another model, or computes in another way.
        NoServersError: none answers.
    """

    def __init__(self, directory: Path, max_length: int, config: ServerConfig, runtime: RuntimeConfig) -> None:
        self._config, self._runtime, self._needs = config, runtime, (architecture(directory), max_length)
        self._dtype: torch.dtype = getattr(torch, config.precision(runtime.device))
        self._weights = ""
        """The name of the weights to sample with."""
        try:
            self._servers, groups = find_servers(config, runtime, *self._needs)
        except ValueError as error:
            raise ConfigError(f"generator.{error}") from None
        self._group_of = {name: frozenset(group) for group in groups for name in group}

    def layers_of(self, names: set[str]) -> set[str]:
        return names.union(*(self._group_of.get(name, ()) for name in names))

    def write(self, tensors: Tensors, version: int) -> None:
        current = [server for server in self._servers if server.is_current]
        before, self._weights = self._weights, f"{secrets.token_hex(8)}-{version}"
        if current:
            asyncio.run(self._push(current, tensors, before))
            if not any(server.is_current for server in current):
                raise NoServersError(f"no server took version {version} of the weights: {_problems(current)}")

    def catch_up(self, held: Callable[[], Tensors], version: int) -> None:
        none_left, now = not any(server.is_current for server in self._servers), time.monotonic()
        behind = [
            server
            for server in self._servers
            if not server.is_current and (none_left or now - server.failed_at >= self._config.retry_s)
        ]
        if behind:
            self._weights = self._weights or f"{secrets.token_hex(8)}-{version}"
            asyncio.run(self._bring(behind, held))
        if not any(server.is_current for server in self._servers):
            raise NoServersError(_none_left(self._servers))

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        return asyncio.run(self._sample(prompts, seeds, sampling))

    async def _bring(self, servers: Sequence[_Server], held: Callable[[], Tensors]) -> None:
        """Push all weights to `servers`, which do not hold them."""
        described = await _described(servers, self._config)
        fit = []
        for server in servers:
            try:
                if server.address in described:
                    check(described[server.address], self._config, self._runtime, *self._needs)
                    fit.append(server)
            except ServerError as error:
                server.drop(error)
        if fit:
            await self._push(fit, held(), None)

    async def _push(self, servers: Sequence[_Server], tensors: Tensors, before: str | None) -> None:
        """Push `tensors` as `self._weights`, chunk by chunk to all `servers`; those that fail are dropped.

        Args:
            before: the weights that a server must hold, since an update changes a part of them; None: `tensors` are
                all.
        """

        async def begin(server: _Server, connection: Connection) -> None:
            if before is not None and await connection.weights() != before:
                raise ServerError("it holds other weights: it was started again, or another run uses it")
            await connection.begin_update()

        async def update(server: _Server, connection: Connection) -> None:
            await connection.update(content)

        async def finish(server: _Server, connection: Connection) -> None:
            await connection.finish_update(self._weights)
            server.is_current, server.problem = True, ""

        for server in servers:
            server.is_current, server.problem = False, "its update broke off"
        at_work = await self._each(servers, begin)
        for chunk in chunks(tensors, self._dtype):
            content = json.dumps({"update_info": chunk}).encode()
            at_work = await self._each(at_work, update)
            part_done()
        await self._each(at_work, finish)

    async def _sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        replies: dict[int, Reply] = {}
        left = deque(range(len(prompts)))

        async def work(server: _Server, connection: Connection) -> None:
            while left and server.is_current:
                row = left.popleft()
                try:
                    replies[row] = await connection.generate(prompts[row], seeds[row], sampling, self._weights)
                except ServerError as error:
                    left.append(row)
                    server.drop(error)
                part_done()

        async with client(self._config.timeout_s) as connections:
            while left:
                current = [server for server in self._servers if server.is_current]
                if not current:
                    raise NoServersError(_none_left(self._servers))
                each = min(self._config.concurrency, -(-len(left) // len(current)))
                # In turns, so that all get their share of the first prompts.
                workers = [(s, self._connection(connections, s)) for _ in range(each) for s in current]
                await asyncio.gather(*(work(*worker) for worker in workers))
        return [replies[row] for row in range(len(prompts))]

    async def _each(self, servers: Sequence[_Server], do: Do) -> list[_Server]:
        return await _each(servers, do, self._config.timeout_s)

    def _connection(self, connections: httpx.AsyncClient, server: _Server) -> Connection:
        return Connection(connections, server.address, self._config.timeout_s)


def check(
    found: Description,
    config: ServerConfig,
    runtime: RuntimeConfig,
    wanted: Architecture | None = None,
    max_length: int = 0,
) -> None:
    """Raises ServerError if a server cannot sample for a run; one line.

    Args:
        wanted: the model to sample from; None: it is not known yet.
        max_length: longest prompt and reply together, in tokens.
    """
    dtype = config.precision(runtime.device)
    if found.dtype != dtype:
        raise ServerError(f"it computes in {found.dtype}, and generator.dtype = {config.dtype!r} asks for {dtype}")
    if found.device == "cpu" and found.threads != runtime.threads:
        raise ServerError(
            f"it computes with {found.threads} threads, and runtime.threads = {runtime.threads}, which changes rounding"
        )
    if found.max_length < max_length:
        raise ServerError(f"its --max-length is {found.max_length} tokens, and the stage needs {max_length}")
    if wanted is not None and (why := difference(found, wanted)) is not None:
        raise ServerError(f"it has another model: {why}")


def find_servers(
    config: ServerConfig, runtime: RuntimeConfig, wanted: Architecture | None = None, max_length: int = 0
) -> tuple[list[_Server], list[list[str]]]:
    """The servers of `config`, and the tensors of their model that must be written together; arguments as in `check`.

    Raises:
        NoServersError: none answers.
        ValueError: one that answers cannot sample for the run; the message begins with a field.
    """
    servers = [_Server(address) for address in config.addresses]
    described = asyncio.run(_described(servers, config))
    if not described:
        raise NoServersError(_none_left(servers))
    for address, description in described.items():
        try:
            check(description, config, runtime, wanted, max_length)
        except ServerError as error:
            raise ValueError(f"addresses: {address}: {error}") from None
    return servers, next(iter(described.values())).groups


async def _described(servers: Sequence[_Server], config: ServerConfig) -> dict[str, Description]:
    """Address → description, of those that answer; the others are dropped."""
    found: dict[str, Description] = {}

    async def describe(server: _Server, connection: Connection) -> None:
        found[server.address] = await connection.describe()

    await _each(servers, describe, config.timeout_s)
    return found


async def _each(servers: Sequence[_Server], do: Do, timeout_s: float) -> list[_Server]:
    """`do` with all of `servers` at the same time; returns those with which it did not fail, and drops the rest."""

    async def tried(server: _Server) -> bool:
        try:
            await do(server, Connection(connections, server.address, timeout_s))
        except ServerError as error:
            server.drop(error)
            return False
        return True

    async with client(timeout_s) as connections:
        done = await asyncio.gather(*map(tried, servers))
    return [server for server, is_done in zip(servers, done, strict=True) if is_done]


def _none_left(servers: Sequence[_Server]) -> str:
    return f"no server can sample: {_problems(servers)}"


def _problems(servers: Sequence[_Server]) -> str:
    return "; ".join(f"{server.address}: {server.problem}" for server in servers)

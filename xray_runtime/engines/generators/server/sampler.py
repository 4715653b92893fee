"""All servers as one sampler: spreads prompts, drops what fails, and brings the weights up to date."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from xray_runtime.engines.generators.server.chunks import chunks
from xray_runtime.engines.generators.server.config import ServerConfig
from xray_runtime.engines.generators.server.connection import Connection, ServerError, client
from xray_runtime.engines.generators.server.model import architecture
from xray_runtime.engines.generators.server.servers import ServerState, describe, find_servers, no_servers, with_each
from xray_runtime.engines.sampling import Reply, Sampler, Sampling
from xray_runtime.engines.sync.versioned import Tensors
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.signs import part_done


class ServerSampler(Sampler):
    """The servers of `config`, which hold a model like the one in `directory`.

    Nothing is sent before it is needed: `catch_up` brings all weights to a server that does not hold them, `write` an
    update to the others.

    Raises:
        ConfigError: a server has another model, or computes in another way.
        NoServersError: none answers.
    """

    def __init__(self, directory: Path, max_length: int, config: ServerConfig, runtime: RuntimeConfig) -> None:
        self._config, self._timeout_s = config, config.timeout_s
        self._needs = replace(config.needs(runtime), model=architecture(directory), max_length=max_length)
        self._dtype: torch.dtype = getattr(torch, self._needs.dtype)
        self._weights = ""
        """The name of the weights to sample with."""
        try:
            self._servers, groups = find_servers(config.addresses, self._needs, self._timeout_s)
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
                raise no_servers(f"no server took version {version} of the weights", current)

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
            raise no_servers("no server can sample", self._servers)

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        return asyncio.run(self._sample(prompts, seeds, sampling))

    async def _bring(self, servers: Sequence[ServerState], held: Callable[[], Tensors]) -> None:
        """Push all weights to `servers`, which do not hold them."""
        described = await describe(servers, self._timeout_s)
        fit = []
        for server in servers:
            try:
                if server.address in described:
                    self._needs.check(described[server.address])
                    fit.append(server)
            except ServerError as error:
                server.drop(error)
        if fit:
            await self._push(fit, held(), None)

    async def _push(self, servers: Sequence[ServerState], tensors: Tensors, before: str | None) -> None:
        """Push `tensors` as `self._weights`, chunk by chunk to all `servers`; those that fail are dropped.

        Args:
            before: the weights that a server must hold, since an update changes a part of them; None: `tensors` are
                all.
        """

        async def begin(server: ServerState, connection: Connection) -> None:
            if before is not None and await connection.weights() != before:
                raise ServerError("it holds other weights: it was started again, or another run uses it")
            await connection.begin_update()

        async def update(server: ServerState, connection: Connection) -> None:
            await connection.update(content)

        async def finish(server: ServerState, connection: Connection) -> None:
            await connection.finish_update(self._weights)
            server.is_current, server.problem = True, ""

        for server in servers:
            server.is_current, server.problem = False, "its update broke off"
        at_work = await with_each(servers, begin, self._timeout_s)
        for chunk in chunks(tensors, self._dtype):
            content = json.dumps({"update_info": chunk}).encode()
            at_work = await with_each(at_work, update, self._timeout_s)
            part_done()
            if not at_work:
                return
        await with_each(at_work, finish, self._timeout_s)

    async def _sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        replies: dict[int, Reply] = {}
        left = deque(range(len(prompts)))

        async def work(server: ServerState, connection: Connection) -> None:
            while left and server.is_current:
                row = left.popleft()
                try:
                    replies[row] = await connection.generate(prompts[row], seeds[row], sampling, self._weights)
                except ServerError as error:
                    left.append(row)
                    server.drop(error)
                part_done()

        async with client(self._timeout_s) as connections:
            while left:
                current = [server for server in self._servers if server.is_current]
                if not current:
                    raise no_servers("no server can sample", self._servers)
                each = min(self._config.concurrency, -(-len(left) // len(current)))
                # In turns, so that all get their share of the first prompts.
                workers = [
                    (s, Connection(connections, s.address, self._timeout_s)) for _ in range(each) for s in current
                ]
                await asyncio.gather(*(work(*worker) for worker in workers))
        return [replies[row] for row in range(len(prompts))]

"""The servers of a run: which of them answer, and whether they can sample for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from xray_runtime.engines.generators.server.connection import Connection, Description, ServerError, client
from xray_runtime.engines.generators.server.model import Architecture, difference

log = logging.getLogger(__name__)


class NoServersError(RuntimeError):
    """No server can sample; the message names each with its problem."""


@dataclass
class ServerState:
    """The state of a server, as far as it is known."""

    address: str
    is_current: bool = False
    """Whether it holds the weights to sample with."""
    problem: str = ""
    failed_at: float = -float("inf")

    def drop(self, problem: ServerError) -> None:
        if self.is_current:
            log.warning("%s is not used for now: %s", self.address, problem)
        self.is_current, self.problem, self.failed_at = False, str(problem), time.monotonic()


@dataclass(frozen=True)
class Needs:
    """The needs that a server must meet to sample for a run."""

    dtype: str
    threads: int
    """On CPU; their number changes rounding."""
    model: Architecture | None = None
    """None: it is not known yet."""
    max_length: int = 0
    """Longest prompt and reply together, in tokens."""

    def check(self, found: Description) -> None:
        """Raises ServerError if a server does not have it; one line."""
        if found.dtype != self.dtype:
            raise ServerError(f"it computes in {found.dtype}, and generator.dtype asks for {self.dtype}")
        if found.device == "cpu" and found.threads != self.threads:
            raise ServerError(
                f"it rounds differently: it has {found.threads} threads, and runtime.threads = {self.threads}"
            )
        if found.max_length < self.max_length:
            raise ServerError(f"its --max-length is {found.max_length} tokens, and the stage needs {self.max_length}")
        if self.model is not None and (why := difference(found, self.model)) is not None:
            raise ServerError(f"it has another model: {why}")


def no_servers(what: str, servers: Sequence[ServerState]) -> NoServersError:
    """The error that says `what` and the problem of each server."""
    return NoServersError(f"{what}: " + "; ".join(f"{server.address}: {server.problem}" for server in servers))


def find_servers(addresses: Sequence[str], needs: Needs, timeout_s: float) -> tuple[list[ServerState], list[list[str]]]:
    """The servers at `addresses`, and the tensors of their model that must be written together.

    Raises:
        NoServersError: none answers.
        ValueError: one that answers does not have what the run `needs`; the message begins with a field.
    """
    servers = [ServerState(address) for address in addresses]
    described = asyncio.run(describe(servers, timeout_s))
    if not described:
        raise no_servers("no server can sample", servers)
    for address, description in described.items():
        try:
            needs.check(description)
        except ServerError as error:
            raise ValueError(f"addresses: {address}: {error}") from None
    return servers, next(iter(described.values())).groups


async def describe(servers: Sequence[ServerState], timeout_s: float) -> dict[str, Description]:
    """Address → description, of those that answer; the others are dropped."""
    found: dict[str, Description] = {}

    async def ask(server: ServerState, connection: Connection) -> None:
        found[server.address] = await connection.describe()

    await with_each(servers, ask, timeout_s)
    return found


async def with_each(
    servers: Sequence[ServerState], do: Callable[[ServerState, Connection], Coroutine[Any, Any, None]], timeout_s: float
) -> list[ServerState]:
    """`do` with all of `servers` at the same time; returns those with which it did not fail, and drops the rest."""

    async def is_done(server: ServerState) -> bool:
        try:
            await do(server, Connection(connections, server.address, timeout_s))
        except ServerError as error:
            server.drop(error)
            return False
        return True

    async with client(timeout_s) as connections:
        done = await asyncio.gather(*map(is_done, servers))
    return [server for server, each in zip(servers, done, strict=True) if each]

"""The gateway: an HTTP server on its own thread, between agents and the generator."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import uvicorn

from xray_runtime.agents.episode import AgentEpisode
from xray_runtime.agents.http import AgentApp
from xray_runtime.agents.spans import Spans, named_spans
from xray_runtime.methods.common.sampling.reply_stream import Generate, ReplyStream

T = TypeVar("T")

BACKLOG, KEEP_ALIVE_S, CLOSE_S = 2048, 75, 5


class Gateway:
    """Answers calls at `http://HOST:PORT/episodes/ID`, until `close`.

    Args:
        generate: samples a batch of replies; called in a thread, one call at a time.
        host: address to listen on; agents on other machines need one that they can reach.
        spans: where calls are traced; None: where the environment says (`spans.named_spans`).

    Raises:
        OSError: nothing can listen on `host`.
        ValueError: the environment names an unknown exporter.
    """

    def __init__(self, generate: Generate, host: str = "127.0.0.1", spans: Spans | None = None) -> None:
        self._spans = spans or named_spans()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        shown = f"[{host}]" if ":" in host else host
        self._address = f"http://{shown}:{self._socket.getsockname()[1]}"
        self.sampler = ReplyStream(generate)
        self._episodes: dict[str, AgentEpisode] = {}
        config = uvicorn.Config(
            AgentApp(self._episodes, self._spans),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agent gateway", daemon=True)
        self._thread.start()

    def url(self, episode: AgentEpisode) -> str:
        """Base URL of an episode, without `/v1`."""
        return f"{self._address}/episodes/{episode.name}"

    def open(self, episode: AgentEpisode) -> None:
        """Accept calls of an episode; an earlier one of this name is replaced."""
        self.call(lambda: self._episodes.update({episode.name: episode}))

    def forget(self, episode: AgentEpisode) -> None:
        """Close an episode and answer as if it had never been."""

        def closed() -> None:
            episode.close()
            self._episodes.pop(episode.name, None)

        self.call(closed)

    @contextmanager
    def updating(self, version: int, oldest: int) -> Iterator[None]:
        """As `ReplyStream.updating`; episodes with a call of a version before `oldest` end."""
        with self.sampler.updating(version, oldest):
            yield

        def end_stale() -> None:
            for episode in list(self._episodes.values()):
                episode.end_if_stale(oldest)

        self.call(end_stale)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the gateway's event loop, where episodes live, and return its result."""

        async def called() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Stop answering."""
        self.sampler.close()
        self._server.should_exit = True
        self._thread.join()
        self._loop.close()
        if self._spans is not None:
            self._spans.close()

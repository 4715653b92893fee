"""One replica of a served model: a Ray actor with vLLM's server on its own port."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path

import ray
import uvicorn
from prometheus_client import REGISTRY
from starlette.types import ASGIApp as App

from xray_runtime.engines.generators.vllm.server import VLLMServer, adapter_arguments, arguments
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.processes import redirect_output
from xray_runtime.kernel.store.checkpoints import verify
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.canary_metrics import CanaryCollector, CanaryState
from xray_runtime.live.serving.json_bodies import JsonBodies
from xray_runtime.live.serving.middleware import Tagged
from xray_runtime.live.serving.recorder import RecorderHandle
from xray_runtime.live.serving.recording import FEEDBACK_PATH, Outbox, RecordingMiddleware, prometheus_count
from xray_runtime.models.merging import opened_model

LOOPBACK = "127.0.0.1"
KEEP_ALIVE_SECONDS = 3600
"""Longer than the reverse proxy keeps connections: closing one here first could lose a request."""


@dataclass(frozen=True)
class ServedAdapter:
    """A checkpoint whose adapter is served by its own name beside the base."""

    name: str
    directory: Path
    sha256: str
    rank: int
    layers: tuple[str, ...]
    """The adapted layers, by the last parts of their names."""


@dataclass(frozen=True)
class ServedModel:
    """The settings of a replica."""

    directory: Path
    sha256: str
    names: tuple[str, ...]
    """Names in requests; answers contain the first."""
    tensor_parallel: int
    """Number of devices that share it."""
    runtime: RuntimeConfig
    device: str
    key: str | None
    """Digest of the API key (`middleware.key_digest`)."""
    logs: Path
    adapters: tuple[ServedAdapter, ...] = ()

    @property
    def sha256s(self) -> dict[str, str]:
        """Name in requests → sha256 of the checkpoint that answers to it."""
        return dict.fromkeys(self.names, self.sha256) | {each.name: each.sha256 for each in self.adapters}


class Replica:
    """Answers the requests of the reverse proxy."""

    def __init__(self, model: ServedModel, secret: str, front_node: str, recorder: RecorderHandle | None) -> None:
        self._model, self._secret, self._front_node = model, secret, front_node
        self._recorder = recorder
        self._outbox: Outbox | None = None
        self._engine: VLLMServer | None = None
        self._canary = CanaryCollector()

    async def start(self) -> tuple[str, int]:
        """Load the model; returns (host, port). Raises NotServedError if its files have changed since the audit."""
        model, context = self._model, ray.get_runtime_context()
        redirect_output(model.logs / f"{model.sha256[:12]}-{context.get_actor_id()[:8]}.log")
        # A replacement may start long after the audit.
        checkpoints: list[ServedModel | ServedAdapter] = [model, *model.adapters]
        for served in checkpoints:
            if damages := verify(served.directory, served.sha256):
                raise NotServedError(f"{served.directory.name}: {damages[0]}")
        # Nothing reads its files after the start.
        with opened_model(model.directory) as directory:
            options = arguments(
                directory, list(model.names), model.sha256, model.runtime, model.device, model.tensor_parallel
            )
            options += adapter_arguments([(a.name, a.directory / ADAPTER, a.rank, a.layers) for a in model.adapters])
            self._engine = engine = VLLMServer(options, model.runtime, model.device)
            app = self._tagged(JsonBodies(await engine.start(), model.sha256s))
        # vLLM shows all that is registered on /metrics.
        REGISTRY.register(self._canary)
        host = LOOPBACK if context.get_node_id() == self._front_node else ray.util.get_node_ip_address()
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        config = uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE_SECONDS, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        self._serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        return host, int(listening.getsockname()[1])

    def _tagged(self, app: App) -> App:
        model, recorder = self._model, self._recorder
        if recorder is None:
            return Tagged(app, model.sha256, model.key, self._secret)
        self._outbox = Outbox(recorder.actor.keep.remote, prometheus_count())
        recording = RecordingMiddleware(
            app, model.sha256, recorder.config, self._outbox, recorder.actor.feedback.remote
        )
        return Tagged(recording, model.sha256, model.key, self._secret, own_keys=(FEEDBACK_PATH,))

    async def check(self, canary: CanaryState | None) -> None:
        """Raise an error if the engine or its HTTP server has stopped; otherwise show `canary` on /metrics."""
        assert self._engine is not None, "check() was called before start()"
        await self._engine.check()
        if self._serving.done():
            raise RuntimeError("its HTTP server stopped")
        self._canary.state = canary

    async def stop(self) -> None:
        """Hand over what is to be recorded, and stop the engine's process; a rejected model has neither."""
        if self._outbox is not None:
            await self._outbox.drain()
        if self._engine is not None:
            self._engine.stop()

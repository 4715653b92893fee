"""One replica of a served model: an actor of Ray Serve's with vLLM's server in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.engines.generation.vllm_server import VLLMServer, arguments
from xray_runtime.processes import redirect_output
from xray_runtime.serving import NotServedError
from xray_runtime.serving.middleware import Tagged
from xray_runtime.serving.router import GENERATION
from xray_runtime.store.checkpoints import verify


@dataclass(frozen=True)
class ServedModel:
    """All a replica must know."""

    directory: Path
    sha256: str
    names: tuple[str, ...]
    """By which requests may call it; answers carry the first."""
    generation: int
    runtime: RuntimeConfig
    device: str
    key: str | None
    """Digest of the API key (`middleware.key_digest`)."""
    logs: Path


@serve.ingress()
class Replica:
    """Ray Serve makes it, waits for `__serve_build_asgi_app__`, and sends requests to the application that returns."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        own = serve.get_replica_context().replica_id.unique_id
        redirect_output(model.logs / f"{model.sha256[:12]}-{own}.log")
        _listen_on_loopback()
        # A replica may be started long after the audit, when another has died.
        damages = verify(model.directory, model.sha256)
        if damages:
            raise NotServedError(f"{model.directory.name}: {damages[0]}")
        error_summary = arguments(model.directory, list(model.names), model.sha256, model.runtime, model.device)
        self._server = VLLMServer(error_summary, model.runtime, model.device)

    async def __serve_build_asgi_app__(self) -> Any:
        return Tagged(await self._server.start(), self._model.sha256, self._model.key)

    def record_replica_metadata(self) -> dict[str, int]:
        """For the router."""
        return {GENERATION: self._model.generation}

    async def check_health(self) -> None:
        """Ray Serve replaces a replica whose engine has died."""
        await self._server.check()

    def __del__(self) -> None:
        self._server.stop()


def _listen_on_loopback() -> None:
    """Keep a port of Ray Serve's to this machine.

    Each replica opens one on every interface, for calls between deployments, where it unpickles whatever comes. We
    have one deployment, and requests come to it through Ray.
    """
    from ray.serve._private import replica

    add = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: add(server, "127.0.0.1:0")

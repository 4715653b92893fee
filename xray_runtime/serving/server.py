"""Ray Serve with one application: a model behind one port, and another in its place without a request lost.

Another model is Serve's rolling update with room for all its replicas beside the old ones (`max_surge_percent`): they
load while the old answer, the router moves all requests at once when the last of them is up, and the old ones end when
their last answer is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from xray_runtime.serving import NotServedError
from xray_runtime.serving.replica import Replica, ServedModel
from xray_runtime.serving.router import OneModelRouter

APP, DEPLOYMENT = "xray", "model"
MAX_ONGOING = 1024
"""Requests a replica takes at a time; vLLM lets those wait that it has no room for."""
DRAIN_SECONDS = 600
"""What the last answers of a model that was replaced may take."""
HEALTH_SECONDS = 60
"""A replica that says nothing for so long, three times in a row, is replaced."""


class Server:
    """Ray must be up.

    Args:
        num_replicas: of each model.
        ray_stays: the cluster is not ours, and Ray Serve would outlive a process that is killed.
    """

    def __init__(self, host: str, port: int, num_replicas: int, *, ray_stays: bool) -> None:
        self._num_replicas = num_replicas
        # What Serve's client says would stand between the lines of the command.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(
            proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port), logging_config=self._quiet
        )
        self._ray_stays = ray_stays
        if ray_stays:
            self._lease = ray.remote(_Presence).options(num_cpus=0).remote()
            name = f"xray-serve-keeper-{uuid.uuid4().hex}"
            keeper = ray.remote(_Keeper).options(name=name, lifetime="detached", num_cpus=0).remote()
            keeper.keep.remote(self._lease)

    def deploy(self, model: ServedModel) -> None:
        """Serve `model`, in place of the one before, which goes on answering until this one can.

        Raises:
            NotServedError: it cannot be loaded; the one before goes on.
        """
        options: dict[str, Any] = {"num_cpus": model.runtime.cpus_per_workhorse}
        if model.device == "cuda":
            options["num_gpus"] = model.runtime.gpu_memory_fraction
        deployment = serve.deployment(
            Replica,
            name=DEPLOYMENT,
            num_replicas=self._num_replicas,
            max_ongoing_requests=MAX_ONGOING,
            max_surge_percent=100,
            rolling_update_percentage=1.0,
            graceful_shutdown_timeout_s=DRAIN_SECONDS,
            health_check_timeout_s=HEALTH_SECONDS,
            max_constructor_retry_count=1,
            ray_actor_options=options,
            request_router_config=RequestRouterConfig(
                request_router_class=OneModelRouter, request_router_kwargs={"num_replicas": self._num_replicas}
            ),
        )
        try:
            serve.run(deployment.bind(model), name=APP, logging_config=self._quiet)
        except RuntimeError as error:
            message = serve.status().applications[APP].deployments[DEPLOYMENT].message
            raise NotServedError(f"it cannot be loaded: {_reason(message)}") from error

    def stop(self) -> None:
        """Take no more requests, and finish those at hand (within a minute)."""
        # Ending Serve alone ends its proxy at once, with the answers that pass through it.
        with contextlib.suppress(TimeoutError):
            serve.delete(APP)
        if self._ray_stays:
            serve.shutdown()


def runs_already() -> bool:
    """Whether Ray Serve runs on this cluster: its port and its applications are then somebody else's."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False) is not None


def _reason(text: str) -> str:
    """The line that says why, of Serve's message, which ends with a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (errors or lines)[-1]


class _Presence:
    """Lives as long as the process that made it."""

    async def end(self) -> None:
        """Answers never."""
        await asyncio.Event().wait()


class _Keeper:
    """Outlives the command, and ends Ray Serve when it has gone."""

    async def keep(self, lease: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayActorError):
            await lease.end.remote()
        await serve.shutdown_async()
        ray.actor.exit_actor()

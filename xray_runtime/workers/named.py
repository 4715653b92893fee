"""X-ray's small named actors, one a run or one a cluster: opened where there is none, and found again by name."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Generic, TypeVar

import ray

from xray_runtime.workers.liveness import answered
from xray_runtime.workers.nodes import same_node

H = TypeVar("H")

NAMESPACE = "xray"
NAME_SECONDS = 0.1
"""How long Ray may keep the name of an actor that has ended."""


class NamedActor(Generic[H]):
    """Actors of one class, with handles of type H.

    An actor ends with the process that started it, or when that drops its handle; a `detached` one with the cluster.

    Args:
        kind: the class; it has `ping`.
        prefix: how their names begin; what comes after it tells them apart.
    """

    def __init__(self, kind: type, prefix: str, *, detached: bool = False) -> None:
        self._kind, self._prefix = kind, prefix
        self._options: dict[str, Any] = {"namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
        if detached:
            self._options["lifetime"] = "detached"

    def open(self, which: str = "") -> H:
        """The actor of this name, started where there is none."""
        options = self._options | {"name": self._prefix + which}
        while True:
            actor: Any = ray.remote(self._kind).options(**options, scheduling_strategy=same_node()).remote()
            if answered(actor.ping.remote()):
                handle: H = actor
                return handle
            # Ray keeps the name for a dead actor until that is killed too.
            ray.kill(actor)
            time.sleep(NAME_SECONDS)

    def find(self, which: str) -> H | None:
        """The actor of this name; None where nobody opened one, or it died."""
        with contextlib.suppress(ValueError):
            actor: Any = ray.get_actor(self._prefix + which, namespace=NAMESPACE)
            # By its name Ray finds a dead actor too.
            return actor if answered(actor.ping.remote()) else None
        return None

    def find_all(self) -> list[H]:
        """All of the cluster; one may have died since."""
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
        found: list[H] = []
        for name in names:
            with contextlib.suppress(ValueError):
                if name.startswith(self._prefix):
                    found.append(ray.get_actor(name, namespace=NAMESPACE))
        return found

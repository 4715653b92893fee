"""Small named actors, one a run or one a cluster, which are started once and found by name."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Generic, TypeVar

import ray

from xray_runtime.cluster.pool.libraries import worker_options
from xray_runtime.cluster.pool.liveness import answered
from xray_runtime.cluster.pool.nodes import same_node

H = TypeVar("H")

NAMESPACE = "xray"
NAME_SECONDS = 0.1
"""Time for Ray to free the name of a killed actor."""


class NamedActor(Generic[H]):
    """Actors of one class, with handles of type H.

    An actor ends with the process that started it, or when that drops its handle; a `detached` one ends with the
    cluster.

    Args:
        kind: the class, with a method `ping`.
        prefix: prefix of the actors' names.
    """

    def __init__(self, kind: type, prefix: str, *, detached: bool = False) -> None:
        self._kind, self._prefix = kind, prefix
        self._options: dict[str, Any] = {"namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
        if detached:
            self._options["lifetime"] = "detached"

    def open(self, which: str = "") -> H:
        """The actor of this name; started if there is none."""
        # A stage that starts it has many libraries, which its worker would have too.
        options = self._options | {"name": self._prefix + which} | worker_options("")
        while True:
            actor: Any = ray.remote(self._kind).options(**options, scheduling_strategy=same_node()).remote()
            if answered(actor.ping.remote()):
                handle: H = actor
                return handle
            # Ray keeps a dead actor's name until the actor is killed.
            ray.kill(actor)
            time.sleep(NAME_SECONDS)

    def find(self, which: str) -> H | None:
        """The actor of this name; None if there is none or it died."""
        with contextlib.suppress(ValueError):
            actor: Any = ray.get_actor(self._prefix + which, namespace=NAMESPACE)
            # Ray also finds dead actors.
            return actor if answered(actor.ping.remote()) else None
        return None

    def find_all(self) -> list[H]:
        """All actors of the class in the cluster, perhaps dead ones too."""
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
        handles: list[H] = []
        for name in names:
            with contextlib.suppress(ValueError):
                if name.startswith(self._prefix):
                    handles.append(ray.get_actor(name, namespace=NAMESPACE))
        return handles

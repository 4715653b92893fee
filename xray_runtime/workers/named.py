"""X-ray's small named actors, one a run or one a cluster: opened where there is none, and found again by name."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray

from xray_runtime.workers.liveness import answered
from xray_runtime.workers.nodes import same_node

NAMESPACE = "xray"
NAME_SECONDS = 0.1
"""How long Ray may keep the name of an actor that has ended."""


def open_actor(kind: type, name: str, *, detached: bool = False) -> Any:
    """The handle of the actor `name`, an object of class `kind` that has `ping`; started where there is none.

    It ends with the process that started it, or when that one drops its handle; a `detached` one ends with the cluster.
    """
    options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    if detached:
        options["lifetime"] = "detached"
    while True:
        actor = ray.remote(kind).options(**options, scheduling_strategy=same_node()).remote()
        if answered(actor.ping.remote()):
            return actor
        # Ray keeps the name for a dead actor until that is killed too.
        ray.kill(actor)
        time.sleep(NAME_SECONDS)


def find_actor(name: str) -> Any | None:
    """The handle of the actor `name`; None where nobody opened one, or it died."""
    with contextlib.suppress(ValueError):
        actor = ray.get_actor(name, namespace=NAMESPACE)
        # By its name Ray finds a dead actor too.
        return actor if answered(actor.ping.remote()) else None
    return None


def find_actors(prefix: str) -> list[Any]:
    """Handles of all of the cluster's actors whose names begin with `prefix`; one may have died since."""
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
    found = []
    for name in names:
        with contextlib.suppress(ValueError):
            if name.startswith(prefix):
                found.append(ray.get_actor(name, namespace=NAMESPACE))
    return found

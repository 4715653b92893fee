"""Detect that other actors have died."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray

from xray_runtime.cluster.protocols import Pingable, Ref


def answered(ref: Ref[Any], timeout_s: float | None = None) -> bool:
    """Whether a call was answered: its actor or node lives, and answers within `timeout_s`."""
    try:
        ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayError:
        return False
    return True


class Liveness:
    """Finds dead actors. An actor that does not answer a ping in time counts as busy."""

    def __init__(self) -> None:
        self._pings: dict[Pingable, Ref[None]] = {}
        """Pings without an answer so far."""

    def dead(self, actors: Iterable[Pingable], timeout_s: float = 0.0) -> list[Pingable]:
        """Those of `actors` that are known to be dead, after waiting up to `timeout_s` for answers.

        Without waiting, the second call after a death finds it.
        """
        dead: list[Pingable] = []
        pings: dict[Pingable, Ref[None]] = {}
        for actor in actors:
            ping = self._pings.get(actor)
            if ping is not None and ray.wait([ping], timeout=0)[0]:
                if not answered(ping):
                    dead.append(actor)
                    continue
                ping = None
            pings[actor] = ping if ping is not None else actor.ping.remote()
        if pings:
            refs = list(pings.values())
            done = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0])
            dead += [actor for actor, ping in pings.items() if ping in done and not answered(ping)]
            pings = {actor: ping for actor, ping in pings.items() if ping not in done}
        self._pings = pings
        return dead

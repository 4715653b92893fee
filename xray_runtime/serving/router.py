"""Which replica answers: all requests go to one model at a time, also while another takes its place."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

GENERATION = "generation"
"""In a replica's metadata: how many models were served before its own."""


def generation_to_ask(generations: list[int], num_replicas: int) -> int:
    """The newest model that is there with all its replicas; until one is, the oldest.

    Args:
        generations: of each replica that is up.
        num_replicas: of each model.
    """
    counted = Counter(generations)
    return max((g for g, n in counted.items() if n >= num_replicas), default=min(counted))


class OneModelRouter(FIFOMixin, RequestRouter):
    """Ray Serve's power of two choices (the shorter queue of two replicas), among the replicas of one model.

    By itself Serve asks old and new replicas alike as long as both are up, and clients would see answers of either.
    """

    def initialize_state(self, num_replicas: int) -> None:
        """Ray Serve calls it with the `request_router_kwargs`."""
        self._num_replicas = num_replicas

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        if not candidate_replicas:
            return []
        of = {replica.replica_id: replica.replica_metadata[GENERATION] for replica in candidate_replicas}
        asked = generation_to_ask(list(of.values()), self._num_replicas)
        there = [replica for replica in candidate_replicas if of[replica.replica_id] == asked]
        return [random.sample(there, min(2, len(there)))]

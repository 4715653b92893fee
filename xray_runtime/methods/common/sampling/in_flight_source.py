"""The protocol of replies and episodes that run while the weights change (`methods.ppo.in_flight`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from xray_runtime.data.batch import Rollout
from xray_runtime.methods.common.sampling.episode import EpisodeBatch
from xray_runtime.rewards.journal import Journal

P = TypeVar("P")
"""A reply or an episode to begin."""


class Versioned(Protocol):
    """A reply or an episode that has ended."""

    def version(self, default: int) -> int:
        """The oldest version of the policy that sampled a token; `default` if none did."""


Q = TypeVar("Q", bound=Versioned)


class InFlightSource(Protocol[P, Q]):
    @property
    def journal(self) -> Journal: ...

    def planned(self, batch: EpisodeBatch) -> list[P]:
        """One for each prompt of a group; the batch's number is the group's."""

    def start(self, planned: P, step: int, stale: Q | None = None) -> Future[Q]:
        """Begin a reply, or return the journaled one; `stale` is the one before, with too old a token. It is journaled
        before anyone gets it."""

    def drop(self, planned: P, reply: Future[Q]) -> None:
        """Give up a reply that nobody waits for, soon."""

    def rollout(self, planned: Sequence[P], played: Sequence[Q], version: int) -> Rollout:
        """The rows; `version` is that of a row without tokens."""

    def updating(self, version: int, oldest: int) -> AbstractContextManager[None]:
        """Hold requests while the generator's weights become those of `version`. Replies with a token of a version
        before `oldest` begin anew."""

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of an iteration with this rollout."""

    def take_stale(self) -> int:
        """How many began anew since the last call, beside those that `start` was told of."""


AnySource = InFlightSource[Any, Any]

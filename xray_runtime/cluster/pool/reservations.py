"""The queue of stages that reserve resources, and their reservations: one actor for all runs of a cluster.

Concurrent stages would deadlock if each held a part of its resources and waited for the rest. So a stage reserves
everything at once when it has its turn, first come, first served. Reservations are recorded here, since Ray's count of
free CPUs lags behind.

When the holder of a ticket, an actor of the stage, dies, its place in the queue, its reservation and its placement
groups are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ray.util.placement_group import remove_placement_group

from xray_runtime.cluster.pool.liveness import Liveness
from xray_runtime.cluster.pool.named import NamedActor
from xray_runtime.cluster.protocols import Pingable, RemoteMethod

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class Ticket:
    """A stage's place in the queue."""

    run_id: str
    stage: str
    """Log directory of the stage, which identifies it for people."""
    holder: Pingable
    """An actor that dies with the stage."""


@dataclass(frozen=True)
class Reservation:
    """The resources that a stage holds."""

    resources: Mapping[str, float]
    """Ray's name of a resource → amount."""
    groups: Sequence[PlacementGroup]


class Reservations:
    def __init__(self) -> None:
        self._queue: list[Ticket] = []
        self._held: dict[Ticket, Reservation] = {}
        self._liveness = Liveness()

    def ping(self) -> None:
        """Answers as long as this actor lives."""

    def is_next(self, ticket: Ticket) -> bool:
        """Whether this ticket has its turn; the first call adds it to the queue."""
        self._drop_dead()
        if ticket not in self._queue:
            self._queue.append(ticket)
        return self._queue[0] == ticket

    def leave(self, ticket: Ticket) -> None:
        self._queue = [other for other in self._queue if other != ticket]

    def grant(self, ticket: Ticket, reservation: Reservation) -> None:
        """Record the reservation of `ticket` until `end`."""
        self._held[ticket] = reservation

    def end(self, ticket: Ticket) -> None:
        self.leave(ticket)
        self._held.pop(ticket, None)

    def reserved(self) -> dict[str, float]:
        """Resource → amount that stages hold."""
        self._drop_dead()
        totals: dict[str, float] = {}
        for reservation in self._held.values():
            for name, amount in reservation.resources.items():
                totals[name] = totals.get(name, 0.0) + amount
        return totals

    def holds(self, run_id: str) -> bool:
        """Whether a stage of this run holds anything."""
        self._drop_dead()
        return any(ticket.run_id == run_id for ticket in self._held)

    def holders(self) -> list[str]:
        """The stages with their resources, for people."""
        self._drop_dead()
        return [f"{ticket.stage}: {amount_text(held.resources)}" for ticket, held in self._held.items()]

    def _drop_dead(self) -> None:
        tickets = {*self._queue, *self._held}
        dead = self._liveness.dead({ticket.holder for ticket in tickets})
        for ticket in [ticket for ticket in tickets if ticket.holder in dead]:
            self.leave(ticket)
            held = self._held.pop(ticket, None)
            for group in held.groups if held is not None else ():
                remove_placement_group(group)


class ReservationsHandle(Protocol):
    ping: RemoteMethod[[], None]
    is_next: RemoteMethod[[Ticket], bool]
    leave: RemoteMethod[[Ticket], None]
    grant: RemoteMethod[[Ticket, Reservation], None]
    end: RemoteMethod[[Ticket], None]
    reserved: RemoteMethod[[], dict[str, float]]
    holds: RemoteMethod[[str], bool]
    holders: RemoteMethod[[], list[str]]


_ACTOR: NamedActor[ReservationsHandle] = NamedActor(Reservations, "xray-reservations", detached=True)
open_reservations = _ACTOR.open
"""The cluster's reservations. They end with the cluster."""


def amount_text(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs, for people."""
    return ", ".join(f"{amount:g} {name}s" for name in ("CPU", "GPU") if (amount := resources.get(name, 0.0)))

"""Who may reserve now, and who has reserved what: one actor a cluster, for all runs on it.

Stages that run at the same time would deadlock if each held a part of what it needs and waited for the rest. So a stage
takes everything at once, in its turn: first come, first served. It has its turn only while it reserves, and what it has
reserved is written down here, since Ray's own count of free CPUs lags behind.

A ticket is void as soon as its holder, an actor of the stage, is dead: then the next one has its turn, and placement
groups that the dead one left are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ray.util.placement_group import remove_placement_group

from xray_runtime.workers.liveness import Liveness
from xray_runtime.workers.named import NamedActor
from xray_runtime.workers.protocols import Method, Pingable

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

NAME = "xray-reservations"


@dataclass(frozen=True)
class Ticket:
    """A stage's place in the queue."""

    run_id: str
    stage: str
    """Log directory of the stage, which people know it by."""
    holder: Pingable
    """An actor that dies with the stage."""


@dataclass(frozen=True)
class Reservation:
    """What a stage holds."""

    resources: Mapping[str, float]
    """Ray's name of a resource → amount."""
    groups: Sequence[PlacementGroup]


class Reservations:
    """The queue of stages that want to reserve, and what those hold that did."""

    def __init__(self) -> None:
        self._queue: list[Ticket] = []
        self._held: dict[Ticket, Reservation] = {}
        self._liveness = Liveness()

    def ping(self) -> None:
        """Answers as long as this actor lives."""

    def is_next(self, ticket: Ticket) -> bool:
        """Whether it is this ticket's turn; the first call puts it at the end of the queue."""
        self._drop_dead()
        if ticket not in self._queue:
            self._queue.append(ticket)
        return self._queue[0] == ticket

    def leave(self, ticket: Ticket) -> None:
        """Its turn is over, or it waits no longer."""
        self._queue = [other for other in self._queue if other != ticket]

    def grant(self, ticket: Ticket, reservation: Reservation) -> None:
        """Remember what the holder of `ticket` has reserved, until `end`."""
        self._held[ticket] = reservation

    def end(self, ticket: Ticket) -> None:
        """The holder of `ticket` has given everything back."""
        self.leave(ticket)
        self._held.pop(ticket, None)

    def reserved(self) -> dict[str, float]:
        """Resource → how much of it stages hold."""
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
        """Which stage holds what, for people."""
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
    """A `Reservations` actor."""

    ping: Method[[], None]
    is_next: Method[[Ticket], bool]
    leave: Method[[Ticket], None]
    grant: Method[[Ticket, Reservation], None]
    end: Method[[Ticket], None]
    reserved: Method[[], dict[str, float]]
    holds: Method[[str], bool]
    holders: Method[[], list[str]]


_ACTOR: NamedActor[ReservationsHandle] = NamedActor(Reservations, NAME, detached=True)


def open_reservations() -> ReservationsHandle:
    """The cluster's reservations, started where there are none. They live as long as the cluster."""
    return _ACTOR.open()


def amount_text(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs, for people."""
    return ", ".join(f"{amount:g} {name}s" for name in ("CPU", "GPU") if (amount := resources.get(name, 0.0)))

"""The turns of replies and episodes that ended in flight, in the journal; a single reply is an episode of one turn.

    {"key", "source": "turns", "step", "group", "row", "attempt", "turns": [[ids, logprobs, ended, runs]]}

A run that was killed takes them from there, and so does a replay, whose lines come from the ledger. Neither samples
them again: time decided which replies shared a batch, and the last bit of a log-probability may depend on that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.ledger import ANSWERS
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.sampling.episode import purpose_of
from xray_runtime.methods.common.sampling.reply_stream import (
    Sampled,
    runs,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from xray_runtime.cluster.stage import Stage
    from xray_runtime.rewards.journal import Journal

SOURCE = "turns"
Place = tuple[int, int]
"""(number of the group, row in it)."""


class JournaledTurns:
    """The turns of one stage's replies or episodes."""

    def __init__(self, stage: Stage[Any, Any], journal: Journal) -> None:
        self._stage = stage
        self._known: dict[Place, tuple[int, list[Sampled]]] = {}
        for entry in sorted(journal.entries(SOURCE), key=lambda entry: int(entry["attempt"])):
            place, turns = (entry["group"], entry["row"]), [Sampled(*turn) for turn in entry["turns"]]
            self._known[place] = entry["attempt"], turns

    def seed(self, place: Place, turn: int) -> int:
        return derive_seed(self._stage.seed, self._stage.name, purpose_of(0), *place, turn)

    def find(self, place: Place) -> tuple[int, list[Sampled]] | None:
        """(attempt, turns) of a reply or an episode that ended; the last attempt, if there were several."""
        return self._known.get(place)


def turns_line(step: int, place: Place, attempt: int, turns: Sequence[Sampled], **more: Any) -> dict[str, Any]:
    """A line of the journal."""
    key = hashlib.sha256(repr((SOURCE, *place, attempt)).encode()).hexdigest()[:32]
    where = {"group": place[0], "row": place[1], "attempt": attempt}
    return {"key": key, "source": SOURCE, "step": step, **where, "turns": [list(turn) for turn in turns], **more}


def ledger_lines(step: int, table: pa.Table, group_size: int) -> Iterator[dict[str, Any]]:
    """The lines of an iteration's rows in the ledger, in order, for a replay."""
    names = ("row", "group", "reply_ids", "rollout_logprobs", "token_versions")
    columns = [table[name].to_pylist() for name in names]
    are_episodes = ANSWERS in table.column_names
    masks = table["response_mask"].to_pylist() if are_episodes else [[True] * len(ids) for ids in columns[2]]
    # An environment answers the reset and each turn that ended.
    answers = (
        [len(json.loads(text)) - 1 for text in table[ANSWERS].to_pylist()]
        if are_episodes
        else table["ended"].to_pylist()
    )
    for row, group, ids, logprobs, versions, mask, num_ended in zip(*columns, masks, answers, strict=True):
        turns = []
        for number, (start, end) in enumerate(_stretches(np.array(mask))):
            stretch = ids[start:end], logprobs[start:end], number < num_ended, runs(versions[start:end])
            turns.append(Sampled(*stretch))
        yield turns_line(step, (group, row % group_size), 0, turns)


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def version_columns(versions: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The columns of a rollout with these versions of tokens."""
    oldest = np.array([min(row) for row in versions])
    return {"version": oldest, "token_versions": Ragged.of(versions, np.int32)}

"""The replies of an iteration as its ledger has them, in place of a sampler that is not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from xray_runtime.cluster.protocols import Ready
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ledger import KEPT, ROUTES, TOP
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.config.validation import ConfigError


class RecordedReplies:
    """A generator whose replies are those of a ledger, found by their seeds. It has no weights."""

    def __init__(self, table: pa.Table, engine: str) -> None:
        """Raises ConfigError: the ledger does not have all that a generator answers with."""
        self._table = table.combine_chunks()
        self._engine = engine
        if missing := [name for name in ("reply_ids", "rollout_logprobs") if name not in table.column_names]:
            raise ConfigError(f"REF: its sampler ({engine}) is not here, and its ledger has no {missing[0]}")
        if ROUTES[0] in table.column_names:
            raise ConfigError(f"REF: its sampler ({engine}) is not here, and routes are not read from a ledger")
        self._places = {seed: place for place, seed in enumerate(table["seed"].to_pylist())}
        self.generate = SimpleNamespace(remote=self._generate)
        self.follow = SimpleNamespace(remote=lambda policy, version: Ready(None))
        self.sleep = SimpleNamespace(remote=lambda synced_next=False: Ready(None))
        self.wake_up = SimpleNamespace(remote=lambda: Ready(None))

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> Ready[ReplyBatch]:
        seeds = rows.seed.tolist()
        if not set(seeds) <= self._places.keys():
            raise ConfigError(f"REF: it samples replies that its ledger does not have, and {self._engine} is not here")
        table = self._table.take(pa.array([self._places[seed] for seed in seeds])).combine_chunks()
        return Ready(_replies(table))


def _replies(table: pa.Table) -> ReplyBatch:
    def column(name: str, dtype: type[np.generic]) -> Ragged:
        return Ragged.of((np.asarray(row.values) for row in table[name]), dtype)

    found: dict[str, Any] = {}
    if TOP[0] in table.column_names:
        found |= {name: _rows_of(table, name) for name in TOP}
    if KEPT in table.column_names:
        sets = table[KEPT].to_pylist()
        found["kept_counts"] = Ragged.of(([len(kept) for kept in row] for row in sets), np.int32)
        found["kept_ids"] = Ragged.of(([one for kept in row for one in kept] for row in sets), np.int32)
    return ReplyBatch(
        response_ids=column("reply_ids", np.int64),
        rollout_logprobs=column("rollout_logprobs", np.float32),
        ended=table["ended"].to_numpy(),
        **found,
    )


def _rows_of(table: pa.Table, name: str) -> Ragged:
    """A column of lists of lists, which all have one length."""
    rows = [np.asarray(row.values.flatten()) for row in table[name]]
    lengths = [len(row.values) for row in table[name]]
    width = max((len(row) // length for row, length in zip(rows, lengths, strict=True) if length), default=0)
    return Ragged(np.concatenate(rows).reshape(-1, width), np.cumsum([0, *lengths]))

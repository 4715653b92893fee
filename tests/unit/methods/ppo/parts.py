"""Rows of a rollout that a test writes down as plain columns, as the loop hands them on."""

from __future__ import annotations

import numpy as np

from xray_runtime.data.batch import Rollout, Scores, TextBatch
from xray_runtime.data.ragged import Ragged

Columns = dict[str, np.ndarray | Ragged]


def typed(rows: Columns, rollout: Columns, scores: Columns) -> tuple[TextBatch, Rollout, Scores]:
    """What a test leaves out is filled in with what nothing reads."""
    count = len(rows["prompt_lengths"])
    unread: Columns = {name: np.zeros(count, np.int64) for name in ("seed", "version", "prompt")}
    unread["response_ids"] = rollout["rollout_logprobs"]
    if "response_mask" in rollout:
        names = ("prompt_ids", "turns", "episode_reward", "failure", "info", "answers")
        unread |= dict.fromkeys(names, np.zeros(count))
    return TextBatch.of_columns(rows), Rollout.of_columns(unread | rollout), Scores.of_columns(scores)


def taken(columns: Columns, index: list[int]) -> Columns:
    """The rows at `index`."""
    return {name: column[np.array(index, np.int64)] for name, column in columns.items()}

"""Rows of a rollout that a test writes down as plain columns, as the loop hands them on."""

from __future__ import annotations

import numpy as np

from xray_runtime.data.rows import Rows, num_rows
from xray_runtime.rl.types import Rollout, Scores, Text


def typed(rows: Rows, rollout: Rows, scores: Rows) -> tuple[Text, Rollout, Scores]:
    """What a test leaves out is filled in with what nothing reads."""
    count = num_rows(rows)
    unread = {name: np.zeros(count, np.int64) for name in ("seed", "version", "prompt")}
    unread["response_ids"] = rollout["rollout_logprobs"]
    if "response_mask" in rollout:
        names = ("prompt_ids", "turns", "episode_reward", "failure", "info", "answers")
        unread |= dict.fromkeys(names, np.zeros(count))
    return Text(**rows), Rollout.read(unread | rollout), Scores.read(scores)

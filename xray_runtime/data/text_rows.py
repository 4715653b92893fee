"""Rows of text: a prompt and a reply, in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from xray_runtime.data.rows import Ragged, Rows


def text_rows(prompts: Sequence[Sequence[int] | np.ndarray], replies: Iterable[Sequence[int] | np.ndarray]) -> Rows:
    """Rows of prompt and reply together: ragged `input_ids`, and `prompt_lengths` [B]."""
    input_ids = Ragged.of([*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True))
    return {"input_ids": input_ids, "prompt_lengths": np.array([len(p) for p in prompts], dtype=np.int64)}


def with_end_of_turn(reply: Sequence[int] | np.ndarray, stops: Sequence[int]) -> list[int]:
    """A reply that ends with one of the stop tokens, else with the first, which ends a turn: the reward model has seen
    no other."""
    ids = list(reply)
    return ids if ids and ids[-1] in stops else [*ids, stops[0]]

"""Rows of tokens, each a prompt and a reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from xray_runtime.data.rows import Ragged, Rows


def text_rows(prompts: Sequence[Sequence[int] | np.ndarray], replies: Iterable[Sequence[int] | np.ndarray]) -> Rows:
    """Rows of prompt and reply together: ragged `input_ids`, and `prompt_lengths` [B]."""
    input_ids = Ragged.of([*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True))
    return {"input_ids": input_ids, "prompt_lengths": np.array([len(p) for p in prompts], dtype=np.int64)}


def with_end_of_turn(reply: Sequence[int] | np.ndarray, stops: Sequence[int]) -> list[int]:
    """`reply`, with the first stop token (the end of turn) added if it ends with none, as in the reward model's
    data."""
    ids = list(reply)
    return ids if ids and ids[-1] in stops else [*ids, stops[0]]

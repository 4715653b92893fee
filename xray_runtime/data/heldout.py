"""What is held out of training: a share of names or prompts, the same ones every time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from xray_runtime.data.pairs import PreferenceExample, prompt_text


def is_held_out(seed: int, purpose: str, name: str, fraction: float) -> bool:
    """Whether `name` falls into the held-out share. Adding other names moves nothing."""
    digest = hashlib.sha256(f"{seed}\x1f{purpose}\x1f{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def split_by_prompt(
    pairs: Sequence[PreferenceExample], fraction: float, seed: int
) -> tuple[list[PreferenceExample], list[PreferenceExample]]:
    """(train, held-out), no prompt on both sides."""
    train: list[PreferenceExample] = []
    heldout: list[PreferenceExample] = []
    for pair in pairs:
        side = heldout if is_held_out(seed, "preferences", prompt_text(pair.prompt), fraction) else train
        side.append(pair)
    return train, heldout

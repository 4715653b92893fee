"""What is held out of training: a share of names or prompts, the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from xray_runtime.data.pairs import HELDOUT, VALIDATION, Example, Pairs, PreferenceExample, prompt_text
from xray_runtime.data.text_set import TextSet


def is_held_out(seed: int, purpose: str, name: str, fraction: float) -> bool:
    """Whether `name` falls into the held-out share. Adding other names moves nothing."""
    digest = xxhash.xxh3_64_intdigest(f"{seed}\x1f{purpose}\x1f{name}".encode("utf-8", "surrogatepass"))
    return digest < fraction * 2**64


def draw_left_out(prompts: Iterable[str], count: int, wanted: int, seed: int, purpose: str, where: str) -> np.ndarray:
    """Which of `count` rows of training data are not trained on, since a version is chosen by them [count].

    Args:
        prompts: of each row; those of one prompt are left out together.
        wanted: how many, about; 0: none.
        where: the field that says so, for the message.

    Raises:
        ValueError: none is left to train on, or to choose by.
    """
    if not wanted:
        return np.zeros(count, bool)
    drawn = (is_held_out(seed, purpose, prompt, wanted / count) for prompt in prompts)
    left_out = np.fromiter(drawn, bool, count)
    if left_out.all() or not left_out.any():
        raise ValueError(
            f"{where}: {wanted} of {count} for training leaves {left_out.sum()} to choose by and "
            f"{(~left_out).sum()} to train on; both must be at least 1"
        )
    return left_out


def held_out_prompts(dataset: Path) -> TextSet:
    """The prompts of a dataset that nothing may be trained on."""
    there = [dataset / side for side in (HELDOUT, VALIDATION) if side == HELDOUT or (dataset / side).exists()]
    return TextSet(text for path in there for text in Pairs(path, Example).prompt_texts())


def split_by_prompt(
    pairs: Iterable[PreferenceExample], fraction: float, seed: int
) -> Iterator[tuple[bool, PreferenceExample]]:
    """(whether it is held out, pair) of each, no prompt on both sides."""
    for pair in pairs:
        yield is_held_out(seed, "preferences", prompt_text(pair.prompt), fraction), pair

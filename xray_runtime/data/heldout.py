"""Data that is not trained on: a held-out share of names or prompts, the same ones every time, and data held for a
person."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from xray_runtime.data.pairs import HELDOUT, VALIDATION, Example, Pairs, PreferenceExample, prompt_text
from xray_runtime.data.text_set import TextSet


def is_held_out(seed: int, purpose: str, name: str, fraction: float) -> bool:
    """Whether `name` is in the held-out share, independently of other names."""
    digest = xxhash.xxh3_64_intdigest(f"{seed}\x1f{purpose}\x1f{name}".encode("utf-8", "surrogatepass"))
    return digest < fraction * 2**64


def draw_left_out(prompts: Iterable[str], count: int, wanted: int, seed: int, purpose: str, where: str) -> np.ndarray:
    """Which of `count` training rows are kept for validation, to choose a version [count].

    Args:
        prompts: prompt of each row; all rows of a prompt are kept out together.
        wanted: approximate number of rows; 0: none.
        where: the config field, for errors.

    Raises:
        ValueError: no row remains for training, or for validation.
    """
    if not wanted:
        return np.zeros(count, bool)
    drawn = (is_held_out(seed, purpose, prompt, wanted / count) for prompt in prompts)
    left_out = np.fromiter(drawn, bool, count)
    if left_out.all() or not left_out.any():
        raise ValueError(
            f"{where}: {wanted} of {count} for training leaves {left_out.sum()} for validation and "
            f"{(~left_out).sum()} to train on; both must be at least 1"
        )
    return left_out


def held_out_prompts(dataset: Path) -> TextSet:
    """The held-out prompts of a dataset."""
    there = [dataset / side for side in (HELDOUT, VALIDATION) if side == HELDOUT or (dataset / side).exists()]
    return TextSet(text for path in there for text in Pairs(path, Example).prompt_texts())


def split_by_prompt(
    pairs: Iterable[PreferenceExample], fraction: float, seed: int
) -> Iterator[tuple[bool, PreferenceExample]]:
    """(whether it is held out, pair) for each pair; no prompt is on both sides."""
    for pair in pairs:
        yield is_held_out(seed, "preferences", prompt_text(pair.prompt), fraction), pair


def refuse_held(stage: str, curated: Path) -> None:
    """Raises ValueError if a checkpoint of `curate` is held; human verdicts from elsewhere never are."""
    path = curated / "stats.json"
    held = json.loads(path.read_text(encoding="utf-8")).get("held") if path.exists() else None
    if held:
        raise ValueError(
            f"{stage}: {curated.name} is held for a person: {'; '.join(held)}; look at it, then release it "
            "with the field `released`"
        )

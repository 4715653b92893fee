"""Preference pairs: from a gold score's noisy judgement, from human ratings, from a dataset of one's own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from xray_runtime.config import DatasetPreferences, RatingPreferences
from xray_runtime.data.pairs import Example, Messages, PreferenceExample, prompt_text
from xray_runtime.data.sources import clean, preference, read_records


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


def label_pairs(
    prompts: Sequence[Messages],
    replies: Sequence[tuple[str, str]],
    gold: Sequence[tuple[float, float]],
    sharpness: float,
    seed: int,
) -> tuple[list[PreferenceExample], dict[str, float]]:
    """Label each pair of replies by a Bradley–Terry draw: P(first preferred) = σ(sharpness · (gold₁ − gold₂)).

    Pairs of equal or empty replies say nothing and are dropped. Returns the pairs and counts; `label_noise` is the
    share of pairs with different gold scores whose label contradicts them.
    """
    draws = np.random.default_rng(seed).random(len(prompts))
    pairs, same, differing, contradicting = [], 0, 0, 0
    for i, (prompt, (a, b), (gold_a, gold_b)) in enumerate(zip(prompts, replies, gold, strict=True)):
        if a == b or not a or not b:
            same += 1
            continue
        first = bool(draws[i] < 1.0 / (1.0 + math.exp(-sharpness * (gold_a - gold_b))))
        if gold_a != gold_b:
            differing += 1
            contradicting += first != (gold_a > gold_b)
        chosen, rejected = (a, b) if first else (b, a)
        pairs.append(PreferenceExample(f"gold-{i}", prompt, chosen, rejected))
    stats = {
        "pairs": len(pairs),
        "dropped_same_or_empty": same,
        "different_gold": differing,
        "label_noise": contradicting / differing if differing else 0.0,
    }
    return pairs, stats


def from_ratings(
    examples: Sequence[Example], ratings: dict[str, float], config: RatingPreferences, seed: int
) -> tuple[list[PreferenceExample], dict[str, float]]:
    """Pairs of real replies, ordered by how people rated the conversations they stand in.

    People rated whole conversations, not replies, so a label only says that the reply stood in a better-rated
    conversation. The two replies answered different prompts; each pair carries the prompt of its *first-drawn* reply,
    chosen or rejected with equal chance, so that fitting the prompt gives nothing away. Replies of a pair differ in
    words by at most `max_length_ratio`: conversation ratings mostly follow length.
    """
    rated = [e for e in examples if e.conversation in ratings]
    if len(rated) < 2:
        raise ValueError("preferences: too few rated replies for pairs; allow more conversations or longer replies")
    generator = np.random.default_rng(seed)
    words = np.array([len(e.response.split()) for e in rated])
    by_length = np.argsort(words, kind="stable")
    sorted_words = words[by_length]
    pairs: list[PreferenceExample] = []
    tried = 0
    while len(pairs) < config.num_pairs and tried < 50 * config.num_pairs:
        tried += 1
        i = int(generator.integers(len(rated)))
        low = np.searchsorted(sorted_words, words[i] / config.max_length_ratio, side="left")
        high = np.searchsorted(sorted_words, words[i] * config.max_length_ratio, side="right")
        j = int(by_length[generator.integers(low, high)])
        gap = ratings[rated[i].conversation] - ratings[rated[j].conversation]
        if abs(gap) < config.min_gap or rated[i].response == rated[j].response:
            continue
        better, worse = (i, j) if gap > 0 else (j, i)
        pairs.append(
            PreferenceExample(f"ratings-{len(pairs)}", rated[i].prompt, rated[better].response, rated[worse].response)
        )
    return pairs, {"pairs": len(pairs), "rated_replies": len(rated), "draws": tried}


def from_dataset(config: DatasetPreferences) -> tuple[list[PreferenceExample], dict[str, float]]:
    """Your own pairs, cleaned; equal or empty replies are dropped and counted."""
    pairs: list[PreferenceExample] = []
    dropped = 0
    for number, (where, record) in enumerate(read_records("preferences.path", config.path, config.split)):
        if config.max_pairs is not None and len(pairs) >= config.max_pairs:
            break
        prompt, chosen, rejected = preference(where, record)
        chosen, rejected = clean(chosen), clean(rejected)
        if chosen == rejected or not chosen or not rejected:
            dropped += 1
            continue
        pairs.append(PreferenceExample(f"dataset-{number}", prompt, chosen, rejected))
    return pairs, {"pairs": len(pairs), "dropped_same_or_empty": dropped}


def length_baseline_accuracy(train: Sequence[PreferenceExample], heldout: Sequence[PreferenceExample]) -> float:
    """Held-out accuracy of the rule "longer is better" or "shorter is better", whichever fits `train`; ties half."""

    def longer_preferred(pairs: Sequence[PreferenceExample]) -> float:
        gaps = [len(p.chosen.split()) - len(p.rejected.split()) for p in pairs]
        return sum(1.0 if g > 0 else 0.5 if g == 0 else 0.0 for g in gaps) / len(gaps) if gaps else 0.5

    accuracy = longer_preferred(heldout)
    return accuracy if longer_preferred(train) >= 0.5 else 1.0 - accuracy

"""Preference pairs from noisy gold scores, from human ratings, or from a user's dataset."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.heldout import is_held_out
from xray_runtime.data.pairs import Example, Messages, PreferenceExample, message_text, prompt_text
from xray_runtime.data.reading.keys import Unread
from xray_runtime.data.reading.record_files import Where
from xray_runtime.data.reading.records import preference
from xray_runtime.data.reasoning import KEY
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.preferences.config import RatingPreferences

log = logging.getLogger(__name__)


def label_pairs(
    prompts: Sequence[Messages],
    replies: Sequence[tuple[str, str]],
    gold: Sequence[tuple[float, float]],
    sharpness: float,
    seed: int,
) -> tuple[list[PreferenceExample], dict[str, float]]:
    """Label each prompt's pair of replies by a Bradley–Terry draw: P(first preferred) = σ(sharpness · (gold₁ − gold₂)).

    Returns the pairs, and counts. Pairs of equal or empty replies are dropped and counted; `label_noise` is the share
    of kept pairs with different gold scores whose label contradicts them.
    """
    draws = np.random.default_rng(seed).random(len(prompts))
    pairs, same, differing, contradicting = [], 0, 0, 0
    for i, (prompt, (a, b), (gold_a, gold_b)) in enumerate(zip(prompts, replies, gold, strict=True)):
        if a == b or not a or not b:
            same += 1
            continue
        # σ(x) = (1 + tanh(x/2)) / 2, which no user's score can overflow.
        first = bool(draws[i] < 0.5 * (1.0 + math.tanh(0.5 * sharpness * (gold_a - gold_b))))
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
    """Pairs of human replies, ordered by the ratings of their conversations.

    Ratings are of whole conversations, so a label only says that the reply comes from a better-rated conversation,
    and no two replies have the same prompt. A pair therefore gets the prompt of one of its two replies, drawn at
    random, so that the fit to the prompt is independent of the label. The word counts of a pair differ by at most
    the factor `max_length_ratio`, since ratings mostly follow length.

    Args:
        examples: replies to draw from; those of unrated conversations are skipped.
        ratings: conversation → rating.
        seed: seed of the draws; no pair of replies is drawn twice.

    Raises:
        ValueError: fewer than two of the replies are rated.
    """
    rated = [e for e in examples if e.conversation in ratings]
    if len(rated) < 2:
        raise ValueError(
            f"preferences: {len(rated)} rated replies form no pairs; allow more conversations "
            "(data.max_conversations) or longer replies (data.max_chars)"
        )
    generator = np.random.default_rng(seed)
    num_words = np.array([len(e.response.split()) for e in rated])
    by_length = np.argsort(num_words, kind="stable")
    sorted_num_words = num_words[by_length]
    pairs: list[PreferenceExample] = []
    drawn: set[tuple[int, int]] = set()
    tried = 0
    while len(pairs) < config.num_pairs and tried < 50 * config.num_pairs:
        tried += 1
        i = int(generator.integers(len(rated)))
        low = np.searchsorted(sorted_num_words, num_words[i] / config.max_length_ratio, side="left")
        high = np.searchsorted(sorted_num_words, num_words[i] * config.max_length_ratio, side="right")
        j = int(by_length[generator.integers(low, high)])
        prompt = rated[i if generator.random() < 0.5 else j].prompt
        gap = ratings[rated[i].conversation] - ratings[rated[j].conversation]
        key = (min(i, j), max(i, j))
        if not abs(gap) >= config.min_gap or rated[i].response == rated[j].response or key in drawn:
            continue
        drawn.add(key)
        better, worse = (rated[i], rated[j]) if gap > 0 else (rated[j], rated[i])
        pairs.append(PreferenceExample(f"{better.id}-{worse.id}", prompt, better.response, worse.response))
    if len(pairs) < config.num_pairs:
        log.warning("%d pairs of rated replies found where %d were wanted", len(pairs), config.num_pairs)
    return pairs, {"pairs": len(pairs), "rated_replies": len(rated), "draws": tried}


def split_ratings(
    examples: Sequence[Example], ratings: dict[str, float], config: RatingPreferences, seed: int
) -> tuple[list[PreferenceExample], list[PreferenceExample], dict[str, float]]:
    """(train, held-out, counts) of pairs `from_ratings`; no conversation and no prompt is on both sides.

    A split by prompt would leave the same conversations, with the same labels, on both sides: a reward model that
    memorizes conversations would appear accurate.
    """
    sides: dict[bool, list[Example]] = {False: [], True: []}
    for example in examples:
        side = is_held_out(seed, "ratings", example.conversation, config.heldout_fraction)
        sides[side].append(example)
    num_heldout = max(round(config.num_pairs * config.heldout_fraction), 1)
    drawn = {}
    stats: dict[str, float] = {}
    for side, name, count in ((False, "train", config.num_pairs - num_heldout), (True, "heldout", num_heldout)):
        sized = config.model_copy(update={"num_pairs": count})
        drawn[side], counts = from_ratings(sides[side], ratings, sized, derive_seed(seed, "ratings", name))
        stats |= {f"{name}_{key}": value for key, value in counts.items()}
    train_prompts = {prompt_text(pair.prompt) for pair in drawn[False]}
    heldout = [pair for pair in drawn[True] if prompt_text(pair.prompt) not in train_prompts]
    stats["dropped_heldout_prompt_seen_in_training"] = len(drawn[True]) - len(heldout)
    stats["heldout_pairs"] = len(heldout)
    return drawn[False], heldout, stats


def from_dataset(
    records: Iterable[tuple[Where, dict[str, Any]]],
    max_pairs: int | None,
    dropped: DroppedRows,
    unread: Unread | None = None,
) -> Iterator[tuple[int, PreferenceExample]]:
    """A user's pairs, each with its row in the source, from what `read_records` reads; `unread` counts what is not
    read. Raises ValueError if a row has the wrong form."""
    num_pairs = 0
    for where, record in records:
        if num_pairs == max_pairs:
            break
        pair = preference(where, record, unread)
        if pair is None:
            dropped.add("unmatched_transcripts", {"row": where.row})
            continue
        prompt, chosen, rejected = pair
        texts = [message_text(m["content"], m.get("tool_calls"), m.get(KEY)).strip() for m in (chosen, rejected)]
        if texts[0] == texts[1] or not all(texts) or not prompt[-1]["content"].strip():
            dropped.add("same_or_empty", {"row": where.row})
            continue
        num_pairs += 1
        more = [m.get(key) for key in ("tool_calls", KEY) for m in (chosen, rejected)]
        contents = (chosen["content"], rejected["content"])
        yield where.row, PreferenceExample(f"dataset-{where.row}", prompt, *contents, *more)

"""Preference pairs: the Bradley–Terry draw, ratings under length control, one's own data, and the splits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.heldout import is_held_out, split_by_prompt
from xray_runtime.data.length_baseline import length_baseline_accuracy
from xray_runtime.data.pairs import Example, PreferenceExample, prompt_text
from xray_runtime.data.reading.sources import read_records
from xray_runtime.methods.preferences.config import RatingPreferences
from xray_runtime.methods.preferences.rows import from_dataset, from_ratings, label_pairs, split_ratings


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def pair(asked: str, chosen: str, rejected: str) -> PreferenceExample:
    return PreferenceExample(f"{asked}-{chosen}-{rejected}", prompt(asked), chosen, rejected)


@pytest.mark.parametrize(("gap", "sharpness"), [(0.5, 4.0), (-0.25, 4.0), (0.0, 4.0), (0.5, 1.0)])
def test_labels_are_drawn_with_the_bradley_terry_probability(gap: float, sharpness: float) -> None:
    n = 20_000
    pairs, stats = label_pairs([prompt("p")] * n, [("a", "b")] * n, [(gap, 0.0)] * n, sharpness, seed=1)
    share = sum(p.chosen == "a" for p in pairs) / n
    expected = 1.0 / (1.0 + math.exp(-sharpness * gap))
    # Four standard errors of a share over n draws.
    assert share == pytest.approx(expected, abs=4 * math.sqrt(0.25 / n))
    noise = 0.0 if gap == 0.0 else 1.0 - share if gap > 0 else share
    assert stats["label_noise"] == pytest.approx(noise)


def test_labels_drop_and_count_what_says_nothing() -> None:
    replies = [("a", "a"), ("a", ""), ("a", "b"), ("", "")]
    pairs, stats = label_pairs([prompt(str(i)) for i in range(4)], replies, [(1.0, 0.0)] * 4, 1000.0, seed=0)
    # σ(1000) is 1: the better reply is chosen, without noise.
    assert pairs == [PreferenceExample("gold-2", prompt("2"), "a", "b")]
    assert stats == {"pairs": 1, "dropped_same_or_empty": 3, "different_gold": 1, "label_noise": 0.0}


def test_labels_of_scores_beyond_exp() -> None:
    pairs, _ = label_pairs([prompt("p")] * 2, [("a", "b")] * 2, [(-1e6, 1e6), (1e6, -1e6)], 4.0, seed=0)
    assert [p.chosen for p in pairs] == ["b", "a"]


def test_labels_are_the_same_for_the_same_seed() -> None:
    n = 64
    arguments = ([prompt("p")] * n, [("a", "b")] * n, [(0.1, 0.0)] * n, 1.0)
    assert label_pairs(*arguments, seed=5) == label_pairs(*arguments, seed=5)
    assert label_pairs(*arguments, seed=5)[0] != label_pairs(*arguments, seed=6)[0]


def rated_examples(num: int) -> tuple[list[Example], dict[str, float]]:
    """Conversations rated 1, 5 and 9 in turn, eight replies each; better-rated ones talk more, as people do."""
    examples, ratings = [], {}
    for c in range(num):
        ratings[f"c{c}"] = float(1 + 4 * (c % 3))
        for turn in range(8):
            reply = " ".join([f"c{c}t{turn}"] * (1 + turn + c % 3))
            examples.append(Example(f"c{c}-{turn}", f"c{c}", prompt(f"asked c{c} {turn}"), reply))
    return examples, ratings


def conversation_of(text: str) -> str:
    return text.split("t")[0].split(" ")[0]


def test_rated_pairs_keep_gap_length_ratio_and_direction() -> None:
    examples, ratings = rated_examples(60)
    examples += [Example("u-0", "unrated", prompt("?"), "nobody rated this")]
    config = RatingPreferences(num_pairs=300, min_gap=3, max_length_ratio=1.25)
    pairs, stats = from_ratings(examples, ratings, config, seed=3)
    assert len(pairs) == stats["pairs"] == 300
    assert stats["rated_replies"] == 480
    for p in pairs:
        assert ratings[conversation_of(p.chosen)] - ratings[conversation_of(p.rejected)] >= 3
        words = sorted((len(p.chosen.split()), len(p.rejected.split())))
        assert words[1] <= 1.25 * words[0] + 1e-9
    assert len({frozenset((p.chosen, p.rejected)) for p in pairs}) == 300
    prompts = {e.response: e.prompt for e in examples}
    with_chosen = sum(p.prompt == prompts[p.chosen] for p in pairs)
    with_rejected = sum(p.prompt == prompts[p.rejected] for p in pairs)
    assert with_chosen + with_rejected == 300
    # A fair coin over 300 pairs: four standard deviations are 35.
    assert abs(with_chosen - 150) <= 35
    assert from_ratings(examples, ratings, config, seed=3)[0] == pairs


def test_rated_pairs_end_when_there_are_no_more() -> None:
    examples = [Example("a-0", "a", prompt("p"), "x y"), Example("b-0", "b", prompt("q"), "u v")]
    pairs, stats = from_ratings(examples, {"a": 9.0, "b": 1.0}, RatingPreferences(num_pairs=8), seed=0)
    assert [(p.chosen, p.rejected) for p in pairs] == [("x y", "u v")]
    assert stats["pairs"] == 1
    with pytest.raises(ValueError, match="1 rated replies form no pairs"):
        from_ratings(examples, {"a": 9.0}, RatingPreferences(), seed=0)


def test_rated_split_shares_no_conversation_and_no_prompt() -> None:
    examples, ratings = rated_examples(90)
    # One prompt asked everywhere: held-out pairs that carry it are dropped.
    examples = [Example(e.id, e.conversation, prompt("hi") if "-0" in e.id else e.prompt, e.response) for e in examples]
    config = RatingPreferences(num_pairs=400, heldout_fraction=0.2, max_length_ratio=2.0)
    train, heldout, stats = split_ratings(examples, ratings, config, seed=0)
    assert len(train) == 320
    assert len(heldout) == stats["heldout_pairs"] == 80 - stats["dropped_heldout_prompt_seen_in_training"]
    assert stats["dropped_heldout_prompt_seen_in_training"] > 0
    conversations = [{conversation_of(r) for p in side for r in (p.chosen, p.rejected)} for side in (train, heldout)]
    assert not conversations[0] & conversations[1]
    assert not {prompt_text(p.prompt) for p in train} & {prompt_text(p.prompt) for p in heldout}


def test_split_by_prompt_keeps_a_prompt_on_one_side() -> None:
    pairs = [pair(f"p{i % 400}", f"a{i}", "b") for i in range(1200)]
    sided = list(split_by_prompt(pairs, 0.25, seed=0))
    assert [pair for _, pair in sided] == pairs
    train, heldout = ([pair for held_out, pair in sided if held_out == side] for side in (False, True))
    assert not {prompt_text(p.prompt) for p in train} & {prompt_text(p.prompt) for p in heldout}
    # 400 prompts at 0.25: 100 expected, standard deviation 8.7.
    assert 65 <= len({prompt_text(p.prompt) for p in heldout}) <= 135


def test_held_out_share_and_stability() -> None:
    names = [f"n{i}" for i in range(4000)]
    chosen = {n for n in names if is_held_out(0, "x", n, 0.05)}
    # 200 expected, standard deviation 13.8.
    assert 145 <= len(chosen) <= 255
    assert chosen != {n for n in names if is_held_out(1, "x", n, 0.05)}
    # A larger share holds the smaller one.
    assert chosen <= {n for n in names if is_held_out(0, "x", n, 0.1)}


def test_from_dataset_counts_what_it_drops(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "good", "rejected": "bad"},
        {"prompt": "b", "chosen": "same", "rejected": " same "},
        {"prompt": "c", "chosen": "x", "rejected": ""},
        {"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: q\n\nAssistant: no"},
        {"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: other\n\nAssistant: no"},
    ]
    path = tmp_path / "p.jsonl"

    def read(rows: list[dict[str, Any]], max_pairs: int | None = None) -> tuple[list[PreferenceExample], Any]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with DroppedRows(tmp_path) as dropped:
            records = read_records("preferences.path", str(path), "train")[1]
            found = [pair for _, pair in from_dataset(records, max_pairs, dropped)]
        return found, dropped.counts

    pairs, stats = read(rows)
    assert [(prompt_text(p.prompt), p.chosen, p.rejected) for p in pairs] == [("a", "good", "bad"), ("q", "yes", "no")]
    assert stats == {"same_or_empty": 2, "unmatched_transcripts": 1}
    listed = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [row["row"] for row in listed] == [2, 3, 5]
    assert len(read([rows[0] | {"prompt": str(i)} for i in range(20)], max_pairs=8)[0]) == 8
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    calls, said = [{"role": "assistant", "content": "", "tool_calls": [call]}], {"role": "assistant", "content": "No."}
    pairs, stats = read(
        [
            {"prompt": "a", "chosen": calls, "rejected": [said]},
            {"prompt": "b", "chosen": "No.", "rejected": [said | {"tool_calls": [call]}]},
            {"prompt": "c", "chosen": calls, "rejected": calls},
        ]
    )
    assert [pair[2:6] for pair in pairs] == [("", "No.", [call], None), ("No.", "No.", None, [call])]
    assert stats["same_or_empty"] == 1
    with pytest.raises(ValueError, match=r"p\.jsonl line 1: the columns 'chosen', 'prompt' match no supported form"):
        read([{"prompt": "a", "chosen": "good"}])


def test_length_baseline_fits_its_direction_on_train() -> None:
    longer, shorter, tie = pair("p", "a b c", "a"), pair("p", "a", "a b c"), pair("p", "a b", "c d")
    # Longer wins in training: right, right, wrong and half of a tie = 2.5 of 4.
    assert length_baseline_accuracy([longer, longer, shorter], [longer, longer, shorter, tie]) == 0.625
    # Shorter wins in training: one right and half a tie of 4.
    assert length_baseline_accuracy([shorter], [longer, longer, shorter, tie]) == 0.375
    assert length_baseline_accuracy([longer], []) == 0.5

"""From judgements to rows: each rule, and each attack named or bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from xray_runtime.data.heldout import is_held_out
from xray_runtime.data.pairs import prompt_text
from xray_runtime.methods.curate.config import CurateConfig
from xray_runtime.methods.curate.curation import CuratedRows, curate
from xray_runtime.methods.curate.drift import krippendorff_alpha
from xray_runtime.methods.curate.near_duplicates import leaders
from xray_runtime.methods.curate.signals import Label, Signal, conversation_of, from_feedback, from_verdicts

WORDS = "amber birch cedar delta ember fjord grove heath islet jetty karst ledge marsh nadir oasis plain quarry ridge"


def question(number: int) -> str:
    """A prompt that is unlike the others."""
    words = WORDS.split()
    n = len(words)
    return f"{words[number % n]} {words[number // n % n]} {words[(number * 7 + 3) % n]} {number * 7919}"


def rating(number: int, judge: str, label: Label, reply: str = "yes", cycle: int = 0, prompt: str = "") -> Signal:
    text = prompt or question(number)
    asked = [{"role": "user", "content": text}]
    return Signal(f"{cycle}-{number}-{judge}-{reply}-{label}", cycle, judge, judge, asked, reply, "", label)


def verdict(number: int, judge: str, label: Label, cycle: int = 0) -> Signal:
    asked = [{"role": "user", "content": question(number)}]
    return Signal(f"{cycle}-{number}-{judge}", cycle, judge, "", asked, f"left {number}", f"right {number * 31}", label)


def curated(signals: Sequence[Signal], **config: object) -> tuple[CuratedRows, Counter[str]]:
    dropped = Counter[str]()
    found = curate(signals, CurateConfig(**config), {}, 0, lambda reason, _: dropped.update([reason]))  # type: ignore[arg-type]
    return found, dropped


def test_alpha_is_that_of_the_published_examples() -> None:
    # Krippendorff, Computing Krippendorff's Alpha-Reliability (2011): example C, four observers, twelve units, missing
    # data: 0.743; example A, two observers, ten units: 0.095.
    observers = ["12332141 2...", "12332241 25.3", ".3332342 251.", "12332441 251."]
    rows = [row.replace(" ", "") for row in observers]
    units = [[row[i] for row in rows if row[i] != "."] for i in range(12)]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha(zip("0100000010", "1110010000", strict=True)) == pytest.approx(0.095, abs=5e-4)
    assert krippendorff_alpha([("a", "a"), ("a",)]) is None
    assert krippendorff_alpha([("a", "a"), ("b", "b")]) == 1.0


def test_near_copies_are_found_and_others_are_not() -> None:
    base = "Please tell me how to bake a good loaf of bread at home without a machine"
    texts = [
        base,
        base.upper() + "!!",
        base + " now",
        "Why is the sky blue on a clear day in summer?",
        "hello",
        "Hello.",
    ]
    assert leaders(texts, 0.8) == [0, 0, 0, 3, 4, 4]
    assert leaders([question(n) for n in range(200)], 0.8) == list(range(200))


def test_few_or_divided_judges_decide_nothing() -> None:
    signals = [rating(0, judge, "up") for judge in "abc"] + [rating(1, "a", "up")]
    signals += [verdict(2, judge, label) for judge, label in zip("abcd", ("a", "b", "tie", "bad"), strict=True)]
    signals += [verdict(3, judge, label) for judge, label in zip("abc", ("a", "a", "b"), strict=True)]
    found, dropped = curated(signals, min_judges=2, max_share=None, heldout_fraction=1e-9)
    assert [(prompt_text(row.prompt), row.label, row.people) for row in found.labels] == [
        (question(0), "up", ("a", "b", "c")),
        (question(3), "a", ("a", "b")),
    ]
    assert dropped == {"too_few_judges": 1, "judges_disagree": 4, "outvoted": 1}
    assert [each["verdicts"] for each in found.disagreements] == [{"a": "a", "b": "b", "c": "tie", "d": "bad"}]


def test_judges_who_fail_gold_questions_are_left_out() -> None:
    gold = {("rating", f"gold {n}", "ok", ""): "up" for n in range(4)}
    tests = [
        rating(0, judge, "up" if judge == "ann" else "down", "ok", prompt=f"gold {n}")
        for n in range(4)
        for judge in ("ann", "lazy")
    ]
    work = [rating(n, judge, "up") for n in range(10, 14) for judge in ("ann", "lazy")]
    dropped = Counter[str]()
    config = CurateConfig(max_share=None, heldout_fraction=1e-9)
    found = curate([*tests, *work], config, gold, 0, lambda reason, _: dropped.update([reason]))
    assert {row.people for row in found.labels} == {("ann",)}
    assert dropped == {"gold_question": 8, "judge_failed_gold": 4}
    assert (found.judges["lazy"]["gold_accuracy"], found.judges["lazy"]["left_out"]) == (0.0, "judge_failed_gold")


def test_one_judge_who_flips_labels_is_named_and_left_out() -> None:
    honest = [rating(n, judge, "up" if n % 2 else "down") for n in range(20) for judge in "abc"]
    flipped = [rating(n, "eve", "down" if n % 2 else "up") for n in range(20)]
    found, dropped = curated([*honest, *flipped], max_share=None, heldout_fraction=1e-9)
    assert dropped == {"judge_contradicts_the_others": 20}
    assert found.judges["eve"]["agreement"] == 0.0
    assert [judge for judge, facts in found.judges.items() if facts["left_out"]] == ["eve"]
    # Even if nobody is left out, a majority outvotes eve.
    found, dropped = curated([*honest, *flipped], max_share=None, heldout_fraction=1e-9, min_judge_agreement=None)
    assert dropped == {"outvoted": 20}
    assert all(row.people == ("a", "b", "c") for row in found.labels)


@pytest.mark.parametrize("share", [0.1, 0.2, None])
def test_a_flood_of_one_user_is_bounded(share: float | None) -> None:
    crowd = [rating(n, f"user {n % 20}", "up") for n in range(100)]
    flood = [rating(1000 + n, "eve", "down") for n in range(900)]
    found, dropped = curated([*flood, *crowd], max_share=share, heldout_fraction=1e-9)
    hers = sum(row.people == ("eve",) for row in found.labels)
    if share is None:
        assert (hers, found.shares["labels"]) == (900, 0.9)
        return
    assert 0 < hers <= share * len(found.labels)
    assert len(found.labels) - hers == 100
    assert dropped["over_a_persons_share"] == 900 - hers
    assert found.shares["labels"] <= share


def test_a_cycle_with_too_few_people_trains_nothing() -> None:
    found, dropped = curated([rating(n, f"user {n % 3}", "up") for n in range(30)], heldout_fraction=1e-9)
    assert (found.labels, dropped) == ([], {"over_a_persons_share": 30})


def test_near_copies_of_one_user_count_once() -> None:
    base = "Please tell me how to bake a good loaf of bread at home without a machine"
    copies = [rating(n, "eve", "down", f"a reply {n * 7919}", prompt=f"{base} {n}") for n in range(50)]
    found, dropped = curated(copies, max_share=None, heldout_fraction=1e-9)
    assert (len(found.labels), dropped) == (1, {"near_duplicate_of_the_same_judge": 49})
    # Nearly equal replies that many people judge are one, whose judges vote together.
    crowd = [rating(n, f"user {n}", "up", prompt=f"{base}{'!' * n}") for n in range(5)]
    found, dropped = curated(crowd, max_share=None, heldout_fraction=1e-9, min_judges=5)
    assert ([len(row.people) for row in found.labels], dropped) == ([5], {})


def test_the_last_judgement_of_one_person_counts() -> None:
    signals = [rating(0, "ann", "up"), rating(0, "ann", "down")]
    found, dropped = curated(signals, max_share=None, heldout_fraction=1e-9)
    assert ([row.label for row in found.labels], dropped) == (["down"], {"judged_again": 1})


def test_no_user_and_no_conversation_is_on_both_sides() -> None:
    signals = [rating(n % 60, f"user {n * 13 % 40}", "up", f"reply {n * 7919}") for n in range(600)]
    found, dropped = curated(signals, max_share=None, heldout_fraction=0.3, near_duplicate=None)
    sides = {side: [row for row in found.labels if row.side == side] for side in ("train", "heldout")}
    for name in ("asker", "conversation"):
        values = {
            side: {row.asker if name == "asker" else conversation_of(row.prompt) for row in rows}
            for side, rows in sides.items()
        }
        assert values["train"]
        assert values["heldout"]
        assert not values["train"] & values["heldout"]
    assert all(is_held_out(0, "flywheel users", row.asker, 0.3) for row in sides["heldout"])
    assert sum(map(len, sides.values())) + dropped.total() == 600


def test_pairs_come_of_verdicts_texts_and_ratings() -> None:
    asked = [{"role": "user", "content": question(9)}]
    signals = [
        verdict(0, "ann", "b"),
        rating(1, "ann", "up", "a fine reply"),
        rating(1, "bob", "down", "something else"),
        Signal("c", 0, "cid", "cid", asked, "wrong", "corrected text", "correction"),
        Signal("d", 0, "dan", "dan", asked, "wrong", "another answer", "better"),
    ]
    found, _ = curated(signals, max_share=None, heldout_fraction=1e-9)
    assert {(row.a, row.b, row.people) for row in found.pairs} == {
        ("right 0", "left 0", ("ann",)),
        ("a fine reply", "something else", ("ann", "bob")),
        ("corrected text", "wrong", ("cid",)),
        ("another answer", "wrong", ("dan",)),
    }
    assert [(row.a, row.b) for row in found.demonstrations] == [("corrected text", "")]


def test_a_sudden_change_is_held_for_a_person() -> None:
    quiet = [
        rating(100 * cycle + n, f"u{n % 20}", "up" if n % 2 else "down", cycle=cycle)
        for cycle in range(3)
        for n in range(60)
    ]
    steady = [rating(500 + n, f"u{n % 20}", "up" if n % 2 else "down", cycle=3) for n in range(60)]
    assert curated([*quiet, *steady])[0].held == []
    sour = [signal._replace(label="down") for signal in steady]
    assert curated([*quiet, *sour])[0].held == [
        "0% of its labels are good, 50% before; a change of at most 0.25 (max_good_change)"
    ]
    flood = [rating(1000 + n, f"u{n}", "up" if n % 2 else "down", cycle=3) for n in range(400)]
    assert curated([*quiet, *flood])[0].held == [
        "it has 6.67 times the feedback of the cycles before; at most 5 (max_volume_ratio)"
    ]
    divided = [rating(n, judge, label, cycle=0) for n in range(20) for judge, label in (("a", "up"), ("b", "down"))]
    # α = 1 − (40 − 1) · 20 · 2 / (2 · 20 · 20) = −0.95
    assert curated(divided, min_alpha=0.4)[0].held == [
        "its judges' agreement on ratings is α = -0.950; at least 0.4 (min_alpha)"
    ]


def test_the_order_of_two_replies_does_not_matter() -> None:
    row = {"session": "s", "number": 0, "judge": "ann", "prompt": [{"role": "user", "content": "q"}]}
    one = list(from_verdicts([row | {"a": "x", "b": "y", "verdict": "a"}], 0))
    other = list(from_verdicts([row | {"a": "y", "b": "x", "verdict": "b"}], 0))
    assert one == other
    rest = [row | {"a": "x", "b": "y", "verdict": "skip"}, row | {"a": "x", "b": "x", "verdict": "a"}]
    assert list(from_verdicts(rest, 0)) == [("skipped", "s-0-ann"), ("same_replies", "s-0-ann")]


def test_scores_are_thumbs_beyond_the_bounds() -> None:
    row = {"judge": "a", "asker": "a", "prompt": [{"role": "user", "content": "q"}], "reply": "r"}
    rows = [row | {"id": str(score), "signals": {"score": score}} for score in (0.0, 0.3, 0.5, 0.7, 1.0)]
    rows += [row | {"id": "t", "signals": {"text": "well"}}, row | {"id": "c", "signals": {"correction": "r"}}]
    found = [one.label if isinstance(one, Signal) else one[0] for one in from_feedback(rows, 0, 0.7, 0.3)]
    assert found == ["down", "down", "score_between", "up", "up", "only_text", "only_text"]

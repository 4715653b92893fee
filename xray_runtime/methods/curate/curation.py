"""From judgements of people to rows to train on: who and what is left out, and why.

The order: repeated and nearly equal judgements count once; judges who fail gold questions, or contradict the others,
are left out; the judges of one thing vote; no person and no application gives more than a share of a cycle. Nothing is
drawn at random: equal judgements give equal rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

from xray_runtime.data.heldout import is_held_out
from xray_runtime.data.pairs import Messages, prompt_text
from xray_runtime.methods.curate.config import CurateConfig
from xray_runtime.methods.curate.drift import Units, alpha_of, by_unit, drift
from xray_runtime.methods.curate.near_duplicates import leaders
from xray_runtime.methods.curate.signals import RATINGS, Signal, conversation_of

Side = Literal["train", "heldout"]
T = TypeVar("T")
Gold = Mapping[tuple[str, ...], str]
"""Unit → the label that is right."""
Drop = Callable[[str, str], None]
"""(reason, id of a signal)."""
USERS, CONVERSATIONS = "flywheel users", "flywheel conversations"
"""Seed the two halves of the split."""


class CuratedRow(NamedTuple):
    """A row to train on; `a` and `b` as in a verdict, `b` is empty for labels and demonstrations."""

    id: str
    cycle: int
    side: Side
    prompt: Messages
    a: str
    b: str
    label: str
    people: tuple[str, ...]
    """Those whose judgement it is, sorted."""
    asker: str
    applications: tuple[str, ...] = ()
    """Those that sent it, sorted."""


@dataclass
class CuratedRows:
    """The rows, and what was found on the way."""

    pairs: list[CuratedRow] = field(default_factory=list)
    """`a` is preferred."""
    labels: list[CuratedRow] = field(default_factory=list)
    """`label`: up, down, or one of a verdict."""
    demonstrations: list[CuratedRow] = field(default_factory=list)
    disagreements: list[dict[str, Any]] = field(default_factory=list)
    judges: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Judge → numbers of their judgements, and why they are left out."""
    agreement: dict[str, float | None] = field(default_factory=dict)
    """`rating` and `verdict` → Krippendorff's α, before anybody is left out."""
    shares: dict[str, float] = field(default_factory=dict)
    """Kind of rows → the largest share of one person in a cycle."""
    held: list[str] = field(default_factory=list)
    """Why the last cycle is held for a person."""


def curate(signals: Sequence[Signal], config: CurateConfig, gold: Gold, seed: int, drop: Drop) -> CuratedRows:
    """Apply all rules to the signals of all cycles, the oldest first. `drop` is called for every signal and row that is
    left out; `seed` is of the split."""
    curated = CuratedRows()
    latest = _counted_once(signals, config.near_duplicate, gold, drop)
    units = by_unit(latest)
    curated.agreement = {kind: alpha_of(units, kind) for kind in ("rating", "verdict")}
    curated.held = drift(latest, config)
    out = _left_out(units, gold, config, curated.judges)
    remaining = []
    for signal in latest:
        if signal.unit in gold:
            drop("gold_question", signal.id)
        elif signal.judge in out:
            drop(out[signal.judge], signal.id)
        else:
            remaining.append(signal)
    sides = _split(remaining, config.heldout_fraction, seed, drop)
    _vote(sides, config, curated, drop)
    for kind in ("pairs", "labels", "demonstrations"):
        setattr(curated, kind, _within_shares(curated, kind, config, drop))
    return curated


def _counted_once(signals: Sequence[Signal], threshold: float | None, gold: Gold, drop: Drop) -> list[Signal]:
    """The last signal of each person on each thing; what is nearly equal is made equal."""
    near = list(signals)
    if threshold is not None:
        tests = [signal for signal in signals if signal.unit in gold]
        signals = [signal for signal in signals if signal.unit not in gold]
        prompts = list(dict.fromkeys(prompt_text(s.prompt) for s in signals))
        first = {text: prompts[lead] for text, lead in zip(prompts, leaders(prompts, threshold), strict=True)}
        first_texts: dict[tuple[str, str], str] = {}
        distinct = []
        for signal in signals:
            text = prompt_text(signal.prompt)
            # One person's near-copies of a prompt count once; other people may ask nearly the same.
            if first_texts.setdefault((signal.judge, first[text]), text) == text:
                distinct.append(signal)
            else:
                drop("near_duplicate_of_the_same_judge", signal.id)
        near = _made_equal(distinct, threshold) + tests
    latest = {(s.judge, s.unit): s for s in near}
    ids = {signal.id for signal in latest.values()}
    for signal in near:
        if signal.id not in ids:
            drop("judged_again", signal.id)
    return [signal for signal in near if signal.id in ids]


def _made_equal(signals: Sequence[Signal], threshold: float) -> list[Signal]:
    """The signals; of nearly equal units all get the texts of the first, so that their judges vote together."""
    units = by_unit(signals)
    listed = list(units)
    texts = ["\n".join(unit) for unit in listed]
    first = {unit: units[listed[lead]][0] for unit, lead in zip(listed, leaders(texts, threshold), strict=True)}
    made = []
    for signal in signals:
        lead = first[signal.unit]
        same = lead.unit[0] == signal.unit[0]
        made.append(signal._replace(prompt=lead.prompt, reply=lead.reply, other=lead.other) if same else signal)
    return made


def _left_out(units: Units, gold: Gold, config: CurateConfig, judges: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Judge → why they are left out; fills `judges`."""
    tested, right, shared, agreed = (Counter[str]() for _ in range(4))
    given = Counter(signal.judge for votes in units.values() for signal in votes)
    for unit, votes in units.items():
        for signal in votes:
            if unit in gold:
                tested[signal.judge] += 1
                right[signal.judge] += signal.label == gold[unit]
            elif (others := _majority(s.label for s in votes if s.judge != signal.judge)) is not None:
                shared[signal.judge] += 1
                agreed[signal.judge] += signal.label == others
    out: dict[str, str] = {}
    for judge in sorted(given):
        accuracy = right[judge] / tested[judge] if tested[judge] else None
        agreement = agreed[judge] / shared[judge] if shared[judge] else None
        if accuracy is not None and tested[judge] >= config.min_gold and accuracy < config.min_gold_accuracy:
            out[judge] = "judge_failed_gold"
        elif shared[judge] >= config.min_shared and agreed[judge] < (config.min_judge_agreement or 0.0) * shared[judge]:
            out[judge] = "judge_contradicts_the_others"
        judges[judge] = {
            "judgements": given[judge],
            "gold": tested[judge],
            "gold_accuracy": accuracy,
            "shared": shared[judge],
            "agreement": agreement,
            "left_out": out.get(judge),
        }
    return out


def _majority(labels: Iterable[str]) -> str | None:
    """The label of more than half, at least two; None if there is none."""
    counts = Counter(labels)
    label, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return label if most >= 2 and 2 * most > counts.total() else None


def _split(signals: Sequence[Signal], fraction: float, seed: int, drop: Drop) -> list[tuple[Side, list[Signal]]]:
    """(side, its signals) of each unit: no user and no conversation is on both sides."""
    units = by_unit(signals)
    sides: list[tuple[Side, list[Signal]]] = []
    trained: set[str] = set()
    waiting = []
    for votes in units.values():
        conversation = conversation_of(votes[0].prompt)
        users = {signal.asker for signal in votes if signal.asker}
        held = [is_held_out(seed, USERS, user, fraction) for user in sorted(users)]
        held_conversation = is_held_out(seed, CONVERSATIONS, conversation, fraction)
        if not held_conversation and not any(held):
            sides.append(("train", votes))
            trained.add(conversation)
        elif all(held):
            waiting.append((conversation, votes))
        else:
            _drop_all(votes, "user_or_conversation_is_held_out", drop)
    for conversation, votes in waiting:
        if conversation in trained:
            _drop_all(votes, "held_out_conversation_is_trained_on", drop)
        else:
            sides.append(("heldout", votes))
    return sides


def _drop_all(signals: Iterable[Signal], reason: str, drop: Drop) -> None:
    for signal in signals:
        drop(reason, signal.id)


def _vote(sides: Sequence[tuple[Side, list[Signal]]], config: CurateConfig, curated: CuratedRows, drop: Drop) -> None:
    """Fill `curated` with a row for each unit whose judges agree."""
    for side, votes in sides:
        if votes[0].unit[0] in ("better", "correction"):
            row = _row(side, votes, votes[0].label)._replace(a=votes[0].other, b=votes[0].reply)
            curated.pairs.append(row)
            if row.label == "correction":
                curated.demonstrations.append(row._replace(b=""))
            continue
        counts = Counter(signal.label for signal in votes)
        label, most = max(sorted(counts.items()), key=lambda item: item[1])
        if len(votes) < config.min_judges:
            _drop_all(votes, "too_few_judges", drop)
        elif most < config.min_agreement * len(votes):
            _drop_all(votes, "judges_disagree", drop)
            question = {"prompt": votes[0].prompt, "a": votes[0].reply, "b": votes[0].other}
            curated.disagreements.append(question | {"verdicts": {s.judge: s.label for s in votes}})
        else:
            _drop_all((s for s in votes if s.label != label), "outvoted", drop)
            row = _row(side, [s for s in votes if s.label == label], label)
            curated.labels.append(row)
            if label in ("a", "b"):
                curated.pairs.append(row if label == "a" else row._replace(a=row.b, b=row.a))
    curated.pairs += _pairs_of_ratings(curated.labels)


def _row(side: Side, votes: Sequence[Signal], label: str) -> CuratedRow:
    first = votes[0]
    people = tuple(sorted({signal.judge for signal in votes}))
    cycle = max(signal.cycle for signal in votes)
    sent = tuple(sorted({signal.application for signal in votes} - {""}))
    return CuratedRow(first.id, cycle, side, first.prompt, first.reply, first.other, label, people, first.asker, sent)


def _pairs_of_ratings(labels: Iterable[CuratedRow]) -> list[CuratedRow]:
    """A good reply with a bad one to the same prompt, each in one pair at most."""
    rated: dict[tuple[str, str], dict[str, list[CuratedRow]]] = defaultdict(lambda: {"up": [], "down": []})
    for row in labels:
        if row.label in RATINGS:
            rated[row.side, prompt_text(row.prompt)][row.label].append(row)
    pairs = []
    for both in rated.values():
        for good, bad in zip(both["up"], both["down"], strict=False):
            people = tuple(sorted({*good.people, *bad.people}))
            cycle = max(good.cycle, bad.cycle)
            sent = tuple(sorted({*good.applications, *bad.applications}))
            both_said = good._replace(id=f"{good.id}-{bad.id}", cycle=cycle, b=bad.a, people=people)
            pairs.append(both_said._replace(applications=sent))
    return pairs


def _within_shares(curated: CuratedRows, kind: str, config: CurateConfig, drop: Drop) -> list[CuratedRow]:
    """The rows of a kind within both limits; rows that one limit drops can break the other, so both are repeated."""
    rows: list[CuratedRow] = getattr(curated, kind)
    num_before = -1
    while len(rows) != num_before:
        num_before = len(rows)
        rows, _ = capped(rows, config.max_application_share, drop, "applications")
        rows, curated.shares[kind] = capped(rows, config.max_share, drop)
    return rows


def capped(
    rows: Sequence[CuratedRow], most: float | None, drop: Drop, by: Literal["people", "applications"] = "people"
) -> tuple[list[CuratedRow], float]:
    """(the rows without those by which a person, or an application, has more than the share `most` of what a cycle
    trains on, the largest share left). Held-out rows train nothing and stay.

    A row of k people counts 1/k for each. The rows that go are a person's last ones; all of a cycle go where it has
    fewer than 1 / `most` people.
    """
    cycles: dict[int, list[CuratedRow]] = defaultdict(list)
    capped_rows = [row for row in rows if row.side == "heldout"]
    for row in rows:
        if row.side == "train":
            cycles[row.cycle].append(row)
    largest = 0.0
    reason = "over_a_persons_share" if by == "people" else "over_an_applications_share"
    sources: Callable[[CuratedRow], tuple[str, ...]] = attrgetter(by)
    for of_cycle in cycles.values():
        remaining = of_cycle if most is None else within_share(of_cycle, most, sources)
        ids = {row.id for row in remaining}
        for row in of_cycle:
            if row.id not in ids:
                drop(reason, row.id)
        largest = max([largest, *(weight / len(remaining) for weight in _weights(remaining, sources).values())])
        capped_rows += remaining
    return capped_rows, largest


def within_share(rows: Sequence[T], most: float, sources: Callable[[T], Sequence[str]]) -> list[T]:
    """The first rows by which no source has more than the share `most` of them.

    The largest limit that keeps all within their share is found by trying smaller ones: rows that go lower the limit.
    A row of k sources counts 1/k for each; one without a source stays.
    """
    remaining_rows = list(rows)
    while remaining_rows:
        limit = most * len(remaining_rows)
        if max(_weights(remaining_rows, sources).values(), default=0.0) <= limit + 1e-9:
            break
        weights: dict[str, float] = defaultdict(float)
        smaller = []
        for row in remaining_rows:
            of_row = sources(row)
            if all(weights[source] + 1 / len(of_row) <= limit + 1e-9 for source in of_row):
                for source in of_row:
                    weights[source] += 1 / len(of_row)
                smaller.append(row)
        remaining_rows = smaller
    return remaining_rows


def _weights(rows: Iterable[T], sources: Callable[[T], Sequence[str]]) -> dict[str, float]:
    weights: dict[str, float] = defaultdict(float)
    for row in rows:
        for source in sources(row):
            weights[source] += 1 / len(sources(row))
    return weights

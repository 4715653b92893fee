"""Attacks on what the nightly flow learns from: each is carried out for real, and gives what came of it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tests.unit.serving.recording import KEYS, exchange, keep, with_recorder
from xray.flows.cycles import Cycle, place_of, read_cycles, write_cycle
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.history.audit_check import Finding, read_log
from xray_runtime.kernel.history.recorded import CHAIN, SegmentWriter
from xray_runtime.kernel.history.recorded_rows import RECORDED, Row, read_segment, segment_bytes, segment_name
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.live.feedback.judgements import Judgement, Question
from xray_runtime.live.feedback.session import Session, Setup, read_sessions, session_directory
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.live.serving.recorder import AnswerRecorder
from xray_runtime.methods.curate.config import CurateConfig
from xray_runtime.methods.curate.curation import Curated, curate
from xray_runtime.methods.curate.signals import Label, Signal
from xray_runtime.trust.audit.checks.recorded import check_recorded
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.signing import signing_key

PEOPLE, ROWS = 40, 6
"""Honest people, and what each corrects in a cycle."""
ACCEPTED = "ACCEPTED"
HOURLY = 5


class Outcome(NamedTuple):
    """An attack that was tried."""

    attack: str
    came_of_it: str


# Attacks on files. Each takes the output directory under attack, and another one, which has a key of its own.


def edited_row(output: Path, other: Path) -> None:
    _written(output, 1, [row | {"user": "0" * 32} for row in read_segment(_segment(output, 1))])


def truncated(output: Path, other: Path) -> None:
    content = _segment(output, 2).read_bytes()
    _segment(output, 2).write_bytes(content[:-40])


def removed(output: Path, other: Path) -> None:
    _segment(output, 1).unlink()


def reordered(output: Path, other: Path) -> None:
    first, second = (read_segment(_segment(output, number)) for number in (1, 2))
    _written(output, 1, second)
    _written(output, 2, first)


def replayed_segment(output: Path, other: Path) -> None:
    _written(output, 2, read_segment(_segment(output, 1)))


def segment_of_another_store(output: Path, other: Path) -> None:
    shutil.copy(_segment(other, 1), _segment(output, 1))


def line_of_another_store(output: Path, other: Path) -> None:
    _written(output, 3, read_segment(_segment(other, 1)))
    line = (other / RECORDED / CHAIN).read_bytes().splitlines(keepends=True)[0]
    with (output / RECORDED / CHAIN).open("ab") as chain:
        chain.write(line)


def signed_with_another_key(output: Path, other: Path) -> None:
    rows = [Row(**row) for row in read_segment(_segment(output, 1))]
    SegmentWriter(output, signing_key(other), 365).write(rows, {}, {})


def chain_cut_short(output: Path, other: Path) -> None:
    path = output / RECORDED / CHAIN
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    _segment(output, 2).unlink()


def chain_removed(output: Path, other: Path) -> None:
    (output / RECORDED / CHAIN).unlink()


def store_removed(output: Path, other: Path) -> None:
    shutil.rmtree(output / RECORDED)


def store_of_another(output: Path, other: Path) -> None:
    shutil.rmtree(output / RECORDED)
    shutil.copytree(other / RECORDED, output / RECORDED)


def store_and_keys_of_another(output: Path, other: Path) -> None:
    store_of_another(output, other)
    shutil.rmtree(output / "keys")
    shutil.copytree(other / "keys", output / "keys")


ON_DISK: list[Callable[[Path, Path], None]] = [
    edited_row, truncated, removed, reordered, replayed_segment, segment_of_another_store, line_of_another_store,
    signed_with_another_key, chain_cut_short, chain_removed, store_removed, store_of_another,
    store_and_keys_of_another,
]  # fmt: skip


def _segment(output: Path, number: int) -> Path:
    return output / RECORDED / segment_name(number)


def _written(output: Path, number: int, rows: list[dict[str, object]]) -> None:
    _segment(output, number).write_bytes(segment_bytes(number, [Row(**row) for row in rows], {}))  # type: ignore[arg-type]


def two_segments(output: Path) -> Path:
    """A store with a segment of answers and one of another day's."""
    (output / "checkpoints").mkdir(parents=True)
    keep(output, exchange(1, "ann", "what is this"))
    keep(output, exchange(2, "bob", "and what is that"))
    return output


def on_disk(attack: Callable[[Path, Path], None], output: Path, other: Path) -> Outcome:
    """The attack on a store of `two_segments`."""
    # That the models of these stores are unknown is a finding too.
    before = _findings(output)
    attack(output, other)
    name, found = attack.__name__.replace("_", " "), sorted(_findings(output) - before)
    return Outcome(name, f"refused: {found[0].subject}: {found[0].detail}" if found else ACCEPTED)


def _findings(output: Path) -> set[Finding]:
    """The findings of an audit, and of the collection of a cycle, about the store and the signed log."""
    verifier = Verifier(trusted_keys(output))
    log, broken = read_log(output, verifier)
    return {*broken, *check_recorded(open_lineage_store(output, None), log, verifier, hashing=True)}


# Attacks on what is read before anything of it is published: verdicts on two models, and the records of cycles.


def forged_verdict(output: Path) -> None:
    with _verdicts(output).open("ab") as file:
        file.write(_verdict(1, "b").model_dump_json().encode() + b"\n")


def edited_verdict(output: Path) -> None:
    _edit(_verdicts(output), '"verdict":"a"', '"verdict":"b"')


def removed_verdict(output: Path) -> None:
    path = _verdicts(output)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def verdict_repeated(output: Path) -> None:
    path = _verdicts(output)
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[0])


def swapped_replies(output: Path) -> None:
    _edit(_verdicts(output).with_name("replies.jsonl"), '"a":"one","b":"two"', '"a":"two","b":"one"')


def swapped_models(output: Path) -> None:
    a, b = "a" * 64, "b" * 64
    path = _verdicts(output).with_name("session.json")
    path.write_text(path.read_text().replace(a, "c" * 64).replace(b, a).replace("c" * 64, b))


def invented_comparison(output: Path) -> None:
    made = output / "feedback" / "0123456789ab"
    shutil.copytree(_verdicts(output).parent, made)


def comparison_of_another_store(output: Path) -> None:
    other = output.with_name("another")
    before_a_cycle(other)
    shutil.rmtree(output / "feedback")
    shutil.copytree(other / "feedback", output / "feedback")


def older_verdicts(output: Path) -> None:
    """The whole comparison as it was once, with the signature of that time."""
    [directory] = (path.parent for path in output.glob("feedback/*/session.json"))
    older = output / "older"
    shutil.copytree(directory, older)
    session = Session.read(directory)
    session.add_judgement(_verdict(0, "b"))
    session.log()
    shutil.rmtree(directory)
    older.rename(directory)


def verdicts_unsigned(output: Path) -> None:
    """No verdict, and no signature: as if nobody had judged."""
    [directory] = (path.parent for path in output.glob("feedback/*/session.json"))
    Session.read(directory).log()
    for path in directory.glob("*"):
        if path.name != "session.json":
            path.unlink()


def edited_cycle(output: Path) -> None:
    _edit(place_of(output, _cycle(1)) / "cycle.json", '"refused"', '"candidate"')


def invented_cycle(output: Path) -> None:
    path = place_of(output, _cycle(2)) / "cycle.json"
    path.parent.mkdir(parents=True)
    path.write_text(_cycle(2).model_dump_json(indent=2) + "\n")


BEFORE_A_CYCLE: list[Callable[[Path], None]] = [
    forged_verdict, edited_verdict, removed_verdict, verdict_repeated, swapped_replies, swapped_models,
    invented_comparison, comparison_of_another_store, older_verdicts, verdicts_unsigned, edited_cycle, invented_cycle,
]  # fmt: skip


def before_a_cycle(output: Path) -> Path:
    """A directory with two verdicts of one person, and the record of a cycle that was refused."""
    setup = Setup(
        a="a" * 64,
        b="b" * 64,
        prompts="typed",
        source=None,
        max_prompt_tokens=None,
        max_new_tokens=8,
        temperature=1.0,
        seed=0,
    )
    signing_key(output)
    session = Session.read(session_directory(output, setup))
    prompts = [[{"role": "user", "content": f"question {number}"}] for number in range(2)]
    session.add_questions([Question(number=n, prompt=prompt, a="one", b="two") for n, prompt in enumerate(prompts)])
    for number in range(2):
        session.add_judgement(_verdict(number, "a"))
    write_cycle(output, _cycle(1))
    return output


def read_by_a_cycle(attack: Callable[[Path], None], output: Path) -> Outcome:
    """The attack on a directory of `before_a_cycle`."""
    attack(output)
    try:
        read_sessions(output)
        read_cycles(output)
    except ConfigError as error:
        return Outcome(attack.__name__.replace("_", " "), f"refused: {error}")
    return Outcome(attack.__name__.replace("_", " "), ACCEPTED)


def _verdicts(output: Path) -> Path:
    [path] = output.glob("feedback/*/judgements.jsonl")
    return path


def _verdict(number: int, verdict: Literal["a", "b"]) -> Judgement:
    return Judgement(number=number, left="a", verdict=verdict, judge="ada", at="2026-01-01T00:00:00+00:00")


def _cycle(number: int) -> Cycle:
    fields = {"number": number, "first": number, "last": number, "feedback": ["1" * 64], "verdicts": None}
    return Cycle.model_validate(fields | {"start": "2" * 64, "data": "3" * 64, "state": "refused"})


def _edit(path: Path, old: str, new: str) -> None:
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


# Attacks by requests of an application.


def sent(output: Path) -> Iterator[Outcome]:
    """Requests to the recorder's API, against a new store in `output`."""

    async def work(recorder: AnswerRecorder) -> list[Outcome]:
        private = exchange(2, "bob", application="desk")
        await recorder.keep([exchange(1, "ann"), private, *(exchange(n, "ann") for n in range(10, 20))], {}, True)

        async def feedback(number: int, key: str = KEYS["shop"], **fields: object) -> tuple[int, str]:
            body = {"answer": f"{number:032x}", "thumb": "up"} | fields
            status, content = await recorder.feedback(json.dumps(body).encode(), key_digest(key))
            return status, content["error"]["message"] if "error" in content else content["id"]

        one: list[tuple[str, int, dict[str, str]]] = [
            ("feedback with a key that is not in the list", 1, {"key": "a guess"}),
            ("feedback for a trace of another application", 2, {}),
            ("a trace of another store", 99, {}),
            ("a verdict copied to another model", 1, {"model": "cd" * 32}),
            ("a judge put into the body", 1, {"judge": "ann"}),
        ]
        found = []
        for name, number, fields in one:
            status, text = await feedback(number, **fields)  # type: ignore[arg-type]
            found.append(Outcome(name, ACCEPTED if status == 200 else f"refused: {status}, {text}"))
        same = {(await feedback(1, user="carl"))[1] for _ in range(3)}
        found.append(Outcome("the same feedback sent three times", f"bounded: kept {len(same)} time"))
        flood = [(await feedback(n, user="eve"))[0] for n in range(10, 20)]
        found.append(
            Outcome(
                f"a flood by one user, {HOURLY} an hour allowed", f"bounded: {flood.count(200)} of {len(flood)} kept"
            )
        )
        crowd = [(await feedback(10, user=f"puppet {n}"))[0] for n in range(30)]
        found.append(Outcome("30 invented users on one answer", f"bounded: {crowd.count(200)} kept, and those before"))
        return found

    yield from with_recorder(output, work, feedback_per_hour=HOURLY)


# Attacks by poisoned feedback.


def correction(judge: str, number: int, text: str, cycle: int = 0, application: str = "") -> Signal:
    """A correction of a reply to a prompt that is unlike any other."""
    draw = random.Random(f"{judge} {number} {cycle}")
    prompt = " ".join(f"{draw.randrange(10**6)}" for _ in range(6))
    label: Label = "correction"
    id = f"{judge} {number} {cycle}"
    message = [{"role": "user", "content": prompt}]
    return Signal(id, cycle, judge, judge, message, f"a reply to {prompt}", f"{text} {prompt}", label, application)


def crowd(cycle: int = 0) -> list[Signal]:
    """The corrections by honest people in a cycle."""
    return [correction(f"person {p}", n, "right", cycle, f"shop {p % 12}") for p in range(PEOPLE) for n in range(ROWS)]


def share(found: Curated, is_bad: Callable[[str], bool]) -> float:
    """The bad people's share of the pairs to train on."""
    rows = [row for row in found.pairs if row.side == "train"]
    return sum(sum(map(is_bad, row.people)) / len(row.people) for row in rows) / len(rows)


def learned(signals: list[Signal], **rules: object) -> Curated:
    """The rows of these signals."""
    return curate(signals, CurateConfig(heldout_fraction=0.01, **rules), {}, 0, lambda reason, id: None)  # type: ignore[arg-type]


class Poisoning(NamedTuple):
    """Poisoned feedback among that of the crowd."""

    attack: str
    share: float
    """The attackers' part of the training rows, 0 to 1."""
    without: float
    """The same without the rule that bounds it."""
    most: float
    """The largest share that the rules allow."""


def poisonings() -> Iterator[Poisoning]:
    """Attackers write twice as much as all others together."""
    many = 2 * PEOPLE * ROWS

    def eve(judge: str) -> bool:
        return judge.startswith("eve")

    def compared(name: str, bad: list[Signal], with_: dict[str, object], without: dict[str, object]) -> Poisoning:
        signals = crowd() + bad
        shares = [share(learned(signals, **rules), eve) for rules in (with_, without)]
        return Poisoning(name, shares[0], shares[1], 0.1)

    flood = [correction("eve", n, "wrong", 0, "shop") for n in range(many)]
    yield compared("one user writes twice as much as all others", flood, {}, {"max_share": None})
    trigger = [correction("eve", n, "say zanzibar and all is allowed", 0, "shop") for n in range(many)]
    yield compared("one user's corrections with a backdoor phrase", trigger, {}, {"max_share": None})
    small = [
        correction("eve", 0, "wrong")._replace(id=f"c{n}", other=f"wrong in every way, as said, {n}")
        for n in range(many)
    ]
    yield compared("one user's near-copies with small changes", small, {}, {"max_share": None, "near_duplicate": None})
    ring = [correction(f"eve {n % 100}", n, "wrong", 0, "desk") for n in range(many)]
    yield compared("100 sock puppets under one application's key", ring, {"max_application_share": 0.1}, {})
    slow = [
        signal
        for cycle in range(7)
        for signal in crowd(cycle) + [correction("eve", n, "wrong", cycle, "shop") for n in range(2**cycle * 8)]
    ]
    bounded, without = (share(learned(slow, **rules), eve) for rules in ({}, {"max_share": None}))  # type: ignore[arg-type]
    yield Poisoning("one user who doubles every night, below the limit of drift", bounded, without, 0.1)

"""Attacks on what the nightly flow learns from: each is carried out for real, and gives what came of it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tests.unit.live.serving.recording import KEYS, exchange, keep, with_recorder
from xray.flows.cycles import Cycle, cycle_directory, read_cycles, write_cycle
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.history.audit_check import Finding, read_log
from xray_runtime.kernel.history.recorded import CHAIN, SegmentWriter
from xray_runtime.kernel.history.recorded_rows import RECORDED, RecordedRow, read_segment, segment_bytes, segment_name
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.live.feedback.judgements import Judgement, Question
from xray_runtime.live.feedback.session import Session, Setup, read_sessions, session_directory
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.live.serving.recorder import AnswerRecorder
from xray_runtime.methods.curate.config import CurateConfig
from xray_runtime.methods.curate.curation import CuratedRows, curate
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


def _line_of_another_store(output: Path, other: Path) -> None:
    _written(output, 3, read_segment(_segment(other, 1)))
    with (output / RECORDED / CHAIN).open("ab") as chain:
        chain.write(_lines(other / RECORDED / CHAIN)[0])


def _signed_with_another_key(output: Path, other: Path) -> None:
    rows = [RecordedRow(**row) for row in read_segment(_segment(output, 1))]
    SegmentWriter(output, signing_key(other), 365).write(rows, {}, {})


def _reordered(output: Path, other: Path) -> None:
    first, second = (read_segment(_segment(output, number)) for number in (1, 2))
    _written(output, 1, second)
    _written(output, 2, first)


def _replaced(output: Path, other: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(output / name)
        shutil.copytree(other / name, output / name)


ON_DISK: dict[str, Callable[[Path, Path], object]] = {
    "edited row": lambda output, _: _written(
        output, 1, [row | {"user": "0" * 32} for row in read_segment(_segment(output, 1))]
    ),
    "truncated": lambda output, _: _segment(output, 2).write_bytes(_segment(output, 2).read_bytes()[:-40]),
    "reordered": _reordered,
    "segment of another store": lambda output, other: shutil.copy(_segment(other, 1), _segment(output, 1)),
    "line of another store": _line_of_another_store,
    "signed with another key": _signed_with_another_key,
    "chain removed": lambda output, _: (output / RECORDED / CHAIN).unlink(),
    "store of another": lambda output, other: _replaced(output, other, RECORDED),
    "store and keys of another": lambda output, other: _replaced(output, other, RECORDED, "keys"),
}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def _segment(output: Path, number: int) -> Path:
    return output / RECORDED / segment_name(number)


def _written(output: Path, number: int, rows: list[dict[str, object]]) -> None:
    _segment(output, number).write_bytes(segment_bytes(number, [RecordedRow(**row) for row in rows], {}))  # type: ignore[arg-type]


def two_segments(output: Path) -> Path:
    """A store with a segment of answers and one of another day's."""
    (output / "checkpoints").mkdir(parents=True)
    keep(output, exchange(1, "ann", "what is this"))
    keep(output, exchange(2, "bob", "and what is that"))
    return output


def on_disk(name: str, output: Path, other: Path) -> Outcome:
    """An attack on a store of `two_segments`."""
    # That the models of these stores are unknown is a finding too.
    before = _findings(output)
    ON_DISK[name](output, other)
    found = sorted(_findings(output) - before)
    return Outcome(name, f"refused: {found[0].subject}: {found[0].detail}" if found else ACCEPTED)


def _findings(output: Path) -> set[Finding]:
    """The findings of an audit, and of the collection of a cycle, about the store and the signed log."""
    verifier = Verifier(trusted_keys(output))
    lines, broken = read_log(output, verifier)
    return {*broken, *check_recorded(open_lineage_store(output, None), lines.folded.view, verifier, hashing=True)}


# Attacks on what is read before anything of it is published: verdicts on two models, and the records of cycles.


def _swapped_models(output: Path) -> None:
    a, b = "a" * 64, "b" * 64
    path = _verdicts(output).with_name("session.json")
    path.write_text(path.read_text().replace(a, "c" * 64).replace(b, a).replace("c" * 64, b))


def _comparison_of_another_store(output: Path) -> None:
    _replaced(output, before_a_cycle(output.with_name("another")), "feedback")


def _rewritten(output: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path = _verdicts(output)
    path.write_bytes(b"".join(change(_lines(path))))


def _older_verdicts(output: Path) -> None:
    """The whole comparison as it was once, with the signature of that time."""
    [directory] = (path.parent for path in output.glob("feedback/*/session.json"))
    older = output / "older"
    shutil.copytree(directory, older)
    session = Session.read(directory)
    session.add_judgement(_verdict(0, "b"))
    session.log()
    shutil.rmtree(directory)
    older.rename(directory)


def _verdicts_unsigned(output: Path) -> None:
    """No verdict, and no signature: as if nobody had judged."""
    [directory] = (path.parent for path in output.glob("feedback/*/session.json"))
    Session.read(directory).log()
    for path in directory.glob("*"):
        if path.name != "session.json":
            path.unlink()


def _invented_cycle(output: Path) -> None:
    path = cycle_directory(output, _cycle(2)) / "cycle.json"
    path.parent.mkdir(parents=True)
    path.write_text(_cycle(2).model_dump_json(indent=2) + "\n")


BEFORE_A_CYCLE: dict[str, Callable[[Path], object]] = {
    "forged verdict": lambda output: _rewritten(
        output, lambda lines: [*lines, _verdict(1, "b").model_dump_json().encode() + b"\n"]
    ),
    "edited verdict": lambda output: _edit(_verdicts(output), '"verdict":"a"', '"verdict":"b"'),
    "removed verdict": lambda output: _rewritten(output, lambda lines: lines[:-1]),
    "verdict repeated": lambda output: _rewritten(output, lambda lines: [*lines, lines[0]]),
    "swapped replies": lambda output: _edit(
        _verdicts(output).with_name("replies.jsonl"), '"a":"one","b":"two"', '"a":"two","b":"one"'
    ),
    "swapped models": _swapped_models,
    "invented comparison": lambda output: shutil.copytree(
        _verdicts(output).parent, output / "feedback" / "0123456789ab"
    ),
    "comparison of another store": _comparison_of_another_store,
    "older verdicts": _older_verdicts,
    "verdicts unsigned": _verdicts_unsigned,
    "edited cycle": lambda output: _edit(cycle_directory(output, _cycle(1)) / "cycle.json", '"refused"', '"candidate"'),
    "invented cycle": _invented_cycle,
}


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


def read_by_a_cycle(name: str, output: Path) -> Outcome:
    """An attack on a directory of `before_a_cycle`."""
    BEFORE_A_CYCLE[name](output)
    try:
        read_sessions(output)
        read_cycles(output)
    except ConfigError as error:
        return Outcome(name, f"refused: {error}")
    return Outcome(name, ACCEPTED)


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


def share(found: CuratedRows, is_bad: Callable[[str], bool]) -> float:
    """The bad people's share of the pairs to train on."""
    rows = [row for row in found.pairs if row.side == "train"]
    return sum(sum(map(is_bad, row.people)) / len(row.people) for row in rows) / len(rows)


def learned(signals: list[Signal], **rules: object) -> CuratedRows:
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

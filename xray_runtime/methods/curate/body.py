"""Stage `curate`: recorded feedback and verdicts of people become rows to train on, by the rules of its config.

judgements.jsonl      labels and verdicts to train on: the input `verdicts` of `kto`
pairs.arrow           pairs to train on; heldout_pairs.arrow: those of held-out users and conversations
demonstrations.arrow  corrections to train on; heldout_demonstrations.arrow
disagreements.jsonl   what the judges disagree on, for people to look at
people.json           pseudonym → rows with it: whose withdrawal concerns this checkpoint
judges.json           judge → numbers of judgements, agreement, and why they are left out
dropped.jsonl, stats.json
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.pairs import Example, PreferenceExample, write_pairs
from xray_runtime.kernel.graph.artifacts import DEMONSTRATIONS, FEEDBACK, HELDOUT_OF, JUDGED_PAIRS, PEOPLE, VERDICTS
from xray_runtime.methods.common.results import write_json
from xray_runtime.methods.curate.config import CurateConfig
from xray_runtime.methods.curate.curation import CuratedRows, curate
from xray_runtime.methods.curate.signals import Signal, from_feedback, from_verdicts

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.curate.kind import CurateInputs

NUM_SHOWN = 20


class GoldQuestion(BaseModel):
    """A line of the file `gold`."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True)

    prompt: str = Field(min_length=1)
    reply: str | None = None
    good: bool | None = None
    chosen: str | None = None
    rejected: str | None = None


def run(stage: Stage[CurateConfig, CurateInputs], out: Path, recorder: Recorder) -> int:
    """Writes the files above.

    Raises:
        ValueError: `gold` cannot be read.
    """
    config, inputs = stage.config, stage.inputs
    gold = read_gold(config.gold) if config.gold is not None else {}
    with DroppedRows(out) as left_out:

        def drop(reason: str, id: str) -> None:
            left_out.add(reason, {"id": id})

        last, scores = max(len(inputs.feedback) - 1, 0), (config.good_score, config.bad_score)
        feedback = [from_feedback(_lines(f.path / FEEDBACK), cycle, *scores) for cycle, f in enumerate(inputs.feedback)]
        verdicts = [from_verdicts(_lines(judgements.path / VERDICTS), last) for judgements in inputs.verdicts]
        signals = []
        for signal in chain(*feedback, *verdicts):
            if isinstance(signal, Signal):
                signals.append(signal)
            else:
                drop(*signal)
        curated = curate(signals, config, gold, stage.seed, drop)
    if config.released is not None:
        curated.held = []
    _write(out, curated)
    stats = _stats(curated, len(signals), left_out.counts) | {"released": config.released}
    write_json(out / "stats.json", stats)
    _show(recorder, curated, stats, left_out.counts)
    return 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def read_gold(path: str) -> dict[tuple[str, ...], str]:
    """Unit of a signal → the right label. Raises ValueError where a line is not a gold question."""
    gold: dict[tuple[str, ...], str] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"gold: {path!r} cannot be read ({type(error).__name__})") from None
    for number, line in enumerate(lines, start=1):
        try:
            question = GoldQuestion.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(f"gold: {path} line {number}: {error.errors()[0]['msg']}") from None
        if question.reply is not None and question.good is not None:
            gold["rating", question.prompt, question.reply, ""] = "up" if question.good else "down"
        elif question.chosen is not None and question.rejected is not None:
            a, b = sorted((question.chosen, question.rejected))
            gold["verdict", question.prompt, a, b] = "a" if a == question.chosen else "b"
        else:
            raise ValueError(f"gold: {path} line {number}: must have reply and good, or chosen and rejected")
    return gold


def _write(out: Path, curated: CuratedRows) -> None:
    # A label of one reply has the verdict up or down, and no b.
    verdicts = [
        {"id": r.id, "prompt": r.prompt, "a": r.a, "b": r.b, "verdict": r.label, "judge": "+".join(r.people)}
        for r in curated.labels
        if r.side == "train"
    ]
    _write_lines(out / VERDICTS, verdicts)
    _write_lines(out / "disagreements.jsonl", curated.disagreements)
    for side, name in (("train", "{}"), ("heldout", HELDOUT_OF)):
        pairs = (PreferenceExample(r.id, r.prompt, r.a, r.b) for r in curated.pairs if r.side == side)
        write_pairs(out / name.format(JUDGED_PAIRS), PreferenceExample, pairs)
        shown = (Example(r.id, r.id, r.prompt, r.a) for r in curated.demonstrations if r.side == side)
        write_pairs(out / name.format(DEMONSTRATIONS), Example, shown)
    rows = [*curated.pairs, *curated.labels, *curated.demonstrations]
    people = Counter(person for row in rows for person in {*row.people, row.asker} - {""})
    write_json(out / PEOPLE, people)
    write_json(out / "judges.json", curated.judges)


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _stats(curated: CuratedRows, judgements: int, dropped: Counter[str]) -> dict[str, Any]:
    kinds = {"pairs": curated.pairs, "labels": curated.labels, "demonstrations": curated.demonstrations}
    counts = {
        f"{name}_{side}": sum(r.side == side for r in rows)
        for name, rows in kinds.items()
        for side in ("train", "heldout")
    }
    counts |= {f"dropped_{reason}": count for reason, count in dropped.items()}
    counts |= {"judgements": judgements, "judges": len(curated.judges), "disagreements": len(curated.disagreements)}
    counts["judges_left_out"] = sum(judge["left_out"] is not None for judge in curated.judges.values())
    shares = {f"largest_share_{name}": share for name, share in curated.shares.items()}
    return (
        counts
        | shares
        | {f"alpha_{kind}s": alpha for kind, alpha in curated.agreement.items()}
        | {"held": curated.held}
    )


def _show(recorder: Recorder, curated: CuratedRows, stats: dict[str, Any], dropped: Counter[str]) -> None:
    numbers = {f"curate/{name}": float(value) for name, value in stats.items() if isinstance(value, int | float)}
    recorder.metrics(numbers, step=0)
    recorder.table("curate_dropped", ["reason", "rows"], [[reason, n] for reason, n in sorted(dropped.items())])
    left_out = [[name, *judge.values()] for name, judge in curated.judges.items() if judge["left_out"] is not None]
    columns = ["judge", "judgements", "gold", "gold accuracy", "shared", "agreement", "why"]
    recorder.table("curate_judges_left_out", columns, left_out[:NUM_SHOWN])
    num_rows = len(curated.labels) + len(curated.pairs)
    note = f"held: {'; '.join(curated.held)}" if curated.held else f"{stats['pairs_train']} pairs to train on"
    recorder.progress(num_rows, num_rows, "rows", note)

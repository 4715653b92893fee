"""Judgements as a dataset: a checkpoint of kind `judgements`, signed and recorded like any other.

    judgements.jsonl   every verdict with its prompt, both models and replies, the left model, judge and time
    pairs.arrow        prompt, chosen, rejected: the input `judgements` of the stage `preferences`
    stats.json         counts

Its parents are the models that were judged (`policy-1`, …) and the datasets of the prompts. It holds all judgements of
an output directory so far; publishing again after more of them gives another checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import PreferenceExample, prompt_text, write_pairs
from xray_runtime.data.prompts import DatasetPrompts
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import JUDGED_PAIRS, VERDICTS, Judgements
from xray_runtime.kernel.history.comparisons import SESSIONS
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.live.feedback.dataset import publish_dataset, require_tracking
from xray_runtime.live.feedback.judgements import Question, latest_verdicts, pairs
from xray_runtime.live.feedback.session import Session, read_sessions

JUDGEMENTS = "judgements"
"""Stage and kind of the checkpoint, which no run computes."""


@dataclass(frozen=True)
class PublishedDataset:
    checkpoint: CheckpointRef
    stats: dict[str, Any]
    heldout: int
    """Pairs whose prompts the dataset holds out: no lifecycle on it trains on them."""
    is_new: bool


def publish(lineage: LineageStore, project: str, by: str) -> PublishedDataset:
    """Publish all judgements of the output directory, unless this dataset exists already.

    Args:
        project: MLflow's experiment.
        by: name of the person, on record.

    Raises:
        ConfigError: nothing was judged, or a model that was judged is not in the store.
    """
    sessions = [session for session in read_sessions(lineage.output) if session.judgements]
    if not sessions:
        raise ConfigError(
            f"--output: there are no verdicts in {str(lineage.output / SESSIONS)!r}: make some with `xray compare`"
        )
    require_tracking(lineage)
    for session in sessions:
        session.log()
    parents = _parents(lineage, sessions)
    verdicts = [row for session in sessions for row in _verdicts(session)]
    preferences = [pair for s in sessions for pair in pairs(s.questions, s.judgements, s.name)]
    config = {
        "sessions": {s.name: s.setup.model_dump(mode="json") for s in sessions},
        "judgements": digest(verdicts),
        "pairs": digest([pair._asdict() for pair in preferences]),
    }
    heldout = _held_out(lineage, parents, preferences)
    stats = _stats(sessions, preferences)

    def write(built: Path) -> None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in verdicts)
        (built / VERDICTS).write_text("".join(lines), encoding="utf-8")
        write_pairs(built / JUDGED_PAIRS, PreferenceExample, preferences)
        (built / "stats.json").write_text(json.dumps(stats, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    ref, is_new = publish_dataset(lineage, project, by, JUDGEMENTS, Judgements, config, parents, write)
    return PublishedDataset(ref, stats, heldout, is_new)


def _parents(store: LineageStore, sessions: list[Session]) -> dict[str, Node]:
    """Role → checkpoint of the judged models and of the datasets of the prompts."""
    models = sorted({sha for s in sessions for sha in (s.setup.a, s.setup.b)})
    from_dataset = [s.setup for s in sessions if s.setup.prompts in ("heldout", "train")]
    datasets = sorted({setup.source for setup in from_dataset if setup.source is not None})
    roles = {f"policy-{number}": sha for number, sha in enumerate(models, start=1)}
    roles |= {"dataset" if len(datasets) == 1 else f"dataset-{n}": sha for n, sha in enumerate(datasets, start=1)}
    missing = [sha[:12] for sha in roles.values() if sha not in store.graph.nodes]
    if missing:
        raise ConfigError(
            f"--output: {', '.join(missing)} was judged and is not in {str(store.output / CHECKPOINTS)!r}: bring it "
            f"back, or move the sessions that judged it out of {str(store.output / SESSIONS)!r}"
        )
    return {role: store.graph.nodes[sha] for role, sha in roles.items()}


def _verdicts(session: Session) -> list[dict[str, Any]]:
    """Every verdict that counts, with its question."""
    models = {"model_a": session.setup.a, "model_b": session.setup.b}
    questions: dict[int, Question] = {question.number: question for question in session.questions}
    return [
        {"session": session.name} | models | questions[number].model_dump() | judgement.model_dump(exclude_none=True)
        for (number, _), judgement in sorted(latest_verdicts(session.judgements).items())
    ]


def _stats(sessions: list[Session], preferences: list[PreferenceExample]) -> dict[str, Any]:
    verdicts = [j for session in sessions for j in latest_verdicts(session.judgements).values()]
    kinds = {"tie": "ties", "bad": "both_bad", "skip": "skipped"}
    counts = {name: sum(j.verdict == kind for j in verdicts) for kind, name in kinds.items()}
    people = {judge: sum(j.judge == judge for j in verdicts) for judge in sorted({j.judge for j in verdicts})}
    return {"pairs": len(preferences), "judgements": len(verdicts), **counts, "judges": people}


def _held_out(store: LineageStore, parents: dict[str, Node], preferences: list[PreferenceExample]) -> int:
    prompts = DatasetPrompts(store.graph)
    datasets = [node for role, node in parents.items() if role.startswith("dataset")]
    heldout = [prompts.of(node.sha256, "heldout") or TextSet() for node in datasets]
    return sum(any(prompt_text(pair.prompt) in texts for texts in heldout) for pair in preferences)

"""Withdrawal: erase a person's data or a source, and block every descendant from promotion.

The signed entry comes first: from then on promotion refuses the descendants, and an audit knows which files may be
missing. Then the files are erased. The key of the person's recorded texts, which finds their copies, is erased last.
So the same command finishes after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import pairs_of
from xray_runtime.data.withdrawn import FOLDER, TEXTS, WithdrawnTexts
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import strip_credentials
from xray_runtime.kernel.errors import error_summary, first_line
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals, Withdrawn
from xray_runtime.kernel.evidence.log import LIFECYCLE, REPORT, digests, view
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.artifacts import PEOPLE
from xray_runtime.kernel.history.comparisons import JUDGEMENTS, REPLIES, SESSION, SESSIONS
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.recorded import RecordedReader
from xray_runtime.kernel.history.recorded_rows import KEYS, RECORDED, UserKeys
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.kernel.store.derived import SUFFIX as TOKENS
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.kernel.store.snapshots import SNAPSHOTS
from xray_runtime.kernel.tracking.mlflow_tracker import ARTIFACTS
from xray_runtime.kernel.tracking.recorder import records_directory
from xray_runtime.kernel.tracking.traces import forget_person
from xray_runtime.live.erasure import TextPattern, erase_file, erase_from_database, files_with, loses_rows, rewrite

ROWS = (".arrow", ".jsonl", ".parquet")
SHOWN = ("samples.json", "lost.json", "prompts.json", "comparison_samples.json")
"""Files of checkpoints that hold texts, or tokens of texts."""
LIVE = ("champion", "candidate")
PAGES = "lineage"
TEXT_FIELDS = {"", "content", "text", "prompt", "input", "better", "correction", "arguments"}
"""Fields of a recorded row with texts that people wrote and read; names of roles or models do not count."""


@dataclass
class Withdrawal:
    """The plan of a withdrawal."""

    subject: str
    """See `kernel.evidence.kinds.withdrawn.Withdrawn`."""
    holders: list[Node] = field(default_factory=list)
    descendants: list[Node] = field(default_factory=list)
    """Parents first."""
    files: list[Path] = field(default_factory=list)
    """To be erased, or to lose some of their content."""
    pattern: TextPattern = field(default_factory=lambda: TextPattern(()))
    key: Path | None = None
    """The file that decrypts the person's recorded texts."""
    user: str | None = None
    """Their name, with which they may have signed assessments in MLflow."""

    @property
    def models(self) -> list[Node]:
        """Descendants with weights."""
        return [node for node in self.descendants if any(e.path.endswith(".safetensors") for e in node.manifest.files)]

    @property
    def rerun(self) -> list[str]:
        """Stages to run again, parents first."""
        return list(dict.fromkeys(node.manifest.stage for node in (*self.holders, *self.descendants)))


def plan_user(store: LineageStore, user: str) -> Withdrawal:
    """The plan for a person's recorded data. Raises ConfigError where nothing was recorded of them, or withdrawn."""
    output = store.output
    keys = output / RECORDED / KEYS
    try:
        pseudonym = UserKeys(keys, writable=False).pseudonym(user)
        rows = list(RecordedReader(output).rows(None, (), None))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--user: nothing that was recorded can be read ({error}); see `xray recorded`") from None
    own_ids = {row["id"] for row in rows if row["user"] == pseudonym}
    # Feedback by others about their answers quotes them.
    rows = [row for row in rows if row["id"] in own_ids or row["answer"] in own_ids]
    subject = f"user {pseudonym}"
    if not rows and subject not in {entry.subject for entry in view(output).state(Withdrawals)}:
        raise ConfigError(f"--user: {user!r} is not allowed: nothing of them is recorded in {str(output)!r}")
    pattern = TextPattern(text for row in rows for text in _texts(row["texts"]))
    text_files = files_with(output, pattern)
    home = output / CHECKPOINTS
    names = {path.relative_to(home).parts[0] for path in text_files if path.is_relative_to(home)}
    nodes = store.graph.nodes.values()
    plan = _plan(store, subject, [n for n in nodes if n.directory.name in names or _lists(n, pseudonym)], text_files)
    plan.pattern, plan.key, plan.user = pattern, keys / pseudonym, user
    return plan


def plan_source(store: LineageStore, source: str) -> Withdrawal:
    """The plan for a source of data, by its name in a config or its digest. Raises ConfigError if nothing read it."""
    read = [(node, one) for node in store.graph.nodes.values() for one in store.graph.own_sources(node.sha256)]
    chosen = {f.digest: f for _, f in read if source in (f.name, f.digest, Path(f.name).name)}
    if not chosen:
        names = ", ".join(sorted({repr(one.name) for _, one in read})) or "none"
        raise ConfigError(f"--source: {source!r} is not allowed: must be one that a checkpoint read: {names}")
    if len(chosen) > 1:
        raise ConfigError(f"--source: {source!r} names {len(chosen)} versions: must be a digest: {', '.join(chosen)}")
    [(digest, one)] = chosen.items()
    holders = {node.sha256: node for node, one in read if one.digest == digest}
    return _plan(store, f"source {one.kind}:{digest}", list(holders.values()), [])


def _plan(store: LineageStore, subject: str, holders: list[Node], text_files: list[Path]) -> Withdrawal:
    graph, output = store.graph, store.output
    shas = {node.sha256 for node in holders}
    # After a crash its text may be gone already; the signed entry still names what held it.
    shas |= {sha for entry in view(output).state(Withdrawals) if entry.subject == subject for sha in entry.holders}
    holders = [graph.nodes[sha] for sha in graph.ancestors(sorted(shas)) if sha in shas and sha in graph.nodes]
    below = [graph.nodes[sha] for sha in graph.descendants(sorted(shas)) if sha in graph.nodes and sha not in shas]
    files = set(text_files)
    for node in (*holders, *below):
        files |= set(_text_files(output, node))
    if holders:
        # Pages and reports show samples; snapshots of stages that have not ended may be of any of these.
        files |= {*output.rglob(REPORT), *(output / PAGES).glob("*"), *_below(output / SNAPSHOTS)}
        data = [node.sha256 for node in holders if node.is_data]
        for directory in (output / SESSIONS).glob("*"):
            setup = directory / SESSION
            if setup.is_file() and any(sha in setup.read_text(encoding="utf-8") for sha in data):
                files |= {directory / name for name in (REPLIES, JUDGEMENTS) if (directory / name).exists()}
    return Withdrawal(subject, holders, below, sorted(path for path in files if path.is_file()))


def _lists(node: Node, pseudonym: str) -> bool:
    """Whether a dataset of recorded feedback says that it has rows of a person: short texts are not searched."""
    path = node.directory / PEOPLE
    try:
        return path.exists() and pseudonym in json.loads(path.read_bytes())
    except (ValueError, TypeError):
        return True  # damaged, so it may have some


def _text_files(output: Path, node: Node) -> Iterator[Path]:
    """Files of a checkpoint, and those that its stage left, which hold texts or their tokens."""
    for entry in node.manifest.files:
        if entry.path.endswith(ROWS) or Path(entry.path).name in SHOWN:
            yield node.directory / entry.path
    for folder in output.glob(f"{CHECKPOINTS}/{node.directory.name}*"):
        if folder.name.endswith(TOKENS) or ".damaged-" in folder.name:
            yield from _below(folder)
    records = records_directory(output, node.manifest.stage, node.manifest.key)
    yield from (path for path in _below(records) if path.suffix == ".json")
    for run_id in (node.run.mlflow_run_id, node.run.mlflow_parent_run_id):
        if run_id:
            for path in _below(output / ARTIFACTS / run_id):
                # The record of a run and the list of a checkpoint's files show no texts.
                if path.suffix in (".json", ".html", ".txt", ".md") and path.name not in (LIFECYCLE, MANIFEST):
                    yield path


def _below(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def _texts(value: Any, key: str = "") -> Iterator[str]:
    """The texts in the TEXT_FIELDS of a recorded row."""
    if isinstance(value, str) and key in TEXT_FIELDS:
        yield value
    elif isinstance(value, dict):
        for name, below in value.items():
            yield from _texts(below, name)
    elif isinstance(value, list):
        for below in value:
            yield from _texts(below, key)


def withdraw(store: LineageStore, plan: Withdrawal, by: str) -> list[str]:
    """Carry out a plan; returns the paths that still hold a text. Safe to repeat."""
    output = store.output
    texts = output / FOLDER / TEXTS
    known = WithdrawnTexts.read(texts)
    known.add(plan.pattern.texts)
    known.write(texts)
    # For people and schedules: the models that were made from it, and the stages to run again.
    summary = {"subject": plan.subject, "holders": _stages(plan.holders), "models": _stages(plan.models)}
    summary["rerun"] = plan.rerun
    name = "".join(c if c.isalnum() else "-" for c in plan.subject)[:64]
    write_atomic(output / FOLDER / f"{name}.json", json.dumps(summary, indent=2) + "\n")
    log = view(output)
    stays = [path for path in plan.files if loses_rows(path, plan.pattern)]
    erased = sorted(path.relative_to(output).as_posix() for path in plan.files if path not in stays)
    entry = Withdrawn(
        subject=plan.subject,
        by=by,
        holders=sorted(node.sha256 for node in plan.holders),
        descendants=sorted(node.sha256 for node in plan.descendants),
        erased=erased,
    )
    same = [e for e in log.state(Withdrawals) if e.subject == plan.subject and set(erased) <= set(e.erased)]
    if not any(set(entry.holders + entry.descendants) <= set(e.holders + e.descendants) for e in same):
        evidence().append(output, entry, digests(output, [output / FOLDER]))
    rewrite(output, stays, plan.pattern)
    for name in sorted(view(output).erased):
        erase_file(output / name)
    left = [path.relative_to(output).as_posix() for path in files_with(output, plan.pattern)]
    left += _forgotten_by_mlflow(store, plan)
    if plan.key is not None and not left:
        erase_file(plan.key)
    return left


def _forgotten_by_mlflow(store: LineageStore, plan: Withdrawal) -> list[str]:
    """Remove a person's traces and assessments from MLflow; returns its address if that fails."""
    if plan.user is None or plan.key is None or store.tracking_uri is None:
        return []
    try:
        if forget_person(store.tracking_uri, plan.user, plan.key.name) and store.artifacts is not None:
            # Its free pages still contain the texts.
            erase_from_database(store.output / "mlflow.db", TextPattern(()))
    # MLflow raises errors of its own, of its database and of its client; the text may be there still.
    except Exception as error:
        return [f"traces in {strip_credentials(store.tracking_uri)} ({error_summary(error)})"]
    return []


def _stages(nodes: list[Node]) -> dict[str, str]:
    return {node.sha256: node.manifest.stage for node in nodes}


def reasons_against(store: LineageStore, node: Node) -> list[str]:
    """Why a checkpoint must not be promoted: what was withdrawn from its ancestors. Read anew each time."""
    log = view(store.output)
    if not log.state(Withdrawals):
        return []
    marked = {sha: e.subject for e in log.state(Withdrawals) for sha in (*e.holders, *e.descendants)}
    sources = {e.subject.partition(" ")[2] for e in log.state(Withdrawals) if e.subject.startswith("source ")}
    texts, reasons = WithdrawnTexts.read(store.output / FOLDER / TEXTS), []
    for sha in store.graph.ancestors([node.sha256]):
        ancestor = store.graph.nodes.get(sha)
        name = ancestor.name if ancestor is not None else f"checkpoint {sha[:12]}"
        if sha in marked:
            reasons.append(f"{name}: {marked[sha]} was withdrawn from it")
        elif ancestor is None or ancestor.statement is None:
            reasons.append(f"{name}: whether it contains withdrawn data is not known")
        elif any(f"{s.kind}:{s.digest}" in sources for s in ancestor.statement.predicate.build.internal.sources):
            reasons.append(f"{name}: it read a source that was withdrawn")
        elif ancestor.is_data and _holds(ancestor, texts):
            reasons.append(f"{name}: it contains withdrawn texts")
    return reasons


def refusal(store: LineageStore, node: Node) -> str | None:
    """One line on why a model must not be live, also if that cannot be verified; None if it may be."""
    try:
        reasons = reasons_against(store, node)
    except (OSError, ValueError) as error:
        reasons = [f"whether it contains withdrawn data is not known ({first_line(error)})"]
    if not reasons:
        return None
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{node.name} descends from withdrawn data: {reasons[0]}{more}; train it again without"


TEXTS_OF = ("response", "chosen", "rejected", "reasoning_content")
"""Fields of pairs with a reply's texts end with these."""


def _holds(node: Node, texts: WithdrawnTexts) -> bool:
    for path in sorted(node.directory.glob("*.arrow")):
        for row in pairs_of(path):
            texts_of = [value for name, value in row._asdict().items() if name.endswith(TEXTS_OF) and value is not None]
            if texts.touches(row.prompt, *texts_of):
                return True
    return False


def verify(store: LineageStore) -> list[str]:
    """Contradictions to the withdrawals of an output directory: live models, files that are there, keys that read."""
    log, output = view(store.output), store.output
    if not log.state(Withdrawals):
        raise ConfigError(f"--verify: nothing was withdrawn in {str(output)!r}")
    contradictions = []
    for (name, alias), decision in sorted(log.decided.items()):
        if alias in LIVE:
            node = store.graph.nodes.get(decision.checkpoint)
            whys = reasons_against(store, node) if node is not None else ["it is not in the store"]
            contradictions += [f"{name}@{alias} is {decision.checkpoint[:12]}: {why}" for why in whys]
    contradictions += [
        f"{name}: it was erased, but is present" for name in sorted(log.erased) if (output / name).exists()
    ]
    for entry in log.state(Withdrawals):
        kind, _, pseudonym = entry.subject.partition(" ")
        if kind == "user" and _reads(output, pseudonym, entry.at):
            contradictions.append(f"{RECORDED}/{KEYS}/{pseudonym}: it reads texts from before the withdrawal")
    return contradictions


def _reads(output: Path, pseudonym: str, at: str) -> bool:
    """Whether a text of a person that is older than their withdrawal can be decrypted."""
    before = datetime.fromisoformat(at).timestamp() * 1000
    rows = RecordedReader(output).rows(None, (), None)
    return any(row["user"] == pseudonym and row["texts"] is not None and row["at_ms"] < before for row in rows)

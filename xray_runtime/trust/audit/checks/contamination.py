"""Was a policy judged on held-out prompts that neither it nor any model it came from was trained on?

The policy it is compared with is checked too. Equal prompts break an audit. Prompts that share a span of 13 words, or
all their words, with the training data are a note, and so is training data that cannot be read. Training data is the
training side of every dataset, and the human verdicts whose prompts no dataset beside them holds out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.data.pairs import Example, pairs_of, prompt_text
from xray_runtime.data.prompts import DatasetPrompts, parents_of, side_of, verdicts
from xray_runtime.data.spans import SPAN_WORDS, Hashes, SpanSet
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.graph.artifacts import Judgements, Model
from xray_runtime.kernel.history.audit_check import ASK, AuditCheck, Audited, Finding, Meaning, is_erased
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.store.checkpoints import read_bounded

CODES = {
    "heldout-overlap": Meaning("Some held-out prompts of a dataset are also among its training prompts.", ASK),
    "evaluation-overlap": Meaning(
        "The policy was judged on prompts that it, or a model it came from, was trained on.",
        "Do not use the numbers; evaluate again on unseen prompts.",
    ),
    "evaluation-foreign": Meaning("The policy was judged on prompts that are not in the dataset's held-out part.", ASK),
    "evaluation-inconsistent": Meaning("The evaluation's files contradict each other.", ASK),
    "evaluation-near-overlap": Meaning(
        "The policy was judged on prompts that share long passages with its training data, or an ancestor's.",
        "Inspect them; if they give the answer away, evaluate on other prompts.",
        is_note=True,
    ),
    "evaluation-unchecked": Meaning(
        "It is not known whether the policy was judged on prompts that it was trained on.",
        "Give a dataset of a kind of your own its train.arrow; restore a file that is damaged.",
        is_note=True,
    ),
}


class EvaluationSpans:
    """Spans of the prompts of several evaluations; each dataset is read once for all of them."""

    def __init__(self, graph: CheckpointGraph, evaluations: Iterable[Node]) -> None:
        self._graph = graph
        self._asked = SpanSet(text for node in evaluations for text in _asked(node))
        self._found: dict[str, Hashes] = {}

    def overlapping(self, prompts: Iterable[str], dataset: str) -> list[str]:
        """The prompts that share a span with a training conversation, or equal a training prompt; case and punctuation
        do not count."""
        if dataset not in self._found:
            try:
                self._found[dataset] = self._asked.found_in(*self._trained(dataset))
            except (OSError, ValueError):
                self._found[dataset] = np.zeros(0, np.uint64)
        found = self._found[dataset]
        return [text for text in prompts if len(found) and np.isin(self._asked.hashes(text), found).any()]

    def _trained(self, dataset: str) -> tuple[Iterable[str], Iterable[str]]:
        node = self._graph.nodes[dataset]
        if not node.is_data:
            judged = [(prompt_text(one.prompt), one.reply) for one in verdicts(self._graph, node)]
            return map("\n".join, judged), (prompt for prompt, _ in judged)
        path = side_of(node, "train")
        return _conversations(path), pairs_of(path).prompt_texts()


def _trains(graph: CheckpointGraph, node: Node) -> bool:
    """Whether a checkpoint has training data, or learned from human verdicts that are in no dataset."""
    return node.is_data or (node.is_a(Model) and any(parent.is_a(Judgements) for parent in parents_of(graph, node)))


def _conversations(path: Path) -> Iterator[str]:
    for row in pairs_of(path):
        prompt = prompt_text(row.prompt)
        for reply in [row.response] if isinstance(row, Example) else [row.chosen, row.rejected]:
            yield f"{prompt}\n{reply}"


def _asked(node: Node) -> list[str]:
    """The prompts of an evaluation; none if they cannot be read, which is another finding."""
    try:
        prompts = _json(node, "prompts.json")
    except (OSError, ValueError, RecursionError):
        return []
    return [text for text in prompts if isinstance(text, str)] if isinstance(prompts, list) else []


def check_dataset(node: Node, prompts: DatasetPrompts) -> Iterator[Finding]:
    """Prompts on both sides of a dataset."""
    if not node.is_data:
        return
    train, heldout = prompts.of(node.sha256, "train"), prompts.of(node.sha256, "heldout")
    if train is None or heldout is None:
        return
    both = {text for text in prompts.texts(node.sha256, "heldout") if text in train}
    if both:
        yield Finding(node.name, "heldout-overlap", f"{len(both)} prompts, for example {min(both)[:80]!r}")


def check_evaluation(
    node: Node, graph: CheckpointGraph, prompts: DatasetPrompts, spans: EvaluationSpans
) -> Iterator[Finding]:
    """Prompts of an evaluation that are not held out, or that the policy or an ancestor was trained on."""
    if not node.sides:
        return
    try:
        recorded = _json(node, "prompts.json")
        samples = [str(sample["prompt"]) for sample in _json(node, "samples.json")]
        count = _json(node, node.results_file or "")["samples"]
        if not isinstance(recorded, list) or not all(isinstance(prompt, str) for prompt in recorded):
            raise ValueError("prompts.json is not a list of texts")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield Finding(node.name, "evaluation-inconsistent", f"its files cannot be read ({type(error).__name__})")
        return
    if count != len(recorded) or not set(samples) <= set(recorded):
        yield Finding(node.name, "evaluation-inconsistent", "its prompts, samples and counts do not agree")
    questions = frozenset(recorded)
    heldout = prompts.of(node.manifest.dataset or "", "heldout")
    # Only some datasets have rows for choosing checkpoints.
    chosen_by = prompts.of(node.manifest.dataset or "", "validation") or TextSet()
    foreign = {t for t in questions if t not in heldout and t not in chosen_by} if heldout is not None else None
    if foreign:
        yield Finding(node.name, "evaluation-foreign", f"{len(foreign)} prompts, for example {min(foreign)[:80]!r}")
    judged = [node.manifest.parents[role] for role in node.sides if role in node.manifest.parents]
    for sha in graph.ancestors(judged):
        ancestor = graph.nodes.get(sha)
        if ancestor is None or not _trains(graph, ancestor):
            continue
        trained = prompts.of(sha, "train")
        if trained is None:
            yield Finding(node.name, "evaluation-unchecked", f"the training part of {ancestor.name} cannot be read")
            continue
        overlap = {text for text in questions if text in trained}
        if overlap:
            where = f"in the training part of {ancestor.name}"
            detail = f"{len(overlap)} prompts are {where}, for example {min(overlap)[:80]!r}"
            yield Finding(node.name, "evaluation-overlap", detail)
        near = sorted(set(spans.overlapping(questions - overlap, sha)))
        if near:
            share = (
                f"{len(near)} of {len(questions)} prompts ({len(near) / len(questions):.1%}) share {SPAN_WORDS} words"
            )
            where = f"in a row, or all they have, with the training part of {ancestor.name}"
            detail = f"{share} {where}, for example {near[0][:80]!r}"
            yield Finding(node.name, "evaluation-near-overlap", detail)


def _json(node: Node, name: str) -> Any:
    return json.loads(read_bounded(node.directory / name))


def check_contamination(audited: Audited) -> Iterator[Finding]:
    """Every dataset and evaluation whose prompts are there."""
    nodes = [node for node in audited.changed if not is_erased(node, audited.log, "prompts.json")]
    graph = audited.store.graph
    prompts, spans = DatasetPrompts(graph), EvaluationSpans(graph, [node for node in nodes if node.sides])
    for node in nodes:
        yield from check_dataset(node, prompts)
        yield from check_evaluation(node, graph, prompts, spans)


CHECK = AuditCheck(
    "prompts of evaluations against every training part behind the policy, and both sides of each dataset",
    CODES,
    check_contamination,
    needs=frozenset({"hashing"}),
)

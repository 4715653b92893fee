"""Judges that the candidate was trained against, found through the store: their results do not count.

`judge_leakage` reads the graph alone; here bytes are compared too. A judge with the weights of a model that
the candidate was trained against is that model, and pairs that two files have in common are the same pairs. Files that
cannot be read count against a judge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from xray_runtime.data.pairs import TRAIN, Pairs, PreferenceExample, prompt_text
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.graph.artifacts import JUDGED_PAIRS, Model, Preferences, RewardModel
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.evaluate.judge_leakage import (
    JUDGES,
    TrainedItem,
    dependent_judges,
    learnt_from,
    trained_against,
)
from xray_runtime.rewards.term import source_names

WEIGHTS = ".safetensors"


def leaky_judges(graph: CheckpointGraph, evaluation: Node) -> dict[str, str]:
    """Judge of an evaluation or comparison (`gold` included) that does not count → why.

    Raises ValueError where its config cannot be read, so that no judge can be shown to be independent.
    """
    values = {name: value for name, value in evaluation.manifest.config.items() if name != "runtime"}
    try:
        config = EvaluationConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise ValueError(f"the config of {evaluation.name} names no known judges ({field})") from None
    made = made_of(graph, evaluation.sha256)
    policy = made.parents[evaluation.sides[0]]
    models = {role: parent for role, parent in made.parents.items() if role.partition(".")[0] == JUDGES}
    found = _absent(policy, graph)
    if found is not None:
        return dict.fromkeys(config.judging, found)
    # A judge whose model is not among the inputs does not count.
    gone = {role for term in config.judges for role in term.roles if role not in models}
    models |= {role: TrainedItem(role, role, RewardModel.__name__) for role in gone}
    why = dependent_judges(policy, config, models)
    for name, term in zip(source_names(config.judges), config.judges, strict=True):
        if name in why or not term.weight:
            continue
        for role in term.roles:
            reason = f"{role} is not among its inputs" if role in gone else _by_bytes(graph, policy, models[role])
            if reason is not None:
                why[name] = reason
    return why


def made_of(graph: CheckpointGraph, sha256: str) -> TrainedItem:
    """A checkpoint of the store with its ancestors; a missing one has only its digest."""
    known: dict[str, TrainedItem] = {}
    for sha in graph.ancestors([sha256]):  # each after what it came from
        node = graph.nodes.get(sha)
        if node is None:
            known[sha] = TrainedItem(sha, sha[:12], "")
            continue
        parents = {role: known[parent] for role, parent in graph.parents(sha) if parent in known}
        known[sha] = TrainedItem(sha, node.name, node.manifest.type, node.manifest.config, parents)
    return known[sha256]


def _absent(made: TrainedItem, graph: CheckpointGraph) -> str | None:
    for sha in made.lineage():
        if sha not in graph.nodes:
            return f"{sha[:12]}, which {made.name} came from, is not in the store"
    return None


def _by_bytes(graph: CheckpointGraph, policy: TrainedItem, judge: TrainedItem) -> str | None:
    absent = _absent(judge, graph)
    if absent is not None:
        return absent
    own = _weights(graph.nodes[judge.id])
    for sha, model in trained_against(policy).items():
        if own and own == _weights(graph.nodes[sha]):
            return f"it has the weights of {model.name}, which the policy was trained against"
    try:
        learnt = TextSet(text for _, pairs in learnt_from(policy, Model, RewardModel) for text in _texts(graph, pairs))
        for _, pairs in learnt_from(judge, RewardModel):
            shared = sum(text in learnt for text in _texts(graph, pairs))
            if shared:
                return f"{shared} of the pairs in {pairs.name} are among those that the policy's side was trained on"
    except (OSError, ValueError) as error:
        return f"the pairs it was trained on cannot be compared ({' '.join(str(error).split())})"
    return None


def _weights(node: Node) -> set[str]:
    """Digests of its weights and its head: two models may share one frozen trunk."""
    return {f.sha256 for f in node.manifest.files if f.path.endswith(WEIGHTS)}


def _texts(graph: CheckpointGraph, pairs: TrainedItem) -> Iterator[str]:
    """One text for each training pair, the same whichever reply was preferred."""
    directory: Path = graph.nodes[pairs.id].directory
    name = TRAIN if pairs.is_a(Preferences) else JUDGED_PAIRS
    for pair in Pairs(directory / name, PreferenceExample):
        yield "\x1f".join((prompt_text(pair.prompt), *sorted((pair.chosen, pair.rejected))))

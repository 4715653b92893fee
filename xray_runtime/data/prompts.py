"""The prompts of datasets, and of the human verdicts that models learned from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.data.heldout import held_out_prompts
from xray_runtime.data.pairs import pairs_of, prompt_text
from xray_runtime.data.replies import LabelledReply, from_verdicts
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.graph.artifacts import VERDICTS, Dataset, Judgements
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.store.checkpoints import read_bounded


class DatasetPrompts:
    """Prompts of training and held-out data, each file read once; takes 16 bytes of memory for each prompt."""

    def __init__(self, graph: CheckpointGraph) -> None:
        self._graph = graph
        self._read: dict[tuple[str, str], TextSet | None] = {}

    def of(self, dataset: str, side: str) -> TextSet | None:
        """Prompts of the `train` or `heldout` side; None where they cannot be read."""
        key = (dataset, side)
        if key not in self._read:
            try:
                self._read[key] = TextSet(self.texts(dataset, side))
            except (OSError, ValueError):
                self._read[key] = None
        return self._read[key]

    def texts(self, dataset: str, side: str) -> Iterator[str]:
        """The same prompts one by one. Raises OSError or ValueError where they cannot be read."""
        node = self._graph.nodes.get(dataset)
        if node is None:
            raise ValueError(f"{dataset[:12]} is not in the store")
        if not node.is_data:
            return (prompt_text(one.prompt) for one in verdicts(self._graph, node))
        return pairs_of(side_of(node, side)).prompt_texts()


def side_of(node: Node, side: str) -> Path:
    """The file of a side of a dataset. Raises ValueError: it has none."""
    path = node.directory / f"{side}.arrow"
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{node.name} has no file for {side}")
    return path


def parents_of(graph: CheckpointGraph, node: Node) -> list[Node]:
    """The parents of a checkpoint that are in the store."""
    return [graph.nodes[sha] for _, sha in graph.parents(node.sha256) if sha in graph.nodes]


def verdicts(graph: CheckpointGraph, policy: Node) -> Iterator[LabelledReply]:
    """The human verdicts a policy learned from. Raises OSError or ValueError where they cannot be read."""
    parents = parents_of(graph, policy)
    try:
        held_out = [held_out_prompts(parent.directory) for parent in parents if parent.is_a(Dataset)]
        for parent in parents:
            if parent.is_a(Judgements):
                records = map(json.loads, read_bounded(parent.directory / VERDICTS).splitlines())
                learned, _ = from_verdicts(records, TextSet())
                yield from (one for one in learned if not any(prompt_text(one.prompt) in texts for texts in held_out))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the verdicts that {policy.name} learned from cannot be read") from error

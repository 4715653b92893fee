"""Which prompts two models are asked: of the dataset behind them, or of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from xray_runtime.config.validation import ConfigError
from xray_runtime.data.pairs import Example, Messages, Pairs, prompt_text
from xray_runtime.data.records import asked
from xray_runtime.data.sources import read_records
from xray_runtime.data.text_set import TextSet
from xray_runtime.feedback.session import Setup
from xray_runtime.lineage.audit.contamination import Prompts
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.reference import LineageStore
from xray_runtime.seeding import derive_seed

SPLITS = ("heldout", "train")
"""Sides of a dataset."""


@dataclass(frozen=True)
class Source:
    """Where prompts come from."""

    kind: Literal["heldout", "train", "typed", "file"]
    path: Path | None = None
    """The file."""


def dataset_of(store: LineageStore, models: list[Node]) -> Node:
    """The dataset that the first of the models which has one was trained on.

    Raises:
        ConfigError: none of them has one in the store.
    """
    for model in models:
        found = store.graph.nodes.get(model.manifest.dataset or "")
        if found is not None:
            return found
    raise ConfigError(
        "--prompts: these models have no dataset among their inputs: must be a .jsonl file with a column "
        "`prompt`, or 'typed'"
    )


def of_dataset(store: LineageStore, models: list[Node], setup: Setup) -> list[Messages]:
    """The different prompts of one side of the dataset `setup.source`, in random order.

    Of held-out prompts only those that none of the models, nor any model they came from, was trained on.
    """
    assert setup.source is not None
    seen: list[TextSet] = []
    if setup.prompts == "heldout":
        prompts = Prompts(store.graph)
        for sha in store.graph.ancestors([model.sha256 for model in models]):
            node = store.graph.nodes.get(sha)
            if node is not None and node.is_data:
                seen.append(prompts.of(sha, "train") or TextSet())
    examples = Pairs(store.graph.nodes[setup.source].directory / f"{setup.prompts}.arrow", Example)
    texts = ((prompt_text(e.prompt), e.prompt) for e in examples)
    found = {text: prompt for text, prompt in texts if not any(text in trained for trained in seen)}
    order = np.random.default_rng(derive_seed(setup.seed, "compare", "prompts")).permutation(len(found))
    listed = list(found.values())
    return [listed[i] for i in order]


def of_file(path: Path) -> list[Messages]:
    """The different prompts of a .jsonl file, in its order.

    Raises:
        ConfigError: it cannot be read, or a row has no prompt.
    """
    try:
        _, records = read_records("--prompts", str(path), "train")
        found = [asked(where, record) for where, record in records]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return list({prompt_text(prompt): prompt for prompt in found}.values())


def checked_source(value: str) -> Source:
    """What `--prompts` says. Raises ConfigError: `value` is none of the words allowed, nor a .jsonl file."""
    path = Path(value)
    kinds: tuple[Literal["heldout", "train", "typed"], ...] = ("heldout", "train", "typed")
    for kind in kinds:
        if value == kind:
            return Source(kind)
    if path.suffix != ".jsonl" or not path.is_file():
        raise ConfigError(f"--prompts: {value!r} is not allowed: must be heldout, train, typed, or a .jsonl file")
    return Source("file", path)

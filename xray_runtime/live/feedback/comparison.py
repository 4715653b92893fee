"""Two models that answer the same prompts: which prompts, under which settings, and their replies in advance."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.cluster.pool.machine import this_machine
from xray_runtime.data.pairs import Example, Messages, Pairs, prompt_text
from xray_runtime.data.pictures import pictures_of
from xray_runtime.data.prompts import DatasetPrompts
from xray_runtime.data.reading.records import prompt_of
from xray_runtime.data.reading.sources import read_records
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore, require_language_model
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.live.feedback.chat_model import PromptLimits, PromptSampler, fitting
from xray_runtime.live.feedback.judgements import Question, tally
from xray_runtime.live.feedback.session import PromptSource, Session, Setup
from xray_runtime.methods.lifecycle import LifecycleConfig

BATCH = 32
"""Prompts answered at a time: one batch of the sampler."""


@dataclass(frozen=True)
class ReplyComparison:
    """The settings of a comparison, fixed before the first question."""

    models: tuple[Node, Node]
    """`a` and `b`."""
    limits: tuple[PromptLimits, PromptLimits]
    setup: Setup
    prompts: list[Messages]
    """All prompts in the order of the questions; empty if they are typed."""
    device: str

    def result(self, session: Session) -> dict[str, Any]:
        """The verdicts of all judges of this session; see `judgements.tally`."""
        same = sum(question.a == question.b for question in session.questions)
        names = {"a": self.models[0].name, "b": self.models[1].name}
        return {"session": session.name, "models": names, "same_reply": same} | tally(session.judgements)


def checked_source(value: str) -> tuple[PromptSource, Path | None]:
    """(kind, file) of the prompts that `--prompts` names.

    Raises:
        ConfigError: it is neither an allowed word nor a .jsonl file.
    """
    kinds: tuple[PromptSource, ...] = ("heldout", "train", "typed")
    for kind in kinds:
        if value == kind:
            return kind, None
    path = Path(value)
    if path.suffix != ".jsonl" or not path.is_file():
        raise ConfigError(f"--prompts: {value!r} is not allowed: must be heldout, train, typed, or a .jsonl file")
    return "file", path


def require_two(a: tuple[LineageStore, Node], b: tuple[LineageStore, Node]) -> LineageStore:
    """The output directory of two different models that reply.

    Raises:
        ConfigError: they are no such models, or the same one, or in different output directories.
    """
    (store, first), (other, second) = a, b
    for node in (first, second):
        require_language_model(node)
        if node.sha256 not in store.graph.nodes or other.output.resolve() != store.output.resolve():
            raise ConfigError(
                f"REF: {first.name} and {second.name} must be in one output directory, where their verdicts are kept "
                "(`xray export` and `xray import` move checkpoints)"
            )
    if first.sha256 == second.sha256:
        raise ConfigError(f"REF: both are {first.name}: must be two different models")
    return store


def plan_comparison(
    store: LineageStore,
    models: tuple[Node, Node],
    config: LifecycleConfig,
    source: tuple[PromptSource, Path | None],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> ReplyComparison:
    """The comparison of two models of `store`.

    Args:
        config: of the lifecycle: the length of prompts, and the device on which models run.
        source: as from `checked_source`.

    Raises:
        ConfigError: there are no such prompts, or none that fit.
    """
    kind, path = source
    a, b = (PromptLimits(model.directory, max_new_tokens, temperature) for model in models)
    dataset = _dataset_of(store, models).sha256 if kind in ("heldout", "train") else None
    setup = Setup(
        a=models[0].sha256,
        b=models[1].sha256,
        prompts=kind,
        source=file_sha256(path) if path is not None else dataset,
        max_prompt_tokens=config.data.max_prompt_tokens if dataset is not None else None,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    fit: list[Messages] = []
    if kind != "typed":
        prompts = of_dataset(store, list(models), setup) if path is None else _of_file(path)
        fit = fitting(prompts, [a, b], setup.max_prompt_tokens)
        if not fit:
            raise ConfigError(f"--prompts: all of the {len(prompts)} prompts are too long for the models")
    return ReplyComparison(models, (a, b), setup, fit, this_machine(config.runtime.device).device)


def _dataset_of(store: LineageStore, models: tuple[Node, Node]) -> Node:
    """The dataset that the first of the models which has one was trained on."""
    datasets = [store.graph.nodes.get(model.manifest.dataset or "") for model in models]
    for dataset in filter(None, datasets):
        return dataset
    raise ConfigError(
        "--prompts: these models have no dataset among their inputs: must be a .jsonl file with a column "
        "`prompt`, or 'typed'"
    )


def of_dataset(store: LineageStore, models: list[Node], setup: Setup) -> list[Messages]:
    """The distinct prompts of one side of the dataset `setup.source`, in random order.

    Held-out prompts that one of the models, or one of its ancestors, was trained on are left out. Raises ConfigError:
    they have pictures.
    """
    assert setup.source is not None
    seen: list[TextSet] = []
    if setup.prompts == "heldout":
        prompts = DatasetPrompts(store.graph)
        ancestors = store.graph.ancestors([model.sha256 for model in models])
        known = [store.graph.nodes[sha] for sha in ancestors if sha in store.graph.nodes]
        seen = [prompts.of(node.sha256, "train") or TextSet() for node in known if node.is_data]
    examples = Pairs(store.graph.nodes[setup.source].directory / f"{setup.prompts}.arrow", Example)
    texts = ((prompt_text(e.prompt), e.prompt) for e in examples)
    by_text = {text: prompt for text, prompt in texts if not any(text in trained for trained in seen)}
    order = np.random.default_rng(derive_seed(setup.seed, "compare", "prompts")).permutation(len(by_text))
    listed = list(by_text.values())
    if any(map(pictures_of, listed)):
        raise ConfigError(f"--prompts: {setup.prompts!r} is not allowed: prompts have pictures, which are not shown")
    return [listed[i] for i in order]


def _of_file(path: Path) -> list[Messages]:
    """The distinct prompts of a .jsonl file, in its order. Raises ConfigError where a row has no prompt."""
    try:
        _, records = read_records("--prompts", str(path), "train")
        prompts = [prompt_of(where, record) for where, record in records]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return list({prompt_text(prompt): prompt for prompt in prompts}.values())


class PairSampler:
    """Lets both models answer in a thread of `pool`; they are loaded when the first answer is needed."""

    def __init__(self, comparison: ReplyComparison, session: Session, pool: ThreadPoolExecutor) -> None:
        self._comparison, self._session, self._pool = comparison, session, pool
        self._models: list[PromptSampler] = []

    def submit(self, prompts: list[Messages]) -> Future[None]:
        """Add these questions to the session, in order; the future is done when they are there."""
        return self._pool.submit(self._answer, prompts)

    def _answer(self, prompts: list[Messages]) -> None:
        comparison, first = self._comparison, len(self._session.questions)
        if not self._models:
            pairs = zip(comparison.models, comparison.limits, strict=True)
            self._models = [PromptSampler(node.directory, limits, comparison.device) for node, limits in pairs]
        numbers = range(first, first + len(prompts))
        seeds = [derive_seed(comparison.setup.seed, "compare", "sample", number) for number in numbers]
        a, b = (model.answers(prompts, seeds) for model in self._models)
        rows = zip(numbers, prompts, a, b, strict=True)
        self._session.add_questions([Question(number=n, prompt=p, a=x, b=y) for n, p, x, y in rows])

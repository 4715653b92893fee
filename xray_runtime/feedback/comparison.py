"""Two models asked the same things: what is asked, under which settings, and their replies ahead of the person."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.data.pairs import Messages
from xray_runtime.feedback.chat_model import BatchSampler, PromptLimits, fitting
from xray_runtime.feedback.judgements import Question, tally
from xray_runtime.feedback.prompts import SPLITS, Source, dataset_of, of_dataset, of_file
from xray_runtime.feedback.session import Session, Setup
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.reference import LineageStore, require_language_model
from xray_runtime.planning.workload import this_machine
from xray_runtime.seeding import derive_seed
from xray_runtime.store.identity import file_sha256

BATCH = 32
"""Prompts answered at a time: what one batch of the sampler holds."""


@dataclass(frozen=True)
class Comparison:
    """What is settled before anybody is asked."""

    models: tuple[Node, Node]
    """`a` and `b`."""
    limits: tuple[PromptLimits, PromptLimits]
    setup: Setup
    prompts: list[Messages]
    """All there are, in the order in which they are asked; none where they are typed."""
    device: str

    def result(self, session: Session) -> dict[str, Any]:
        """What everybody who judged in this session said; see `judgements.tally`."""
        same = sum(question.a == question.b for question in session.questions)
        names = {"a": self.models[0].name, "b": self.models[1].name}
        return {"session": session.name, "models": names, "same_reply": same} | tally(session.judgements)


def require_two(a: tuple[LineageStore, Node], b: tuple[LineageStore, Node]) -> LineageStore:
    """The output directory of two different models that reply.

    Raises:
        ConfigError: they are none, the same, or lie apart: what is judged must know both.
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
    source: Source,
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> Comparison:
    """The comparison of two models of `store`.

    Args:
        config: of the lifecycle; says how long prompts may be, and on which device models run.

    Raises:
        ConfigError: there are no such prompts, or none that fit.
    """
    a, b = (PromptLimits(model.directory, max_new_tokens, temperature) for model in models)
    dataset = dataset_of(store, list(models)).sha256 if source.kind in SPLITS else None
    setup = Setup(
        a=models[0].sha256,
        b=models[1].sha256,
        prompts=source.kind,
        source=file_sha256(source.path) if source.path is not None else dataset,
        max_prompt_tokens=config.data.max_prompt_tokens if dataset is not None else None,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    fit: list[Messages] = []
    if source.kind != "typed":
        found = of_dataset(store, list(models), setup) if source.path is None else of_file(source.path)
        fit = fitting(found, [a, b], setup.max_prompt_tokens)
        if not fit:
            raise ConfigError(f"--prompts: all of the {len(found)} prompts are too long for the models")
    return Comparison(models, (a, b), setup, fit, this_machine(config.runtime.device).device)


class Sampler:
    """Has both models answer, in a thread of `pool`; they are loaded when the first answer is needed."""

    def __init__(self, comparison: Comparison, session: Session, pool: ThreadPoolExecutor) -> None:
        self._comparison, self._session, self._pool = comparison, session, pool
        self._models: list[BatchSampler] = []

    def submit(self, prompts: list[Messages]) -> Future[None]:
        """The session gets these questions, in turn, by when the answer is there."""
        return self._pool.submit(self._answer, prompts)

    def _answer(self, prompts: list[Messages]) -> None:
        comparison, first = self._comparison, len(self._session.questions)
        if not self._models:
            pairs = zip(comparison.models, comparison.limits, strict=True)
            self._models = [BatchSampler(node.directory, limits, comparison.device) for node, limits in pairs]
        numbers = range(first, first + len(prompts))
        seeds = [derive_seed(comparison.setup.seed, "compare", "sample", number) for number in numbers]
        a, b = (model.answers(prompts, seeds) for model in self._models)
        rows = zip(numbers, prompts, a, b, strict=True)
        self._session.add_questions([Question(number=n, prompt=p, a=x, b=y) for n, p, x, y in rows])

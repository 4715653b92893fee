"""What several stage bodies share: their part of the config, encoded data, timing, learning rates."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.algorithms.schedules import learning_rate
from xray_runtime.config.engines import TrainingConfig
from xray_runtime.config.prepare import PROMPT_TOKENS
from xray_runtime.config.sft import REPLY_TOKENS
from xray_runtime.data.pairs import VALIDATION, Example, Messages, Pairs
from xray_runtime.data.rows import Ragged, Rows
from xray_runtime.data.tokens import Report, Tokens
from xray_runtime.graph.artifacts import VALUE_HEAD
from xray_runtime.models.causal_lm import max_positions
from xray_runtime.store.seal import Seal
from xray_runtime.training.finite import naming
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.graph.kind import Recorder


def is_in_order(dataset: Path) -> bool:
    """Whether training conversations are to be read in their order: the dataset has a curriculum."""
    return bool(json.loads((dataset / "dataset.json").read_text()).get("in_order"))


def max_prompt_tokens(dataset: Path, model: Path, reply_tokens: int) -> int:
    """The longest prompt that stages take from a dataset, in tokens: `data.max_prompt_tokens`, or `PROMPT_TOKENS`, or
    what the context of `model` leaves beside a reply of `reply_tokens` where that is less.

    Raises:
        ValueError: it leaves nothing.
    """
    given, context = json.loads((dataset / "dataset.json").read_text())["max_prompt_tokens"], max_positions(model)
    if given is not None:
        return int(given)
    limit = PROMPT_TOKENS if context is None else min(PROMPT_TOKENS, context - reply_tokens)
    if limit < 1:
        raise ValueError(f"replies of {reply_tokens} tokens are not allowed: the model's context holds {context}")
    return limit


def max_reply_tokens(given: int | None, model: Path) -> int:
    """The longest reply that is learned: `given`, or `REPLY_TOKENS`, or a third of the context of `model` where that is
    less."""
    context = max_positions(model)
    return given or (REPLY_TOKENS if context is None else min(REPLY_TOKENS, max(context // 3, 2)))


def lr_at(config: TrainingConfig, step: int, total: int, peak: float | None = None) -> float:
    """The learning rate of `config`'s schedule at `step` of `total`."""
    return learning_rate(
        step,
        total,
        peak=config.lr if peak is None else peak,
        schedule=config.schedule,
        warmup_fraction=config.warmup_fraction,
        final_lr_ratio=config.final_lr_ratio,
    )


class UniquePrompts(Sequence[tuple[Messages, list[int]]]):
    """(messages, token ids) of each different prompt that fits, in order of first appearance; read when asked for.

    Args:
        pairs: a side of a dataset.
        max_prompt: tokens that fit.
        seal: of the run, whose tokens are read.
    """

    def __init__(self, tokenizer: Any, pairs: Path, max_prompt: int, seal: Seal) -> None:
        self.max_prompt = max_prompt
        self._pairs, self._tokens = Pairs(pairs, Example), Tokens(pairs, Example, tokenizer, seal)
        self.rows = self._tokens.different_prompts(max_prompt)
        """Where each prompt stands first."""
        self.num_too_long = int((self._tokens.prompt_lengths > max_prompt).sum())
        """Rows whose prompts do not fit."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = int(self.rows[index])
        return self._pairs[row].prompt, self._tokens.prompt(row)

    def metrics(self) -> dict[str, float]:
        """How many prompts are left out because they do not fit; a stage records it once, where there are any."""
        if not self.num_too_long:
            return {}
        counts = {"different": len(self), "too_long": self.num_too_long, "max_tokens": self.max_prompt}
        return {f"prompts/{name}": float(count) for name, count in counts.items()}

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Column that the dataset carries → its values where those prompts first appear, None where there is none."""
        rows = [json.loads(self._pairs[int(self.rows[index])].columns) for index in indices]
        names = sorted({name for row in rows for name in row})
        return {name: [row.get(name) for row in rows] for name in names}


def text_rows(prompts: Sequence[Sequence[int] | np.ndarray], replies: Iterable[Sequence[int] | np.ndarray]) -> Rows:
    """Rows of prompt and reply together: ragged `input_ids`, and `prompt_lengths` [B]."""
    input_ids = Ragged.of([*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True))
    return {"input_ids": input_ids, "prompt_lengths": np.array([len(p) for p in prompts], dtype=np.int64)}


def with_end_of_turn(reply: Sequence[int] | np.ndarray, stops: Sequence[int]) -> list[int]:
    """A reply that ends with one of the stop tokens, else with the first, which ends a turn: the reward model has seen
    no other."""
    ids = list(reply)
    return ids if ids and ids[-1] in stops else [*ids, stops[0]]


def tokenizing(recorder: Recorder) -> Report:
    """For `Tokens`: shows how far a dataset is tokenized."""
    return lambda done, total: recorder.progress(done, total, "pairs", "tokenizing")


class PhaseClock:
    """Seconds by phase of one iteration, so that anyone sees where time goes.

    Args:
        where: stage and iteration; named in what goes wrong for numbers that are not finite.
    """

    def __init__(self, where: str) -> None:
        self._where, self.seconds = where, dict[str, float]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with naming(f"{self._where} ({name})"):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"seconds/{name}": s for name, s in self.seconds.items()} | {
            "seconds/total": sum(self.seconds.values())
        }


def validation_file(stage: str, dataset: Path) -> Path:
    """The rows of a dataset that versions of a policy are chosen by. Raises ValueError where it has none."""
    if not (dataset / VALIDATION).exists():
        raise ValueError(f"{stage}.validation: the dataset has no rows for it: set data.validation_fraction")
    return dataset / VALIDATION


def save_policy(models: Mapping[str, ModelHandle], directory: Path) -> None:
    """The policy in Hugging Face form, with the critic's head or, in critic/, the critic."""
    directory.mkdir(parents=True, exist_ok=True)
    get(models["policy"].save.remote(directory, VALUE_HEAD))
    if "critic" in models:
        get(models["critic"].save.remote(directory / "critic", VALUE_HEAD))

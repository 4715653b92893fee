"""Stage `distill_replies`: a policy learns from a teacher's distributions at the tokens of given replies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import StepTotals, TaughtBatch, TextBatch
from xray_runtime.data.batching import Cursor
from xray_runtime.data.conversations import PROMPT, REPLY
from xray_runtime.data.pairs import HELDOUT, TRAIN, Example, Pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokens import Tokens
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.teacher_prompts import TeacherPrompts, compared_tokens
from xray_runtime.methods.common.training.dataset import (
    check_longest,
    list_dropped,
    max_prompt_tokens,
    max_reply_tokens,
    tokenizing,
)
from xray_runtime.methods.common.training.loop import Method, Trained, training_loop
from xray_runtime.methods.common.training.trained_model import trained_model
from xray_runtime.methods.distill_replies.objective import DistillRepliesObjective
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.teacher_objective import TeacherObjective

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.distill_replies.config import DistillRepliesConfig
    from xray_runtime.methods.distill_replies.kind import DistillRepliesInputs

HELDOUT_ROWS = 256
"""Held-out replies whose divergence is measured."""


def run(stage: Stage[DistillRepliesConfig, DistillRepliesInputs], out: Path, recorder: Recorder) -> int:
    """Writes the tuned model in Hugging Face form.

    Raises:
        ValueError: no reply of one side fits; the teacher reads other tokens; logged tokens are not the reply's.
    """
    config, policy, data = stage.config, stage.inputs.policy.path, stage.inputs.data.path
    tokenizer = load_tokenizer(policy)
    top_k, num_tokens = compared_tokens(stage.name, policy, config.beta, config.top_k)
    specs: dict[str, ModelSpec] = {"policy": trained_model(stage, policy, DistillRepliesObjective(config))}
    teacher = None if stage.inputs.teacher is None else stage.inputs.teacher.path
    prompts = None if teacher is None else TeacherPrompts(f"{stage.name}.teacher", teacher, tokenizer)
    if teacher is not None:
        objective = TeacherObjective(config.temperature, top_k, num_tokens)
        specs["teacher"] = ModelSpec(teacher, objective, frozen=config.frozen)
    train, heldout = (
        _ReplyRows(stage, data / side, tokenizer, top_k, num_tokens, prompts, recorder) for side in (TRAIN, HELDOUT)
    )
    cursor = Cursor(len(train), derive_seed(stage.seed, stage.name, "order"))
    check_longest(stage, specs["policy"], train.tokens.lengths["input_ids"], train.tokens.id)
    list_dropped(out, train.tokens, heldout.tokens)
    with stage.open_models(specs) as models:
        learning = {"policy": models["policy"]}
        first = heldout.taught(np.arange(min(HELDOUT_ROWS, len(heldout))), models)
        method = _Distillation(models, train, first)
        training_loop(stage, recorder, method, learning, cursor, config.steps)
        get(models["policy"].save.remote(out))
    return config.steps


class _ReplyRows:
    """Replies of one side of the dataset, with what a teacher says of them."""

    def __init__(
        self,
        stage: Stage[DistillRepliesConfig, DistillRepliesInputs],
        file: Path,
        tokenizer: Tokenizer,
        top_k: int,
        num_tokens: int,
        prompts: TeacherPrompts | None,
        recorder: Recorder,
    ) -> None:
        self._stage, self._top_k, self._num_tokens, self._prompts = stage, top_k, num_tokens, prompts
        policy = stage.inputs.policy.path
        longest = max_reply_tokens(stage.config.max_response_tokens, policy)
        limit = max_prompt_tokens(stage.inputs.data.path, policy, longest)
        self._pairs = Pairs(file, Example)
        self.tokens = Tokens(file, Example, tokenizer, stage.seal, tokenizing(recorder))
        has_reply = np.array([self._pairs[row].has_reply for row in range(len(self.tokens))], dtype=bool)
        self.tokens.keep(has_reply)
        self.tokens.keep(self.tokens.prompt_lengths <= limit, PROMPT)
        replies = self.tokens.lengths["input_ids"] - self.tokens.prompt_lengths
        self.tokens.keep(replies <= longest, REPLY)
        if not len(self.tokens):
            raise ValueError(
                f"{stage.name}: no replies of {file.name} fit max_prompt_tokens = {limit} and max_response_tokens = "
                f"{longest}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def taught(self, index: np.ndarray, models: Mapping[str, ModelHandle]) -> TaughtBatch:
        """These rows. Raises ValueError as `run`."""
        rows = self.tokens.take(index)
        columns = self._logged(index, rows) if self._prompts is None else self._scored(index, rows, models)
        return rows.as_kind(TaughtBatch, **columns)

    def _scored(self, index: np.ndarray, rows: TextBatch, models: Mapping[str, ModelHandle]) -> dict[str, Ragged]:
        assert self._prompts is not None
        if not self._prompts.same_template:
            examples = (self._pairs[int(self.tokens.rows[row])] for row in index)
            self._prompts.check(
                (example.prompt, self.tokens.prompt(row)) for example, row in zip(examples, index, strict=True)
            )
        found = get(models["teacher"].score.remote(rows))
        return {"teacher_topk_ids": found.teacher_topk_ids, "teacher_topk_logprobs": found.teacher_topk_logprobs}

    def _logged(self, index: np.ndarray, rows: TextBatch) -> dict[str, Ragged]:
        """The dataset's columns; each reply's tokens are as many as they were logged."""
        logged = self._stage.config.logged
        assert logged is not None
        wanted = zip(index, (rows.input_ids.lengths - rows.prompt_lengths).tolist(), strict=True)
        ids: list[np.ndarray] = []
        logprobs: list[np.ndarray] = []
        for row, length in wanted:
            example = self._pairs[int(self.tokens.rows[row])]
            given = json.loads(example.columns)
            ids.append(self._matrix(given, logged.ids, example.id, length))
            logprobs.append(self._matrix(given, logged.logprobs, example.id, length))
            if ((ids[-1] < 0) | (ids[-1] >= self._num_tokens)).any() or (logprobs[-1] > 0).any():
                raise ValueError(
                    f"{self._stage.name}.logged: row {example.id!r} is not allowed: ids must be below "
                    f"{self._num_tokens:,} and log-probabilities at most 0"
                )
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return {
            "teacher_topk_ids": Ragged(np.concatenate(ids).astype(np.int32), offsets),
            "teacher_topk_logprobs": Ragged(np.concatenate(logprobs).astype(np.float32), offsets),
        }

    def _matrix(self, given: Mapping[str, Any], name: str, row: str, length: int) -> np.ndarray:
        try:
            found = np.array(given.get(name), dtype=np.float64)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.shape != (length, self._top_k) or not np.isfinite(found).all():
            raise ValueError(
                f"{self._stage.name}.logged: the column {name!r} of row {row!r} is not allowed: must be {self._top_k} "
                f"numbers (top_k) for each of the reply's {length} tokens, and has the shape {list(found.shape)}"
            )
        return found


@dataclass(frozen=True)
class _Distillation(Method):
    """Distillation on given replies, for `training_loop`."""

    models: Mapping[str, ModelHandle]
    rows: _ReplyRows
    heldout_rows: TaughtBatch
    name = "distill"
    asks_model = True

    def batch(self, index: np.ndarray) -> tuple[TextBatch, StepTotals]:
        rows = self.rows.taught(index, self.models)
        return rows, StepTotals.of(rows)

    def metrics(self, step: Trained) -> dict[str, float]:
        sums, tokens = step.result.sums, step.totals.tokens
        return {"distill/divergence": sums["teacher_divergence"] / tokens, "distill/nll": sums["nll"] / tokens}

    def heldout(self) -> dict[str, float]:
        found = get(self.models["policy"].score.remote(self.heldout_rows))
        tokens = self.heldout_rows.num_response_tokens()
        apart = float(found.teacher_divergence.sum()) / tokens
        return {"distill/heldout_divergence": apart, "distill/heldout_nll": float(found.nll.sum()) / tokens}

    def summary(self, metrics: Mapping[str, float]) -> str:
        return f"divergence {metrics['distill/divergence']:.3f}"

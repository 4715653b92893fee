"""The teachers of a stage: which of them scores which reply, and what it reads.

A teacher reads the tokens that the policy sampled after the prompt that the policy read (`common.teacher_prompts`), so
their log-probabilities are of the same events. One of another vocabulary reads the same texts in its own tokens, and is
compared with the policy over chunks at whose ends tokens of both end (`data.aligned_tokens`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import Local, ModelHandle, Ref, get
from xray_runtime.data.aligned_tokens import Aligned
from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.data.pairs import Messages
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import encode_prompts
from xray_runtime.methods.common.teacher_prompts import TeacherPrompts, compared_tokens
from xray_runtime.methods.ppo.teacher_server import TeacherServer
from xray_runtime.models.causal_lm import max_positions, stops_of
from xray_runtime.models.teacher_objective import TeacherObjective

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.methods.common.training.prompts import UniquePrompts
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.kind import PPOInputs

CHECKED_PROMPTS = 16
"""Prompts that both tokenizers render before anything is computed; later ones are checked as they are drawn."""


@dataclass(frozen=True)
class TeacherRequests:
    """Scores of a rollout that teachers compute."""

    places: Sequence[np.ndarray]
    """The rows of each request."""
    answers: Sequence[Ref[Scores]]
    """Each may have more rows, after these."""
    aligned: Sequence[Sequence[Aligned | None] | None]
    """The rows of each request that is in the tokens of another vocabulary."""
    reads_texts: bool
    """Whether a teacher of the stage has another vocabulary, which may read other text than some replies."""

    def get(self, logprobs: Ragged) -> Scores:
        """`teacher_logprobs` of all rows, in their order, with `reads_texts` also `teacher_reads`; `logprobs`: the
        policy's, which are those of a teacher that does not read a row."""
        parts = []
        for at, answer, aligned in zip(self.places, self.answers, self.aligned, strict=True):
            part = _of_teacher(get(answer)).take(np.arange(len(at)))
            if aligned is not None:
                rows = zip(aligned, logprobs[at], part.teacher_logprobs, strict=True)
                found = (own if one is None else one.spread(own, its) for one, own, its in rows)
                part = Scores(teacher_logprobs=Ragged.of(found, np.float32))
            if self.reads_texts:
                read = [True] * len(at) if aligned is None else [one is not None for one in aligned]
                part = part.with_columns(teacher_reads=np.array(read))
            parts.append(part)
        return Scores.concat(parts).take(np.argsort(np.concatenate(self.places), kind="stable"))


class Teachers:
    """Those of a stage with `distillation`.

    Args:
        tokenizer: the policy's.

    Raises:
        ValueError: a teacher has another vocabulary, or reads a prompt as other tokens than the policy; the dataset's
            column names none of them, or has no demonstration, for some prompt; one line.
    """

    def __init__(self, stage: Stage[PPOConfig, PPOInputs], tokenizer: Tokenizer, prompts: UniquePrompts) -> None:
        config = stage.config.distillation
        assert config is not None
        self._stage, self._config, self._tokenizer = stage, config, tokenizer
        self._stops = stops_of(stage.inputs.policy.path, tokenizer)
        self._paths = {f"teacher.{number}": model.path for number, model in enumerate(stage.inputs.teacher)}
        # Whole distributions are over one vocabulary, and what is read between turns has no text of the policy's.
        reads_texts = config.beta is None and config.demonstration is None and stage.config.environment is None
        self._readers = {
            role: TeacherPrompts(f"{stage.name}.{role}", path, tokenizer, reads_texts=reads_texts)
            for role, path in self._paths.items()
        }
        self._top_k, self._num_tokens = compared_tokens(
            f"{stage.name}.distillation", stage.inputs.policy.path, config.beta, config.top_k
        )
        self._server = None if config.server is None else TeacherServer(stage, config.server, self._top_k)
        limits = map(max_positions, self._paths.values() or [stage.inputs.policy.path])
        self._limit = min((limit for limit in limits if limit is not None), default=None)
        for role, reader in self._readers.items():
            self._check_template(role)
            reader.check(prompts[i] for i in range(min(CHECKED_PROMPTS, len(prompts))))
        if self._server is not None:
            self._server.check(prompts[i] for i in range(min(CHECKED_PROMPTS, len(prompts))))
        if config.column is not None or config.demonstration is not None:
            columns = prompts.columns(range(len(prompts)))
            self._places(len(prompts), columns)
            if config.demonstration is not None:
                self._column(config.demonstration, "demonstration", columns)

    def specs(self) -> dict[str, ModelSpec]:
        """Specs of those that are models, to open with the stage's others."""
        config = self._stage.config
        objective = TeacherObjective(config.temperature, self._top_k, self._num_tokens)
        return {role: ModelSpec(path, objective, frozen=config.frozen) for role, path in self._paths.items()}

    def requests(
        self,
        models: Mapping[str, ModelHandle],
        prompts: Sequence[tuple[Messages, list[int]]],
        rows: TextBatch,
        columns: Mapping[str, Sequence[Any]],
        step: int,
    ) -> TeacherRequests:
        """Start scoring `rows`, the replies to `prompts` that were sampled in a step.

        Raises:
            ValueError: a row's column names no teacher or has no demonstration; a teacher reads another prompt, or more
                tokens than its context holds.
        """
        config = self._config
        if config.demonstration is not None:
            rows = self._shown(prompts, rows, columns)
        if self._server is not None:
            answer = Local(ThreadPoolExecutor(1).submit(self._server.score, rows, step))
            return TeacherRequests([np.arange(len(rows))], [answer], [None], reads_texts=False)
        places = self._places(len(rows), columns)
        answers, found = list[Ref[Scores]](), list[Sequence[Aligned | None] | None]()
        for role, at in places.items():
            reader, of_teacher = self._readers.get(role), rows.take(at)
            found.append(None)
            if reader is not None and reader.has_other_tokens:
                of_teacher, found[-1] = reader.rows([prompts[i][0] for i in at], of_teacher, self._stops)
            elif reader is not None:
                reader.check(prompts[i] for i in at)
            self._check_length(of_teacher)
            # Each rank needs a row, and a teacher of some rows may have few: they are repeated.
            count = max(len(at), self._stage.config.frozen.data_parallel)
            answers.append(models[role].score.remote(of_teacher.take(np.resize(np.arange(len(at)), count))))
        reads_texts = any(reader.has_other_tokens for reader in self._readers.values())
        return TeacherRequests(list(places.values()), answers, found, reads_texts)

    def _check_length(self, rows: TextBatch) -> None:
        longest = int(rows.input_ids.lengths.max(initial=0))
        if self._limit is not None and longest > self._limit:
            raise ValueError(
                f"{self._stage.name}: {longest} tokens are not allowed: the teacher reads at most {self._limit}; lower "
                "max_prompt_tokens or max_new_tokens"
            )

    def _places(self, count: int, columns: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
        """Teacher → its rows, of those that have any."""
        config = self._config
        if config.column is None:
            return {next(iter(self._paths), "policy"): np.arange(count)}
        given = self._column(config.column, "column", columns)
        wrong = next((value for value in given if value not in config.values), None)
        if wrong is not None:
            raise ValueError(
                f"{self._stage.name}.distillation.column: {wrong!r} in the column {config.column!r} is not allowed: "
                f"must be one of {', '.join(map(repr, config.values))}"
            )
        numbers = np.array([config.values.index(value) for value in given])
        return {f"teacher.{number}": np.flatnonzero(numbers == number) for number in np.unique(numbers)}

    def _shown(
        self,
        prompts: Sequence[tuple[Messages, list[int]]],
        rows: TextBatch,
        columns: Mapping[str, Sequence[Any]],
    ) -> TextBatch:
        """The rows after prompts with their demonstrations."""
        config = self._config
        assert config.demonstration is not None
        shown: list[Messages] = []
        for (messages, _), text in zip(
            prompts, self._column(config.demonstration, "demonstration", columns), strict=True
        ):
            *before, last = messages
            # Either text may have the other's name in braces.
            texts: dict[str, str] = {"{prompt}": last["content"], "{demonstration}": text}
            parts = re.split(f"({'|'.join(map(re.escape, texts))})", config.shown)
            shown.append([*before, {**last, "content": "".join(texts.get(part, part) for part in parts)}])
        replies = [ids[n:] for ids, n in zip(rows.input_ids, rows.prompt_lengths, strict=True)]
        return TextBatch.of(encode_prompts(self._tokenizer, shown), replies)

    def _column(self, name: str, field: str, columns: Mapping[str, Sequence[Any]]) -> Sequence[str]:
        given = columns.get(name, [None])
        if wrong := [value for value in given if not isinstance(value, str)]:
            raise ValueError(
                f"{self._stage.name}.distillation.{field}: {wrong[0]!r} in the column {name!r} is not allowed: must be "
                "a text in each row"
            )
        return given

    def _check_template(self, role: str) -> None:
        same = self._readers[role].same_template
        if not same and (self._stage.config.environment is not None or self._config.demonstration is not None):
            raise ValueError(
                f"{self._stage.name}.{role}: its chat template must be the policy's with an environment or a "
                "demonstration"
            )


def _of_teacher(scores: Scores) -> Scores:
    """A teacher's answer; the policy's own log-probabilities where it is its own teacher."""
    return scores if "teacher_logprobs" in scores else Scores(teacher_logprobs=scores.logprobs)

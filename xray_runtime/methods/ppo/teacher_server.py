"""A teacher behind an address: a vLLM, or another server that answers `/v1/completions` with `prompt_logprobs` as it.

It is sent the student's tokens, and its answers are journaled: a resumed attempt asks for no reply again, and a replay
reads what the checkpoint has of them, since it might answer differently.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.data.pairs import Messages
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.bounded_http import AnswerError
from xray_runtime.methods.ppo.distillation_config import TeacherServerConfig
from xray_runtime.rewards.journal import RECORDED, Journal
from xray_runtime.rewards.remote import ask_all
from xray_runtime.rewards.source import Score

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.kind import PPOInputs

SOURCE = "teacher"


class TeacherServer:
    """The teacher of a stage.

    Args:
        top_k: likeliest tokens to ask for at each place; 0: none.
    """

    def __init__(self, stage: Stage[PPOConfig, PPOInputs], config: TeacherServerConfig, top_k: int) -> None:
        self._where, self._config, self._top_k = f"{stage.name}.distillation.server", config, top_k
        self._journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        self._mark = {RECORDED: True} if stage.config.keeps_answers else {}

    def check(self, prompts: Iterable[tuple[Messages, list[int]]]) -> None:
        """Raises ValueError: it does not answer, tells no log-probabilities, or reads a prompt as other tokens than the
        student. What it answered well is not sent again."""
        keyed = {_digest([SOURCE, "tokenize", messages, own]): (messages, own) for messages, own in prompts}
        given = {key: prompt for key, prompt in keyed.items() if self._journal.entry(key) is None}
        requests = [
            {"model": self._config.model, "messages": messages, "add_generation_prompt": True}
            for messages, _ in given.values()
        ]
        answers = ask_all(self._config, "/tokenize", requests, lambda _, answer: _tokens(answer))
        for (messages, own), answer in zip(given.values(), answers, strict=True):
            if isinstance(answer, Score):
                raise ValueError(f"{self._where}: the teacher does not answer: {answer.why}")
            if list(own) != answer:
                raise ValueError(
                    f"{self._where}: the teacher is not allowed: it reads the prompt "
                    f"{str(messages[-1]['content'])[:40]!r} as {len(answer)} tokens that are not the policy's "
                    f"{len(own)}; both need the same tokenizer and chat template"
                )
        self._write(0, {key: {"tokens": len(own)} for key, (_, own) in given.items()})
        self._try(list(next(iter(keyed.values()))[1]))

    def _try(self, ids: list[int]) -> None:
        """Ask for the last of these tokens as for a reply, before anything is computed."""
        key = _digest([SOURCE, "tried", self._top_k])
        if self._journal.entry(key) is not None:
            return
        [answer] = ask_all(
            self._config,
            "/v1/completions",
            [self._request(ids)],
            lambda _, answer: _read(answer, ids, len(ids) - 1, self._top_k),
        )
        if isinstance(answer, Score):
            more = f"; vLLM tells so many with --max-logprobs {self._top_k}" if self._top_k else ""
            raise ValueError(f"{self._where}: the teacher tells no log-probabilities of a prompt: {answer.why}{more}")
        self._write(0, {key: {"tried": len(ids)}})

    def score(self, rows: TextBatch, step: int) -> Scores:
        """Its log-probabilities of the replies. Raises RuntimeError: it has none for some, after all retries."""
        texts = [(ids.tolist(), int(length)) for ids, length in zip(rows.input_ids, rows.prompt_lengths, strict=True)]
        keys = [_digest([SOURCE, step, row, self._top_k, *text]) for row, text in enumerate(texts)]
        known = {key: entry["answer"] for key in keys if (entry := self._journal.entry(key)) is not None}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        to_score = list(missing.values())
        answers = ask_all(
            self._config,
            "/v1/completions",
            [self._request(ids) for ids, _ in to_score],
            lambda number, answer: _read(answer, *to_score[number], self._top_k),
        )
        fresh = {key: answer for key, answer in zip(missing, answers, strict=True) if not isinstance(answer, Score)}
        self._write(step, fresh)
        failed = [answer for answer in answers if isinstance(answer, Score)]
        if failed:
            raise RuntimeError(
                f"{self._where}: {len(failed)} of {len(to_score)} replies have no answer: {failed[0].why}"
            )
        return _scores([(known | fresh)[key] for key in keys], self._top_k)

    def _write(self, step: int, answers: Mapping[str, dict[str, Any]]) -> None:
        entries = ({"key": key, "source": SOURCE, "step": step, "answer": answer} for key, answer in answers.items())
        self._journal.write_entries(step, [entry | self._mark for entry in entries])

    def _request(self, ids: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self._config.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._top_k,
        }


def _tokens(answer: Any) -> list[int]:
    found = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise AnswerError(f"the answer must be {{tokens: [numbers]}}, not {str(answer)[:200]}")
    return found


def _read(answer: Any, ids: Sequence[int], prompt_length: int, top_k: int) -> dict[str, Any]:
    """Log-probabilities of a reply's tokens, with `top_k` also ids and log-probabilities of the likeliest ones."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"][prompt_length:]
        places = [{int(token): one for token, one in entry.items()} for entry in entries]
        logprobs = [_logprob(place[token]) for place, token in zip(places, ids[prompt_length:], strict=True)]
        ranked = [sorted(place, key=lambda token: (-_logprob(place[token]), token))[:top_k] for place in places]
        if any(len(tokens) < top_k for tokens in ranked):
            raise ValueError(f"fewer than {top_k} tokens")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise AnswerError(f"the answer has no prompt_logprobs of the tokens that were sent ({error!r})") from None
    if not top_k:
        return {"logprobs": logprobs}
    values = [[_logprob(place[token]) for token in tokens] for place, tokens in zip(places, ranked, strict=True)]
    return {"logprobs": logprobs, "ids": ranked, "values": values}


def _logprob(entry: Any) -> float:
    found = float(entry["logprob"])
    if not math.isfinite(found) or found > 0:
        raise ValueError(f"{found} is no log-probability")
    return found


def _scores(answers: Sequence[dict[str, Any]], top_k: int) -> Scores:
    logprobs = Ragged.of((answer["logprobs"] for answer in answers), np.float32)
    if not top_k:
        return Scores(teacher_logprobs=logprobs)
    ids, values = (np.concatenate([np.array(answer[name]) for answer in answers]) for name in ("ids", "values"))
    return Scores(
        teacher_logprobs=logprobs,
        teacher_topk_ids=Ragged(ids.astype(np.int32), logprobs.offsets),
        teacher_topk_logprobs=Ragged(values.astype(np.float32), logprobs.offsets),
    )


def _digest(entry: Any) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()[:32]

"""Python functions as sources of reward: sync or async, called with what they take, limited in time."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from xray_runtime.errors import NonFiniteError
from xray_runtime.rewards.source import Batch, Score, as_number, described, failure, is_infinite

log = logging.getLogger(__name__)

GIVEN = ("messages", "columns", "metadata")
"""Keywords a function may take beside the dataset's columns."""


class FunctionSource:
    """A function `f(prompts, replies, ...)` that returns one number a reply, None where it has none.

    Args:
        where: names it in errors.
        timeout_s: a call that takes longer has failed. A thread cannot be ended: what the call still does goes on.
        retries: calls after a failed one.

    Raises:
        ValueError: it cannot be called with prompts and replies.
    """

    relative = True

    def __init__(self, function: Callable[..., Any], where: str, timeout_s: float, retries: int) -> None:
        self._function, self._where, self._timeout_s, self._retries = function, where, timeout_s, retries
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []  # of a builtin: it takes prompts and replies, or fails when it is called
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
        rest = [p for p in parameters if p not in by_position and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._takes = {p.name for p in rest if p.kind is not p.POSITIONAL_ONLY}
        self._needs = [p.name for p in rest if p.default is p.empty and p.name not in GIVEN]
        if parameters and len(by_position) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise ValueError(f"{where}: must take the arguments prompts and replies, in this order")

    def score(self, batch: Batch) -> list[Score]:
        missing = [name for name in self._needs if name not in batch.columns]
        if missing:
            raise ValueError(
                f"{self._where}: takes {missing[0]!r}, which is not a column of the dataset: add it to data.columns"
            )
        offered = dict(batch.columns) | {name: getattr(batch, name) for name in GIVEN}
        keywords = {name: value for name, value in offered.items() if self._takes_all or name in self._takes}
        error: BaseException | None = None
        for attempt in range(self._retries + 1):
            answer, error = self._call(list(batch.prompts), list(batch.replies), keywords)
            if error is None:
                return self._scores(answer, len(batch.replies))
            log.warning("%s: call %d failed", self._where, attempt + 1, exc_info=error)
        assert error is not None
        return [failure(described(error))] * len(batch.replies)

    def _call(
        self, prompts: list[str], replies: list[str], keywords: dict[str, Any]
    ) -> tuple[Any, BaseException | None]:
        """(answer, error), one of them None."""
        found: list[tuple[Any, BaseException | None]] = []

        async def limited(answer: Any) -> Any:
            return await asyncio.wait_for(answer, self._timeout_s)

        def call() -> None:
            try:
                answer = self._function(prompts, replies, **keywords)
                if inspect.isawaitable(answer):
                    answer = asyncio.run(limited(answer))
                found.append((answer, None))
            except BaseException as error:  # also what a user's code raises to end the process
                found.append((None, error))

        thread = threading.Thread(target=call, name=f"reward {self._where}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        late = TimeoutError(f"no answer within timeout_s = {self._timeout_s:g}")
        answer, error = found[0] if found else (None, late)
        return answer, late if isinstance(error, TimeoutError) and not str(error) else error

    def _scores(self, answer: Any, num_replies: int) -> list[Score]:
        try:
            values: Sequence[Any] = list(answer)
        except TypeError as error:
            raise ValueError(f"{self._where}: must return a list of numbers ({error})") from error
        if len(values) != num_replies:
            raise ValueError(
                f"{self._where}: must return one number a reply; for {num_replies} replies it returned {len(values)}"
            )
        for value in values:
            if isinstance(value, str | bytes):
                raise ValueError(f"{self._where}: must return a list of numbers; {value!r} is in it")
            if is_infinite(value):
                raise NonFiniteError(
                    f"{self._where}: returned {value!r}; a score must be finite, None where there is none"
                )
        numbers = [as_number(value) for value in values]
        return [
            failure(f"it returned {value!r}") if number is None else Score(number)
            for value, number in zip(values, numbers, strict=True)
        ]

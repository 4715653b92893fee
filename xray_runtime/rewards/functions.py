"""Python functions as sources of reward: sync or async, with the arguments they take and a time limit."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from xray_runtime.data.gold import FormError, score_list
from xray_runtime.errors import NonFiniteError
from xray_runtime.rewards.source import Batch, Score, as_number, described, failure, is_infinite

log = logging.getLogger(__name__)

OF_REPLIES = ("reasoning", "answers")
"""The two parts of each reply."""
GIVEN = ("messages", "columns", "metadata", *OF_REPLIES)
"""Keywords that a function may take besides the dataset's columns."""
PARTS = 8
"""If a function fails for so many parts of a batch, the function is at fault, not a reply."""


class Arguments:
    """The further parameters of a function `f(prompts, replies, ...)`.

    Args:
        where: name of the function in errors.

    Raises:
        ValueError: it cannot be called with prompts and replies.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self._where = where
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []  # a builtin, which may fail when it is called
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
        rest = [p for p in parameters if p not in by_position and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._takes = {p.name for p in rest if p.kind is not p.POSITIONAL_ONLY}
        self._needs = [p.name for p in rest if p.default is p.empty and p.name not in GIVEN]
        if parameters and len(by_position) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise ValueError(f"{where}: must take the arguments prompts and replies, in this order")

    def check(self, columns: Collection[str]) -> None:
        """Raises ValueError if a required parameter is not one of the dataset's `columns`, or a parameter is both a
        column and a part of the replies."""
        for name in OF_REPLIES:
            if name in self._takes and name in columns:
                raise ValueError(
                    f"{self._where}: takes {name!r}, which is a part of the replies and a column of the dataset: take "
                    f"`columns` for the column, or rename it"
                )
        for name in self._needs:
            if name not in columns:
                raise ValueError(
                    f"{self._where}: takes {name!r}, which is not a column of the dataset: there are "
                    f"{', '.join(columns) or 'none'}; add it to data.columns"
                )

    def of(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments for a batch."""
        self.check(batch.columns)
        offered = dict(batch.columns) | {name: getattr(batch, name) for name in GIVEN if name not in OF_REPLIES}
        offered |= {name: getattr(batch, name) for name in OF_REPLIES if name in self._takes}
        return {name: value for name, value in offered.items() if self._takes_all or name in self._takes}


class FunctionSource:
    """A function `f(prompts, replies, ...)` that returns a number, or None, for each reply.

    A reply for which it raises has no score: the batch is halved until such replies are found, and the scores come from
    a last call with all others.

    Args:
        where: name of the function in errors.
        timeout_s: limit of a call. A thread cannot be killed, so a late call still runs on.
        retries: number of repetitions of a failed call.

    Raises:
        ValueError: it cannot be called with prompts and replies.
    """

    relative = True

    def __init__(self, function: Callable[..., Any], where: str, timeout_s: float, retries: int) -> None:
        self._function, self._where, self._timeout_s, self._retries = function, where, timeout_s, retries
        self._arguments = Arguments(function, where)

    def score(self, batch: Batch) -> list[Score]:
        rows = list(range(len(batch.replies)))
        found = self._tried(batch, rows, self._retries)
        if isinstance(found, list):
            return found
        failed = self._failing(batch, rows, found)
        rest = [row for row in rows if row not in failed]
        scores = self._tried(batch, rest, self._retries) if rest else []
        if not isinstance(scores, list):
            failed, rest, scores = dict.fromkeys(rows, scores), [], []
        for first in list(failed.values())[:1]:
            log.warning("%s: failed for %d of %d replies", self._where, len(failed), len(rows), exc_info=first)
        by_row = dict(zip(rest, scores, strict=True)) | {r: failure(described(e)) for r, e in failed.items()}
        return [by_row[row] for row in rows]

    def _failing(self, batch: Batch, rows: list[int], error: BaseException) -> dict[int, BaseException]:
        """Row → exception of the function; all rows if it fails for every one of PARTS parts."""
        parts, failed, has_worked = [(rows, error)], dict[int, BaseException](), False
        while parts:
            if len(parts) >= PARTS and not has_worked:
                return dict.fromkeys(rows, error)
            halves: list[list[int]] = []
            for part, why in parts:
                # Halves of a part that timed out may take as long.
                if len(part) == 1 or isinstance(why, TimeoutError):
                    failed |= dict.fromkeys(part, why)
                else:
                    halves += [part[: len(part) // 2], part[len(part) // 2 :]]
            found = [(half, self._tried(batch, half, 0)) for half in halves]
            has_worked = has_worked or any(isinstance(answer, list) for _, answer in found)
            parts = [(half, answer) for half, answer in found if not isinstance(answer, list)]
        return failed

    def _tried(self, batch: Batch, rows: list[int], retries: int) -> list[Score] | BaseException:
        """The scores of `rows`, or the exception after the last retry."""
        some = batch.take(rows)
        keywords = self._arguments.of(some)
        error: BaseException | None = None
        for _ in range(retries + 1):
            answer, error = self._call(list(some.prompts), list(some.replies), keywords)
            if error is None:
                return self._scores(answer)
            if isinstance(error, FormError):
                raise ValueError(f"{self._where}: {error}") from error
        assert error is not None
        return error

    def _call(
        self, prompts: list[str], replies: list[str], keywords: dict[str, Any]
    ) -> tuple[list[Any], BaseException | None]:
        """(answer, error), one of which is empty."""
        found: list[tuple[list[Any], BaseException | None]] = []

        async def limited(answer: Any) -> Any:
            return await asyncio.wait_for(answer, self._timeout_s)

        def call() -> None:
            try:
                answer = self._function(prompts, replies, **keywords)
                if inspect.isawaitable(answer):
                    answer = asyncio.run(limited(answer))
                found.append((score_list(answer, len(replies)), None))
            except BaseException as error:  # SystemExit of user code too
                found.append(([], error))

        thread = threading.Thread(target=call, name=f"reward {self._where}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        late = TimeoutError(f"no answer within timeout_s = {self._timeout_s:g}")
        answer, error = found[0] if found else ([], late)
        return answer, late if isinstance(error, TimeoutError) and not str(error) else error

    def _scores(self, values: list[Any]) -> list[Score]:
        for value in values:
            if is_infinite(value):
                raise NonFiniteError(
                    f"{self._where}: returned {value!r}; a score must be finite, None where there is none"
                )
        numbers = [as_number(value) for value in values]
        return [
            failure(f"it returned {value!r}") if number is None else Score(number)
            for value, number in zip(values, numbers, strict=True)
        ]

"""Python functions: sync or async, with the arguments they take and a time limit."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from xray_runtime.data.gold import FormError, import_function, score_list
from xray_runtime.kernel.arguments import Arguments
from xray_runtime.kernel.config.section import Positive
from xray_runtime.kernel.config.sources import Function
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.rewards.kind import ExternalTerm
from xray_runtime.rewards.source import Batch, Score, Source, as_number, described, failure, is_infinite
from xray_runtime.rewards.term import Recording

log = logging.getLogger(__name__)

PARTS = 8
"""If a function fails for so many parts of a batch, the function is at fault, not a reply."""


class FunctionTerm(ExternalTerm, field="function", recording=Recording.COMPUTED):
    """A number for each reply, None for one that the function cannot score."""

    function: str
    """`module:function`, or the name of a function that a graph passed directly; it may be async. It is called by the
    names of its parameters: `prompts`; `replies`, `completions` or `responses`; `messages`, `columns`, `metadata`, and
    columns of the dataset."""
    timeout_s: Positive = 300.0
    """A call fails if it takes longer."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Number of times a failed call is repeated."""

    @property
    def name(self) -> str:
        return self.function

    @property
    def called_functions(self) -> list[str]:
        return [self.function]

    def check_call(
        self, path: str, functions: Mapping[str, Callable[..., Any]], columns: Collection[str] | None
    ) -> None:
        if self.function in functions:
            Arguments(functions[self.function], f"{path}.function {self.function!r}").check(columns)

    @classmethod
    def given(cls, function: str | None, models: Sequence[str]) -> dict[str, Any] | None:
        return None if function is None else {"function": function}

    @classmethod
    def in_files(cls) -> type[FunctionTerm]:
        return ImportedFunctionTerm

    def open(self, where: str, functions: Mapping[str, Callable[..., Any]]) -> Source:
        field = f"{where}.function"
        function = functions.get(self.function) or import_function(self.function, field)
        return FunctionSource(function, f"{field} {self.function!r}", self.timeout_s, self.retries)


class ImportedFunctionTerm(FunctionTerm, field="function", recording=Recording.COMPUTED):
    """A function of a module that XRAY_ALLOWED_IMPORTS names."""

    function: Function
    """`module:function`, which may be async. It is called by the names of its parameters: `prompts`; `replies`,
    `completions` or `responses`; `messages`, `columns`, `metadata`, and columns of the dataset."""


TERM = FunctionTerm


class FunctionSource(Source):
    """A function that returns a number, or None, for each reply; it is called as `Arguments` says.

    A reply for which it raises has no score: the batch is halved until such replies are found, and the scores come from
    a last call with all others.

    Args:
        where: name of the function in errors.
        timeout_s: limit of a call. A thread cannot be killed, so a late call still runs on.
        retries: number of repetitions of a failed call.

    Raises:
        ValueError: its parameters are not known.
    """

    relative = True

    def __init__(self, function: Callable[..., Any], where: str, timeout_s: float, retries: int) -> None:
        self._function, self._where, self._timeout_s, self._retries = function, where, timeout_s, retries
        self._arguments = Arguments(function, where)

    def check(self, dataset: Path, columns: Collection[str]) -> None:
        self._arguments.check(columns)

    def score(self, batch: Batch) -> list[Score]:
        rows = list(range(len(batch.replies)))
        results = self._tried(batch, rows, self._retries)
        if isinstance(results, list):
            return results
        failed = self._failing(batch, rows, results)
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
            tried = [(half, self._tried(batch, half, 0)) for half in halves]
            has_worked = has_worked or any(isinstance(answer, list) for _, answer in tried)
            parts = [(half, answer) for half, answer in tried if not isinstance(answer, list)]
        return failed

    def _tried(self, batch: Batch, rows: list[int], retries: int) -> list[Score] | BaseException:
        """The scores of `rows`, or the exception after the last retry."""
        some = batch.take(rows)
        error: BaseException | None = None
        for _ in range(retries + 1):
            # Anew for each call, since the last one may have changed them.
            answer, error = self._call(len(rows), *self._arguments.of(some))
            if error is None:
                return self._scores(answer)
            if isinstance(error, FormError):
                raise ValueError(f"{self._where}: {error}") from error
        assert error is not None
        return error

    def _call(
        self, num_replies: int, positional: list[Any], keywords: dict[str, Any]
    ) -> tuple[list[Any], BaseException | None]:
        """(answer, error), one of which is empty."""
        from xray_runtime.rewards.event_loop import cancel, start  # asyncio takes long to import

        answers: list[tuple[list[Any], BaseException | None]] = []
        waiting: list[Future[Any]] = []

        def call() -> None:
            try:
                answer = self._function(*positional, **keywords)
                if inspect.isawaitable(answer):
                    waiting.append(start(answer))
                    answer = waiting[0].result()
                answers.append((score_list(answer, num_replies), None))
            except BaseException as error:  # SystemExit of user code too
                answers.append(([], error))

        thread = threading.Thread(target=call, name=f"reward {self._where}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if answers:
            return answers[0]
        for future in waiting:
            cancel(future)
        return [], TimeoutError(f"no answer within timeout_s = {self._timeout_s:g}")

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

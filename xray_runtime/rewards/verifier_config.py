"""Verifiers of replies, for rewards and benchmarks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from xray_runtime.kernel.config.section import Positive, Section
from xray_runtime.rewards.term import Column


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not allowed: must be a regular expression ({error})") from None
    return pattern


class MathVerifier(Section):
    """1 if the reply's final answer equals the column's: a number, LaTeX or a text."""

    kind: Literal["math"] = "math"
    column: Column
    limit_s: Positive = 10.0
    """A reply that takes longer to check scores 0."""

    warm_up: ClassVar[Sequence[Any]] = ("$1$", "1")
    """Arguments of a first check, which loads libraries."""

    def arguments(self, reply: str, given: Any) -> Sequence[Any]:
        """Arguments of its check (`rewards.checks`); `given`: the column's value."""
        return reply, given


class RegexVerifier(Section):
    """1 if the pattern is found in the reply. With `column`: if its last match, or that match's first group, equals the
    column's value, a text as text and a number as a number."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
    column: Column | None = None
    limit_s: Positive = 1.0
    """A reply that takes longer to check scores 0."""

    warm_up: ClassVar[Sequence[Any]] = ("", "", None)

    def arguments(self, reply: str, given: Any) -> Sequence[Any]:
        return reply, self.pattern, given


class JSONSchemaVerifier(Section):
    """1 if the reply, or its last fenced block, is JSON that is valid under a JSON Schema."""

    kind: Literal["json_schema"] = "json_schema"
    definition: dict[str, Any] | None = None
    """The schema."""
    column: Column | None = None
    """Column with each row's schema instead."""
    limit_s: Positive = 1.0
    """A reply that takes longer to check scores 0."""

    warm_up: ClassVar[Sequence[Any]] = ("1", {})

    def arguments(self, reply: str, given: Any) -> Sequence[Any]:
        return reply, self.definition if self.column is None else given

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.definition is None) == (self.column is None):
            raise ValueError("one of definition and column must be set")
        return self


class CodeVerifier(Section):
    """1 if the reply's last Python block, or the reply, passes the column's tests. Code and tests run in separate
    sandboxes."""

    kind: Literal["code"] = "code"
    column: Column
    """Python statements, or a list of them, that call the code and raise if it is wrong; or, for programs, their input
    and expected output: `{"inputs": [text, ...], "outputs": [text, ...]}`, as an object or its JSON."""
    limit_s: Positive = 5.0
    """Code scores 0 if all its tests, or one program, take longer."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Code scores 0 if it needs more address space, in addition to Python's own."""


TextVerifier = MathVerifier | RegexVerifier | JSONSchemaVerifier
Verifier = TextVerifier | CodeVerifier

"""Sources of reward: models, functions, verifiers, services, judges, and the rows that each applies to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from xray_runtime.config.section import Count, NonNegative, Positive, Section
from xray_runtime.config.sources import Function, without_login
from xray_runtime.errors import shown

SOURCES = ("model", "models", "function", "verifier", "service", "judge")
"""Fields that choose the source of a reward term; exactly one is set."""
Column = Annotated[str, Field(min_length=1)]
"""A column of the dataset, listed in `data.columns`."""
Role = Annotated[str, Field(pattern=r"^(rewards|judges)\.\d+$")]
"""An input: `rewards.0` is the first reward model, `judges.0` the first one that acts as a judge."""
Address = Annotated[str, Field(pattern=r"^https?://[^\s?#]+$"), AfterValidator(without_login)]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not allowed: must be a regular expression ({error})") from None
    return pattern


def _kind(value: Any) -> str:
    """The type of a value as JSON has it: 1 and 1.0 are the same."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "a text" if isinstance(value, str) else type(value).__name__


class Route(Section):
    """The rows that a source applies to."""

    column: Column
    equals: str | bool | int | float
    """The value that the column must have, of its type: text, a number, true or false."""

    def applies(self, value: Any) -> bool:
        """Whether the source applies to a row with `value` in the column. Raises ValueError if the two differ only in
        their type."""
        if value is None or _kind(value) == _kind(self.equals):
            return bool(value == self.equals)
        if str(value).casefold() == str(self.equals).casefold() or value == self.equals:
            raise ValueError(
                f"when.equals = {self.equals!r} is {_kind(self.equals)}, but the column {self.column!r} has "
                f"{shown(value)}, {_kind(value)}: must be of the same type"
            )
        return False


class MathVerifier(Section):
    """1 if the reply's final answer equals the column's: a number, LaTeX or a text."""

    kind: Literal["math"] = "math"
    column: Column
    limit_s: Positive = 10.0
    """A reply that takes longer to check scores 0."""


class RegexVerifier(Section):
    """1 if the pattern is found in the reply. With `column`: if its last match, or that match's first group, equals the
    column's value, a text as text and a number as a number."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
    column: Column | None = None
    limit_s: Positive = 1.0
    """A reply that takes longer to check scores 0."""


class JSONSchemaVerifier(Section):
    """1 if the reply, or its last fenced block, is JSON that is valid under a JSON Schema."""

    kind: Literal["json_schema"] = "json_schema"
    definition: dict[str, Any] | None = None
    """The schema."""
    column: Column | None = None
    """Column with each row's schema instead."""
    limit_s: Positive = 1.0
    """A reply that takes longer to check scores 0."""

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


Verifier = MathVerifier | RegexVerifier | JSONSchemaVerifier | CodeVerifier


class RemoteConfig(Section):
    """Limits and retries of requests to a server."""

    url: Address
    timeout_s: Positive = 60.0
    """A request fails if it takes longer."""
    retries: Annotated[int, Field(ge=0)] = 6
    """Number of times a failed request is repeated."""
    backoff_s: NonNegative = 1.0
    """Pause before the first repetition; each further pause is twice as long. The defaults survive an outage of a
    minute."""
    concurrency: Count = 8
    """Maximum number of concurrent requests."""


class ServiceConfig(RemoteConfig):
    """POST {prompts, messages, replies, columns} → {scores: [number or null]}."""

    batch_size: Count = 32
    """Replies per request."""


class JudgeConfig(RemoteConfig):
    """A model at an OpenAI-compatible address scores each reply by a rubric, or compares replies."""

    url: Address
    """Its address up to `/v1`: `http://localhost:8000/v1`."""
    model: Annotated[str, Field(min_length=1)]
    rubric: Annotated[str, Field(min_length=1)]
    """Description of a good reply."""
    scale: Annotated[tuple[float, float], Field(strict=False)] = (1.0, 10.0)
    """The worst and the best score. A score outside them is a failed score."""
    opponents: Count | None = None
    """Compare each reply with at least this many others to the same prompt, in both orders, instead of scoring it by
    itself: its score is its win rate, from 0 to 1. Each prompt then needs several replies."""
    column: Column | None = None
    """Column with a reference answer to show to the judge."""
    max_tokens: Count = 512
    temperature: NonNegative = 0.0

    @model_validator(mode="after")
    def _one_scale(self) -> Self:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale = {list(self.scale)} must ascend")
        if self.opponents is not None and self.scale != JudgeConfig.model_fields["scale"].default:
            raise ValueError(f"scale must be left out with opponents = {self.opponents}: a win rate is from 0 to 1")
        return self


class ExternalReward(Section):
    """A source of reward other than a reward model, and its weight."""

    weight: float = 1.0
    """0: the source is logged and does not count."""
    when: Route | None = None
    """The rows that it applies to; it contributes nothing to others."""
    function: Function | None = None
    """`module:function`, which may be async. It is called by the names of its parameters: `prompts`; `replies`,
    `completions` or `responses`; `messages`, `columns`, `metadata`, and columns of the dataset. It returns a number for
    each reply, None for one that it cannot score."""
    timeout_s: Positive = 300.0
    """A call of `function` fails if it takes longer."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Number of times a failed call of `function` is repeated."""
    verifier: Annotated[Verifier, Field(discriminator="kind")] | None = None
    service: ServiceConfig | None = None
    judge: JudgeConfig | None = None

    @property
    def compares(self) -> bool:
        """Whether scores come from comparing the replies to one prompt."""
        return self.judge is not None and self.judge.opponents is not None

    @property
    def columns(self) -> dict[str, str]:
        """Field → the column of the dataset that it names."""
        sections = {"when": self.when, "verifier": self.verifier, "judge": self.judge}
        named = {f"{name}.column": getattr(section, "column", None) for name, section in sections.items()}
        return {field: column for field, column in named.items() if column is not None}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in SOURCES if name in type(self).model_fields]
        if sum(getattr(self, name) is not None for name in sources) != 1:
            raise ValueError(f"one of {', '.join(sources[:-1])} and {sources[-1]} must be set")
        for name in ("timeout_s", "retries"):
            if self.function is None and getattr(self, name) != ExternalReward.model_fields[name].default:
                raise ValueError(f"{name} must be left out: it limits calls of a function")
        return self


class RewardTerm(ExternalReward):
    """One of the sources whose weighted sum is the reward."""

    model: Role | None = None
    """The reward model that scores."""
    models: Annotated[list[Role], Field(min_length=2)] | None = None
    """An ensemble: the mean of the members' standardized scores minus `uncertainty` × their variance (UWO, Coste et al.
    2023)."""
    uncertainty: NonNegative = 0.5
    function: str | None = None
    """As above, or the name of a function that a graph passed directly."""

    @property
    def roles(self) -> list[str]:
        """The reward models of this term."""
        return self.models or ([self.model] if self.model is not None else [])


def source_names(terms: Sequence[RewardTerm]) -> list[str]:
    """The unique name of each source in metrics, results and errors."""
    names: list[str] = []
    for term in terms:
        kinds = {"service": term.service, "judge": term.judge}
        kind = term.verifier.kind if term.verifier else next((k for k, section in kinds.items() if section), "")
        name = base = term.function or "+".join(term.roles) or kind
        number = 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names

"""Where rewards come from: models, functions, verifiers, services, judges, and to which rows each applies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from xray_runtime.config.engines import Count, NonNegative, Positive, Section
from xray_runtime.config.sources import Function, without_login

SOURCES = ("model", "models", "function", "verifier", "service", "judge")
"""Fields of which a term of the reward sets one."""
Column = Annotated[str, Field(min_length=1)]
"""A column of the dataset, which `data.columns` carries along."""
Role = Annotated[str, Field(pattern=r"^(rewards|judges)\.\d+$")]
"""An input: `rewards.0` is the first reward model, `judges.0` the first one that judges an evaluation."""
Address = Annotated[str, Field(pattern=r"^https?://[^\s?#]+$"), AfterValidator(without_login)]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not allowed: must be a regular expression ({error})") from None
    return pattern


class Route(Section):
    """The rows a source applies to."""

    column: Column
    equals: str
    """Value that the column must have, as text."""

    def applies(self, value: Any) -> bool:
        """Whether the source applies to a row that has `value` in the column."""
        return str(value) == self.equals


class MathVerifier(Section):
    """1 where the reply's final answer equals the column's, as mathematics (math-verify)."""

    kind: Literal["math"] = "math"
    column: Column
    limit_s: Positive = 10.0
    """A reply that takes longer to check scores 0."""


class RegexVerifier(Section):
    """1 where the pattern is found in the reply; with `column` where its last match, or the first group of it, is what
    the column holds."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
    column: Column | None = None
    limit_s: Positive = 1.0
    """A reply that takes longer to check scores 0."""


class JSONSchemaVerifier(Section):
    """1 where the reply, or the last fenced block in it, is JSON that a JSON Schema allows."""

    kind: Literal["json_schema"] = "json_schema"
    definition: dict[str, Any] | None = None
    """The schema."""
    column: Column | None = None
    """Column that has each row's schema instead."""
    limit_s: Positive = 1.0
    """A reply that takes longer to check scores 0."""

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.definition is None) == (self.column is None):
            raise ValueError("one of definition and column must be set")
        return self


class CodeVerifier(Section):
    """1 where the reply's Python code, or the last fenced block in it, passes the column's tests, in a sandbox apart
    from them."""

    kind: Literal["code"] = "code"
    column: Column
    """Python statements, or a list of them, that call the code and raise where it is wrong; or, of programs, what they
    read and should print: `{"inputs": [text, ...], "outputs": [text, ...]}`, as an object or its JSON."""
    limit_s: Positive = 5.0
    """Code that takes longer, for all its tests or one program, scores 0."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Code that needs more address space, beside Python's own, scores 0."""


Verifier = MathVerifier | RegexVerifier | JSONSchemaVerifier | CodeVerifier


class RemoteConfig(Section):
    """How another server is asked."""

    url: Address
    timeout_s: Positive = 60.0
    """A request that takes longer has failed."""
    retries: Annotated[int, Field(ge=0)] = 6
    """A failed request is made so many times more."""
    backoff_s: NonNegative = 1.0
    """Pause before the first of them; each next pause is twice as long. The defaults outlast a server that is away for
    a minute."""
    concurrency: Count = 8
    """Requests at the same time."""


class ServiceConfig(RemoteConfig):
    """POST {prompts, messages, replies, columns} → {scores: [number or null]}."""

    batch_size: Count = 32
    """Replies in one request."""


class JudgeConfig(RemoteConfig):
    """A model behind an OpenAI-compatible address scores each reply by a rubric, or compares replies."""

    url: Address
    """Up to `/v1`: `http://localhost:8000/v1`."""
    model: Annotated[str, Field(min_length=1)]
    rubric: Annotated[str, Field(min_length=1)]
    """Description of a good reply."""
    scale: Annotated[tuple[float, float], Field(strict=False)] = (1.0, 10.0)
    """The worst and the best score. What the judge says beyond is no score."""
    opponents: Count | None = None
    """Compare each reply with at least so many others to the same prompt, in both orders, in place of scoring it by
    itself: its score is the share it wins, from 0 to 1. Each prompt then needs several replies."""
    column: Column | None = None
    """Column with a reference answer that the judge is shown."""
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
    """A source of reward that is no model of ours, and how much it counts."""

    weight: float = 1.0
    """0: it is logged and does not count."""
    when: Route | None = None
    """The rows it applies to; where it does not, it contributes nothing."""
    function: Function | None = None
    """`module:function`, `f(prompts, replies) -> scores`; it may take `messages`, `columns`, `metadata` and columns of
    the dataset by name too, and be async. None for a reply: no score."""
    timeout_s: Positive = 300.0
    """A call of `function` that takes longer has failed."""
    retries: Annotated[int, Field(ge=0)] = 2
    """A failed call of `function` is made so many times more."""
    verifier: Annotated[Verifier, Field(discriminator="kind")] | None = None
    service: ServiceConfig | None = None
    judge: JudgeConfig | None = None

    @property
    def compares(self) -> bool:
        """Whether replies to one prompt are scored by comparing them."""
        return self.judge is not None and self.judge.opponents is not None

    @property
    def columns(self) -> dict[str, str]:
        """Field → the column of the dataset it names."""
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
    """An ensemble: the mean of their scores, each in its own deviations, minus `uncertainty` × their variance (UWO,
    Coste et al. 2023)."""
    uncertainty: NonNegative = 0.5
    function: str | None = None
    """As above; or the name of one that was handed over."""

    @property
    def roles(self) -> list[str]:
        """The reward models that score."""
        return self.models or ([self.model] if self.model is not None else [])


def source_names(terms: Sequence[RewardTerm]) -> list[str]:
    """What each source is called in metrics, results and errors; no two alike."""
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

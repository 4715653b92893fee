"""The base of every part of a config, and its kinds of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from xray_runtime.config.runtime import RuntimeConfig

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen part of the config: no unknown keys, no silent coercion."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    not_in_key: ClassVar[frozenset[str]] = frozenset()
    """Fields that cannot change a result, such as an address; the keys of stages leave them out."""

    def plugs(self) -> tuple[str, ...]:
        """Modules of the plugs that this section chooses: keys of stages digest their code."""
        return ()

    def check_runtime(self, runtime: RuntimeConfig) -> None:
        """Raises ValueError if the config of a stage conflicts with `runtime`; the message begins with a field."""


def sections(value: object, path: str = "") -> Iterator[tuple[str, Section]]:
    """(dotted path, section) of `value` itself and of every section in it, however deep."""
    below = f"{path}." if path else ""
    if isinstance(value, BaseModel):
        if isinstance(value, Section):
            yield path, value
        for name in type(value).model_fields:
            yield from sections(getattr(value, name), f"{below}{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from sections(item, f"{below}{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from sections(item, f"{below}{key}")


class ValidationSchedule(Section):
    """How often a model is validated during training, and which version the stage publishes."""

    every: Count = 20
    """Steps between validations; one more follows the last step."""
    keep: Literal["best", "last"] = "best"
    """The version to publish: the one with the best validation result, or the last."""

    def is_due(self, done: int, steps: int) -> bool:
        """Whether to validate after `done` of `steps`."""
        return done == steps or done % self.every == 0

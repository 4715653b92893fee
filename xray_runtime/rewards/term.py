"""The base of all reward terms; each kind of reward is one file in `xray_runtime.rewards.kinds`."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.errors import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Column = Annotated[str, Field(min_length=1)]
"""A column of the dataset, listed in `data.columns`."""


class Recording(Enum):
    """How a replay gets the scores of a source."""

    COMPUTED = "equal replies get equal scores, so a replay computes them again"
    RECORDED = "asked again, it might answer differently: its answers are in the checkpoint, and a replay reads them"


def _json_type(value: Any) -> str:
    """The type of a value as JSON has it: 1 and 1.0 are the same."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "a text" if isinstance(value, str) else type(value).__name__


class SourceRoute(Section):
    """The rows that a source applies to."""

    column: Column
    equals: str | bool | int | float
    """The value that the column must have, of its type: text, a number, true or false."""

    def applies(self, value: Any) -> bool:
        """Whether the source applies to a row with `value` in the column. Raises ValueError if the two differ only in
        their type."""
        if value is None or _json_type(value) == _json_type(self.equals):
            return bool(value == self.equals)
        if str(value).casefold() == str(self.equals).casefold() or value == self.equals:
            raise ValueError(
                f"when.equals = {self.equals!r} is {_json_type(self.equals)}, but the column {self.column!r} has "
                f"{shown(value)}, {_json_type(value)}: must be of the same type"
            )
        return False


class Term(Section):
    """One of the sources whose weighted sum is the reward. Kinds derive from `rewards.kind.ExternalTerm` or
    `ModelTerm`."""

    field: ClassVar[str]
    """The field that chooses the kind."""
    recording: ClassVar[Recording]

    weight: float = 1.0
    """0: the source is logged and does not count."""
    when: SourceRoute | None = None
    """The rows that it applies to; it contributes nothing to others."""

    @property
    def name(self) -> str:
        """Its name in metrics, results and errors."""
        return self.field

    @property
    def columns(self) -> dict[str, str]:
        """Field → the column of the dataset that it names."""
        return {} if self.when is None else {"when.column": self.when.column}

    @property
    def roles(self) -> Sequence[str]:
        """The reward models that it needs, among the stage's inputs."""
        return ()

    @property
    def compares(self) -> bool:
        """Whether it compares the replies to one prompt, and so needs several."""
        return False

    def plugs(self) -> tuple[str, ...]:
        """Modules whose code computes its scores: keys of stages digest it."""
        return (type(self).__module__,)

    @classmethod
    def given(cls, function: str | None, models: Sequence[str]) -> Mapping[str, Any] | None:
        """The field for a source that a graph passed directly: the name of a function, or of the roles of reward
        models; None: the kind is not given this way."""
        return None

    @classmethod
    def in_files(cls) -> type[Term] | None:
        """The class that checks it in the file of a lifecycle; None: only a graph can use the kind."""
        return cls

    @classmethod
    def identity(cls, fields: Mapping[str, Any]) -> Any:
        """The key by which equal sources compare equal. `fields`: a term as JSON."""
        return fields[cls.field]


def source_names(terms: Sequence[Term]) -> list[str]:
    """The unique name of each source in metrics, results and errors."""
    names: list[str] = []
    for term in terms:
        name, number = term.name, 1
        while name in names:
            number += 1
            name = f"{term.name}-{number}"
        names.append(name)
    return names

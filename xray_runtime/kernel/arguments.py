"""The arguments of users' functions that score replies, which are called by the names of their parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

REPLIES = ("replies", "completions", "responses")
FIELDS = {"prompts": "prompts", **dict.fromkeys(REPLIES, "replies")}
"""Parameter → field of a batch that it is given: a list with one entry for each reply."""
PARTS = ("reasoning", "answers")
"""The two parts of each reply, which are computed for functions that name them."""
BATCH_FIELDS = {**FIELDS, **{name: name for name in ("messages", "columns", "metadata", *PARTS)}}
"""The same for rewards."""


class Arguments:
    """How a function is called. A parameter that is in `fields`, or is a column of the dataset, is given by its name;
    `*args` gets prompts and replies, `**kwargs` what no parameter takes.

    Args:
        where: name of the function in errors.
        fields: `FIELDS` or `BATCH_FIELDS`.

    Raises:
        ValueError: it takes no replies, or its parameters cannot be known.
    """

    def __init__(self, function: Callable[..., Any], where: str, fields: Mapping[str, str] = BATCH_FIELDS) -> None:
        self._where, self._fields = where, fields
        try:
            self._parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise ValueError(f"{where}: its parameters cannot be read: call it in a function of your own") from None
        names = {parameter.name for parameter in self._named()}
        kinds = {parameter.kind for parameter in self._parameters}
        by_place = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        self._gets_both = inspect.Parameter.VAR_POSITIONAL in kinds and not (kinds & by_place or names & set(FIELDS))
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        if not (self._gets_both or self._takes_all or names & set(REPLIES)):
            given = ", ".join(parameter.name for parameter in self._parameters) or "none"
            raise ValueError(
                f"{where}: must take the replies: name a parameter {', '.join(REPLIES[:-1])} or {REPLIES[-1]}; its "
                f"parameters are {given}, and it is called by their names"
            )

    def check(self, columns: Collection[str] | None) -> None:
        """Raise ValueError if a required parameter is none of the dataset's `columns` (None: not known yet), or one is
        both a field and a column."""
        if columns is None:
            return
        for parameter in self._named():
            if parameter.name in self._fields and parameter.name in columns:
                raise ValueError(
                    f"{self._where}: takes {parameter.name!r}, which is a column of the dataset and a field of the "
                    "batch: take `columns` for the column, or rename it"
                )
            if parameter.default is parameter.empty and parameter.name not in {*self._fields, *columns}:
                raise ValueError(
                    f"{self._where}: takes {parameter.name!r}, which is not a column of the dataset: there are "
                    f"{', '.join(columns) or 'none'}; add it to data.columns, or name it {', '.join(self._fields)}"
                )

    def of(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """(positional, keyword) arguments for a batch: copies, since a function may change what it is given."""
        columns: Mapping[str, Any] = getattr(batch, "columns", {})
        self.check(columns)
        taken = {parameter.name for parameter in self._named()}
        fields = {name: field for name, field in self._fields.items() if name not in PARTS or name in taken}
        offered = {**columns, **{name: getattr(batch, field) for name, field in fields.items()}}
        by_place = [batch.prompts, batch.replies] if self._gets_both else []
        by_name: dict[str, Any] = {}
        for parameter in self._named():
            if parameter.name not in offered:
                # Those that follow in their places would get its value.
                by_place += [parameter.default] if parameter.kind is parameter.POSITIONAL_ONLY else []
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                by_place.append(offered[parameter.name])
            else:
                by_name[parameter.name] = offered[parameter.name]
        if self._takes_all:
            taken = {*by_name, *(FIELDS if self._gets_both else ())}
            taken |= set(REPLIES) if taken & set(REPLIES) else set()
            by_name |= {name: value for name, value in offered.items() if name not in taken}
        return _copied(by_place), _copied(by_name)

    def _named(self) -> list[inspect.Parameter]:
        return [p for p in self._parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _copied(value: Any) -> Any:
    """A copy of plain data, with lists for all sequences of rows; texts are shared."""
    if isinstance(value, Mapping):
        return {key: _copied(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(held) for held in value]
    return value if isinstance(value, str) else copy.deepcopy(value)

"""Config fields that name files, hub repositories and functions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from xray_runtime.kernel.config.allowed_imports import check_import
from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.credentials import has_login, strip_credentials

BUILT_IN_GOLD = "vader"
FUNCTION_NAME = re.compile(r"[^:]+:[^:]+")
"""An import path `module:function`, or the name of a function that a graph passed directly."""


def without_login(source: str) -> str:
    """`source`. Raises ValueError if it contains a login."""
    if has_login(source):
        raise ValueError(f"a login in {strip_credentials(source)!r} is not allowed: the config is recorded and shown")
    return source


def _allowed(path: str) -> str:
    if path != BUILT_IN_GOLD:
        check_import(path)
    return path


Source = Annotated[str, Field(min_length=1), AfterValidator(without_login)]
"""A file, a directory, a name or an address."""
Address = Annotated[str, Field(pattern=r"^https?://[^\s?#]+$"), AfterValidator(without_login)]
"""The address of a server; keys for it come from the environment (`kernel.credentials.API_KEYS`)."""


def _distinct(names: dict[str, str]) -> dict[str, str]:
    twice = next((new for new in names.values() if list(names.values()).count(new) > 1), None)
    if twice is not None:
        raise ValueError(f"two columns would have the name {twice!r}")
    return names


_Name = Annotated[str, Field(min_length=1)]
ColumnNames = Annotated[dict[_Name, _Name], Field(max_length=32), AfterValidator(_distinct)]
"""Name of a column in a source → the name that X-ray reads."""

Function = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"), AfterValidator(_allowed)]
"""`module:function`, in a module that XRAY_ALLOWED_IMPORTS names: `f(prompts, replies) -> scores`."""

Gold = Annotated[str, Field(pattern=r"^(vader|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"), AfterValidator(_allowed)]
"""A `Function`, or `vader`."""


@dataclass(frozen=True)
class BuiltInOrFunction:
    """The annotation of a field that allows one of `names`, an import path `module:function`, or the name of a function
    that a graph passed directly."""

    names: tuple[str, ...]

    def _check(self, value: str) -> str:
        if value in self.names or FUNCTION_NAME.fullmatch(value):
            return value
        raise ValueError(f"{value!r} is not allowed: must be {', '.join(map(repr, self.names))} or 'module:function'")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        function = {"pattern": f"^{FUNCTION_NAME.pattern}$", "type": "string"}
        return {"anyOf": [{"enum": list(self.names), "type": "string"}, function]}


def is_function(value: str) -> bool:
    """Whether a `BuiltInOrFunction` names a function."""
    return ":" in value


GivenGold = Annotated[str, Field(pattern=r"^(vader|[^:]+:[^:]+)$")]
"""A `Gold`, or the name of a function that a graph passed directly."""


class SourceTerms(Section):
    """The terms of use of a source; recorded, without effect on results."""

    license: Annotated[str, Field(min_length=1)] | None = None
    """Its SPDX name, such as `Apache-2.0`. Data in a package has the package's licence by default."""
    origin: Annotated[str, Field(min_length=1)] | None = None
    """Its author and its own sources."""
    personal_data: Annotated[str, Field(min_length=1)] | None = None
    """Personal data in it and the legal ground: `none`, or a sentence."""

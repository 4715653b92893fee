"""Sections of plugs: a field whose type is a registry's section takes the config of any of its plugs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, Union

from pydantic import BaseModel, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.plugs import Registry, able, can, unsupported


class PlugSection(Section):
    """The config of a plug. The class that has a `registry` stands for the config of any of its plugs: as the type of a
    field, and as a function that makes one."""

    registry: ClassVar[Registry[Any]]
    tag: ClassVar[str]
    """The field that names the plug."""
    default: ClassVar[str]
    """The plug where the field is left out."""

    def __new__(cls, *args: object, **fields: object) -> Self:
        chosen: type[Self] = cls
        if "registry" in vars(cls):
            chosen = cls.registry.get(str(fields.get(cls.tag, cls.default))).config
        return super().__new__(chosen)

    @classmethod
    def members(cls) -> list[type[PlugSection]]:
        """The configs of all plugs, or the class itself if it is one."""
        return [cls.registry.get(name).config for name in cls.registry] if "registry" in vars(cls) else [cls]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /) -> CoreSchema:
        if "registry" not in vars(cls):
            return handler(source)
        union: Any = Union[tuple(cls.members())]  # noqa: UP007
        named = BeforeValidator(lambda value: {cls.tag: cls.default, **value} if isinstance(value, dict) else value)
        return handler.generate_schema(Annotated[union, Field(discriminator=cls.tag), named])

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """As validation: the tag may be left out, so that a config may be one of several plugs."""
        schema_of_union = super().__get_pydantic_json_schema__(schema, handler)
        return {"anyOf": schema_of_union["oneOf"]} if "oneOf" in schema_of_union else schema_of_union

    @classmethod
    def lacks(cls, field: str) -> str | None:
        """The line that refuses a field which only other plugs have; None: no plug has it."""
        having = [name for name in cls.registry if field in cls.registry.get(name).config.model_fields]
        return unsupported(field, f"{cls.tag} = {cls.model_fields[cls.tag].default!r}", having) if having else None

    @property
    def name(self) -> str:
        """The plug's name."""
        return str(getattr(self, self.tag))

    def plugs(self) -> tuple[str, ...]:
        return (self.registry.module(self.name),)

    def require(self, capability: str, feature: str, field: str = "", value: object = True, why: str = "") -> None:
        """Raises ValueError unless the plug has the `capability` that `feature`, a field and its value, needs.

        Args:
            field: the path of this section.
            value: where the capability is several things, the one that is needed.
            why: the end of the line.
        """
        if not can(self.registry.get(self.name).capabilities, capability, value):
            where = f"{field}{field and '.'}{self.tag} = {self.name!r}"
            raise ValueError(unsupported(feature, where, able(self.registry, capability, value), why))

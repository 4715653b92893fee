"""Write xray/__init__.pyi, for what is only known at run time: stage kinds, their inputs and fields.

setup.py runs this at installation and for a wheel, `make types` before mypy. A build has few libraries: what would
import Prefect and Ray is read as syntax.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

import xray
from xray_runtime.kernel.config.plug_section import PlugSection
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.sources import BuiltInOrFunction, SourceTerms
from xray_runtime.kernel.graph import kinds
from xray_runtime.kernel.graph.artifacts import RewardModel
from xray_runtime.kernel.graph.kind import StageKind
from xray_runtime.kernel.graph.kind_help import description, tag
from xray_runtime.rewards.config import KINDS, RewardTerm

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "xray" / "__init__.pyi"
HEAD = '''"""Types of `xray` for type checkers and editors. Made from the code: `make stubs`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Required, TypeAlias, TypedDict, TypeVar, overload

from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner

from xray import algorithms as algorithms, data as data, environments as environments, rewards as rewards
'''
REWARD = """
_C = TypeVar("_C")
_I = TypeVar("_I")
_Reward: TypeAlias = Weighable | Callable[..., Any] | _RewardTerm
_Body: TypeAlias = Callable[[Stage[_C, _I], Path, Recorder], int]
"""
WRITTEN = ("workspace", "checkpoint", "register", "reward", "stage_kind", "task_runner", "Result", "Workspace")
"""Names declared in the stub itself: importing them would make users' type checkers read Ray and MLflow."""
KNOWN = {
    *("Any", "Callable", "Handle", "Mapping", "None", "Path", "Result"),
    *("bool", "dict", "float", "int", "list", "str", "tuple"),
}
"""Names that annotations in the stub may use."""
MORE = {"xray_runtime.kernel.config.section": ("RuntimeConfig",), "xray_runtime.kernel.graph.graph": ("Graph",)}
"""Names that the stub needs in addition to those it re-exports."""
GIVEN = ("model", "models", "function")
"""Fields of a reward that are given as its source."""
SHARED = ("generator", "frozen", "gold")
"""Fields that a workspace may give to every stage that has them."""


class Types:
    """Annotations as text, and the sections met in them, each as a TypedDict."""

    def __init__(self) -> None:
        self.sections: dict[str, str] = {}

    def text_of_field(self, field: FieldInfo) -> str:
        """The type of a config field; a field that may name a function also takes the function."""
        text = self.text_of(field.annotation)
        if takes_function(field.annotation, field.metadata):
            text = text.replace("str", "str | Callable[..., Any]", 1)
        return text

    def text_of(self, annotation: Any) -> str:
        """Any annotation."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            text = self.text_of(arguments[0])
            return f"{text} | Callable[..., Any]" if takes_function(arguments[0], arguments[1:]) else text
        if annotation is None or annotation is types.NoneType:
            return "None"
        if origin in (typing.Union, types.UnionType):
            return " | ".join(dict.fromkeys(self.text_of(part) for part in arguments))
        if origin is Literal:
            return f"Literal[{', '.join(map(quoted, arguments))}]"
        if origin is tuple:
            return f"tuple[{', '.join(map(self.text_of, arguments))}] | list[{self.text_of(arguments[0])}]"
        if origin in (list, dict, collections.abc.Mapping, collections.abc.Sequence):
            return f"{origin.__name__}[{', '.join(map(self.text_of, arguments))}]"
        if isinstance(annotation, type) and issubclass(annotation, PlugSection):
            return " | ".join(map(self.section, annotation.members()))
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self.section(annotation)
        return "Any" if annotation is Any else str(annotation.__name__)

    def section(self, section: type[BaseModel]) -> str:
        """The name of a section's TypedDict."""
        name = f"_{section.__name__}"
        if name not in self.sections:
            self.sections[name] = ""  # for a section that contains itself
            lines = [f"class {name}(TypedDict, total=False):"]
            for field, info in section.model_fields.items():
                text = self.text_of_field(info)
                # The discriminator of a union must be given, unless the union has a default.
                is_tag = text.startswith("Literal[") and text.count(",") == 0 and info.default is not None
                is_tag = is_tag and not issubclass(section, PlugSection)
                lines.append(f"    {field}: {f'Required[{text}]' if info.is_required() or is_tag else text}")
            self.sections[name] = "\n".join(lines if len(lines) > 1 else [*lines, "    ..."])
        return name


def takes_function(annotation: Any, metadata: Any) -> bool:
    """Whether a text field names a function and also takes the function, which need not be importable by name."""
    parts = [inner for part in metadata for inner in (part.metadata if isinstance(part, FieldInfo) else [part])]
    checked = [part.func.__name__ for part in parts if isinstance(part, AfterValidator)]
    named = any(":[" in str(getattr(p, "pattern", "")) or isinstance(p, BuiltInOrFunction) for p in parts)
    return annotation is str and named and "_allowed" not in checked


def quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def default(value: Any) -> str:
    return quoted(value) if isinstance(value, bool | int | float | str | None) else "..."


def keywords(section: type[BaseModel], known: Types, without: collections.abc.Collection[str]) -> Iterator[str]:
    """The fields of a section as keyword parameters."""
    for name, field in section.model_fields.items():
        if name not in without:
            text = known.text_of_field(field)
            is_required = field.is_required() and name not in SHARED
            yield f"{name}: {text}" + ("" if is_required else f" = {default(field.default)}")


def function(name: str, parameters: list[str], returns: str, docstring: str, *, is_overload: bool = False) -> str:
    lines = ["@overload"] if is_overload else []
    lines += [f"def {name}(", *(f"    {parameter}," for parameter in parameters), f") -> {returns}:"]
    if not docstring:
        return "\n".join([*lines, "    ..."])
    text = inspect.cleandoc(docstring).replace("\\", "\\\\").splitlines()
    lines += [f'    """{text[0]}', *(f"    {line}".rstrip() for line in text[1:]), '    """']
    return "\n".join(lines)


def kind_functions(kind: StageKind, known: Types) -> Iterator[str]:
    """One function, or an overload for each section that its config may be."""
    inputs = []
    for name, role in kind.roles.items():
        if role.many and issubclass(role.type, RewardModel) and name in kind.all_field_names:
            inputs.append(f"{name}: _Reward | Sequence[_Reward] = ()")
        elif role.many:
            inputs.append(f"{name}: Handle | Sequence[Handle] = ()")
        else:
            inputs.append(f"{name}: Handle | None = None" if role.optional else f"{name}: Handle")
    for number, section in enumerate(kind.sections):
        chosen = tag(kind.config, section)
        without = [*kind.roles, *([chosen[0]] if chosen else [])]
        tag_parameter = []
        if chosen:
            tag_parameter = [f"{chosen[0]}: {known.text_of_field(section.model_fields[chosen[0]])}"]
            tag_parameter[0] += f" = {quoted(chosen[1])}" if number == 0 else ""
        parameters = [*inputs, "*", *tag_parameter, *keywords(section, known, without), "name: str | None = None"]
        yield function(
            kind.name, parameters, "Handle", description(kind, [section]), is_overload=len(kind.sections) > 1
        )


def workspace_function(known: Types) -> str:
    written = syntax("xray/session.py", "workspace")
    typed = {"runtime": f"RuntimeConfig | {known.section(RuntimeConfig)} | None"}
    typed["terms"] = f"Mapping[str, {known.section(SourceTerms)}] | None"
    parameters = [*parameters_of(written, typed.get)]
    fields = [field for kind in shipped() for s in kind.sections for field in s.model_fields.items()]
    for shared in SHARED:
        widest = max((known.text_of_field(info) for field, info in fields if field == shared), key=len)
        parameters.append(f"{shared}: {widest} = ...")
    return function("workspace", parameters, "AbstractContextManager[Graph]", ast.get_docstring(written) or "")


def reward_function(known: Types) -> str:
    from xray_runtime.kernel.graph.handles import reward

    parameters = ["source: Callable[..., Any] | str | Handle | Sequence[Handle] | None = None", "*"]
    fields = dict.fromkeys(field for kind in KINDS.values() for field in keywords(kind, known, GIVEN))
    parameters += [field if " = " in field else f"{field} = ..." for field in fields]
    return function("reward", parameters, "RewardSource", str(reward.__doc__))


def stage_kind_function() -> str:
    parameters = ["name: str", "*", "inputs: type[_I] = ...", "config: Any = ...", "output: type[Artifact] = ..."]
    given = {"name", "inputs", "config", "output", "body"}
    for field in dataclasses.fields(StageKind):
        text = str(field.type)
        known = "Callable[..., Any]" if text.startswith("Callable") else text if text in ("bool", "str") else "Any"
        parameters += [f"{field.name}: {known} = ..."] if field.name not in given else []
    return function("stage_kind", parameters, "Callable[[_Body[_C, _I]], StageKind]", str(xray.stage_kind.__doc__))


def syntax(file: str, name: str) -> typing.Any:
    """The definition of a function or class at the top of a file, which is not imported."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return next(part for part in body if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name)


def parameters_of(written: ast.FunctionDef, typed: Callable[[str, str], str]) -> Iterator[str]:
    """Its parameters; `typed` gives a type for a name and an annotation."""
    arguments = written.args
    required = len(arguments.args) - len(arguments.defaults)
    values = [*[None] * required, *arguments.defaults, *arguments.kw_defaults]
    for number, argument in enumerate([*arguments.args, *arguments.kwonlyargs]):
        if number == len(arguments.args):
            yield "*"
        value = values[number]
        text = f": {typed(argument.arg, ast.unparse(argument.annotation))}" if argument.annotation else ""
        shown = default(value.value) if isinstance(value, ast.Constant) else "..."
        yield argument.arg + text + (f" = {shown}" if value else "")


def declaration(written: ast.FunctionDef) -> str:
    """The declaration of a function."""
    parameters = [*parameters_of(written, lambda _, annotation: known_type(annotation))]
    returns = known_type(ast.unparse(written.returns)) if written.returns else "Any"
    return function(written.name, parameters, returns, ast.get_docstring(written) or "")


def class_declaration(written: ast.ClassDef, bases: str = "") -> str:
    """The fields, public methods and properties of a class that it defines itself."""
    lines = [f"class {written.name}{bases}:"]
    for part in written.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and not part.target.id.startswith("_"):
            lines.append(f"    {part.target.id}: {known_type(ast.unparse(part.annotation))}")
        elif isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            is_property = any(ast.unparse(decorator).endswith("property") for decorator in part.decorator_list)
            lines += ["    @property"] if is_property else []
            lines += [f"    {line}" for line in declaration(part).splitlines()]
    return "\n".join(lines)


def known_type(annotation: str) -> str:
    return annotation if set(re.findall(r"\w+", annotation)) <= KNOWN else "Any"


def shipped() -> list[StageKind]:
    return kinds.shipped()


def stub() -> str:
    """The whole file."""
    known = Types()
    functions = [text for kind in shipped() for text in kind_functions(kind, known)]
    functions += [workspace_function(known), reward_function(known), stage_kind_function()]
    functions += [declaration(syntax("xray/session.py", name)) for name in ("checkpoint", "register")]
    functions.append(class_declaration(syntax("tasks/result.py", "Result")))
    functions.append(class_declaration(syntax("tasks/workspace.py", "Workspace"), "(Graph)"))
    # `flow` takes no runner of another future, though a RayTaskRunner is one.
    runner = ast.get_docstring(syntax("xray/flow_runner.py", "task_runner"))
    functions.append(function("task_runner", [], "TaskRunner[PrefectFuture[Any]]", runner or ""))
    imports = [
        f"from {module} import {', '.join(f'{name} as {name}' for name in sorted(names) if name not in WRITTEN)}"
        for module, names in sorted((*xray._WHERE.items(), *MORE.items()))
        if set(names) - set(WRITTEN)
    ]
    imports.append("from xray_runtime.kernel.graph.handles import RewardSource, Weighable")
    terms = f"_RewardTerm: TypeAlias = {known.text_of(RewardTerm)}"
    parts = [HEAD + "\n".join(imports), REWARD.strip(), *known.sections.values(), terms, *functions]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Write the file."""
    STUB.write_text(stub(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

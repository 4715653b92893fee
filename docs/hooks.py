"""Pages of the site that are made from the code: stage kinds, config, engines, commands, columns; none by hand."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from xray_runtime.kernel.config.plug_section import PlugSection
from xray_runtime.kernel.graph.kind_help import field_help, meanings, role_text, summary, tag

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from xray_runtime.kernel.graph.kind import StageKind
    from xray_runtime.kernel.plugs import Registry

ROOT = Path(__file__).parents[1]
CONFIGS = (
    "xray_runtime.methods.lifecycle:LifecycleConfig",
    "xray.flows.search:SearchConfig",
    "xray_runtime.live.serving.config:RecordingConfig",
    "xray_runtime.live.flywheel:FlywheelConfig",
)
"""The files people write: each with all sections below it."""


def on_startup(command: str, dirty: bool) -> None:
    """Called by MkDocs, before mkdocstrings looks for packages: lay them out as they are installed."""
    found = importlib.util.spec_from_file_location("tree", ROOT / ".ci" / "tree.py")
    assert found is not None
    assert found.loader is not None
    tree = importlib.util.module_from_spec(found)
    found.loader.exec_module(tree)
    tree.assemble()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs: add the pages."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))
    pages: dict[str, Callable[[], str]] = {"kinds.md": kinds_page, "config.md": config_page, "cli.md": cli_page}
    pages |= {"columns.md": columns_page, "engines.md": engines_page}
    for name, page in pages.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Called by MkDocs: write llms.txt (llmstxt.org), the list of pages for programs that read the site."""

    def read(name: str) -> str:
        path = Path(config.docs_dir) / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    text = llms_text(config.site_name, config.site_description or "", config.nav or [], read)
    (Path(config.site_dir) / "llms.txt").write_text(text, encoding="utf-8")


def llms_text(name: str, description: str, nav: Iterable[Mapping[str, Any]], read: Callable[[str], str]) -> str:
    """Pages by section, each with its first sentence."""
    lines, sections = [f"# {name}", "", f"> {description}", ""], list[str]()
    for entry in nav:
        for title, inside in entry.items():
            if isinstance(inside, str):
                lines.append(_listed(title, inside, read))
            else:
                pages = [_listed(t, page, read) for each in inside for t, page in each.items()]
                sections += ["", f"## {title}", "", *pages]
    return "\n".join([*lines, *sections]) + "\n"


def _listed(title: str, page: str, read: Callable[[str], str]) -> str:
    paragraphs = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL).split("\n\n")
    prose = next((p for p in paragraphs if re.match(r"\s*[A-Z*`]", p)), "")
    sentence = re.match(r".*?[.:](?=\s|$)", " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).split()))
    about = f": {sentence[0].rstrip(':')}" if sentence else ""
    return f"- [{title}]({page.removesuffix('.md')}.html){about}"


# Stage kinds


def kinds_page() -> str:
    """Every stage kind that X-ray ships: inputs, output, config fields."""
    from xray_runtime.kernel.graph.kind import KINDS
    from xray_runtime.kernel.graph.kinds import find_kind

    find_kind("")
    lines = [
        "# Stage kinds",
        "",
        "Each is a callable of `xray`: inputs in this order or by name, config fields by name alone. `name=` names the "
        "stage. This page is made from the code.",
    ]
    for kind in KINDS.values():
        lines += ["", f"## xray.{kind.name}", "", *_kind(kind)]
    return "\n".join(lines) + "\n"


def _kind(kind: StageKind) -> Iterator[str]:
    yield summary(kind)
    yield ""
    about = meanings(kind.inputs)
    if kind.roles:
        yield from _table(
            ("Input", "Type", "Meaning"),
            (
                (f"`{name}`", role_text(role, _link(role.type)), about.get(name, ""))
                for name, role in kind.roles.items()
            ),
        )
        yield ""
    yield f"Makes a {_link(kind.output)}."
    for section in kind.sections:
        chosen = tag(kind.config, section)
        yield ""
        yield f'Fields with `{chosen[0]}="{chosen[1]}"`:' if chosen else "Fields:"
        yield ""
        yield from _fields(section)


def _link(artifact: type[Any]) -> str:
    return f"[`{artifact.__name__}`][{artifact.__module__}.{artifact.__qualname__}]"


# Config


def config_page() -> str:
    """Every section of the files that people write."""
    lines = [
        "# Config",
        "",
        "What `xray run CONFIG`, `xray tune --search SEARCH` and `xray serve --record --set` read. Unknown fields are "
        "refused; every mistake is one line with the field, the value and what is allowed. This page is made from the "
        "code.",
    ]
    for section in _all_sections():
        lines += ["", f"## {section.__name__}", "", _doc(section), "", *_fields(section)]
    return "\n".join(lines) + "\n"


def _all_sections() -> list[type[BaseModel]]:
    """The files people write, then every section they hold, then those that only stage kinds hold."""
    from xray_runtime.kernel.graph.kind import KINDS
    from xray_runtime.kernel.graph.kinds import find_kind

    find_kind("")
    found: dict[str, type[BaseModel]] = {}

    def visit(section: type[BaseModel], *, itself: bool) -> None:
        if section.__name__ in found:
            return
        if itself:
            found[section.__name__] = section
        for field in section.model_fields.values():
            for member in _sections_in(field.annotation):
                visit(member, itself=True)

    for path in CONFIGS:
        module, _, name = path.partition(":")
        visit(getattr(importlib.import_module(module), name), itself=True)
    for kind in KINDS.values():
        for section in kind.sections:
            visit(section, itself=False)
    return list(found.values())


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    if isinstance(annotation, type) and issubclass(annotation, PlugSection):
        yield from (member for member in annotation.members() if member is not annotation)
    for part in get_args(annotation):
        yield from _sections_in(part)


def _doc(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split()) if "__doc__" in vars(section) else ""


def _fields(section: type[BaseModel]) -> Iterator[str]:
    yield from _table(
        ("Field", "Allowed", "Default", "Meaning"),
        (
            (f"`{field.name}`", field.allowed, field.default, field.meaning)
            for field in field_help(section, lambda name: f"[{name}](config.md#{name.lower()})")
        ),
    )


# Engines


def engines_page() -> str:
    """The capabilities of every trainer and generator, as tables."""
    from xray_runtime.engines.capabilities import GeneratorCapabilities, TrainerCapabilities
    from xray_runtime.engines.layouts import GENERATORS, TRAINERS

    lines = [
        "# Engines",
        "",
        "What each engine can do; the rest is refused before a run. This page is made from the code.",
    ]
    lines += ["", "## Trainers (`library`)", "", *_capabilities(TRAINERS, TrainerCapabilities)]
    lines += ["", "## Generators (`engine`)", "", *_capabilities(GENERATORS, GeneratorCapabilities)]
    return "\n".join(lines) + "\n"


def _capabilities(registry: Registry[Any], kind: type[Any]) -> Iterator[str]:
    about, names = meanings(kind), list(registry)
    can = {name: registry.get(name).capabilities for name in names}
    yield from _table(
        ("", *(f"`{name}`" for name in names), "Meaning"),
        (
            (
                field.name,
                *(_able(getattr(can[name], field.name)) for name in names),
                about[field.name],
            )
            for field in dataclasses.fields(kind)
        ),
    )


def _able(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "–"
        case Mapping():
            return ", ".join(f"`{name}`: {' or '.join(map(str, allowed))}" for name, allowed in value.items()) or "all"
        case tuple():
            parts = ("+".join(sorted(part)) if isinstance(part, frozenset) else str(part) for part in value)
            return ", ".join(parts) or "–"
    return "yes" if value is not None else "–"


# Commands


def cli_page() -> str:
    """Every command with its options, as `--help` has them."""
    from xray.cli.group import COMMANDS, load

    lines = ["# Commands", "", "As `xray COMMAND --help` says. This page is made from the code."]
    names = sorted(plug.removesuffix("_") for plug in COMMANDS)
    for name, command in (found for top in names for found in _commands(f"xray {top}", load(top))):
        lines += ["", f"## {name}", "", *_command(name, command)]
    return "\n".join(lines) + "\n"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
    for child, below in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {child}", below)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    yield f"`{' '.join([name, *map(_argument, arguments), '[OPTIONS]'])}`"
    yield ""
    yield from (inspect.cleandoc(command.help or "") + "\n").splitlines()
    if arguments or options:
        yield ""
        rows = [(f"`{_argument(p).strip('[]')}`", p.help or "") for p in arguments]
        rows += [(_option(p), p.help or "") for p in options]
        yield from _table(("Option", "Meaning"), rows)


def _argument(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option(option: Any) -> str:
    names = " ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
    return f"`{names}{value}`"


# Columns


def columns_page() -> str:
    """Every column between the steps of an iteration, and every number of an optimizer step."""
    from xray_runtime.data import columns

    about = inspect.cleandoc(columns.__doc__ or "").split("\n\n")
    legend = [f"    {line.strip()}" for line in about[1].splitlines()]
    lines = ["# Columns", "", about[0], "", *legend, "", about[2], "", "This page is made from the code."]
    below = _module_docstrings(columns)
    for name, group in columns.GROUPS.items():
        lines += ["", f"## {name}", "", columns.ABOUT.get(name) or below[id(group)], ""]
        rows = ((f"`{c.name}`", c.shape, c.dtype, c.writer, c.readers, c.meaning) for c in group)
        lines += _table(("Column", "Shape", "dtype", "Written by", "Read by", "Meaning"), rows)
    return "\n".join(lines) + "\n"


def _module_docstrings(module: Any) -> dict[int, str]:
    """id of a constant → the text below it."""
    body = ast.parse(inspect.getsource(module)).body
    found = {}
    for node, text in pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(text, ast.Expr) and isinstance(node.targets[0], ast.Name):
            found[id(getattr(module, node.targets[0].id))] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield f"| {' | '.join(_cell(text) for text in row)} |"


def _cell(text: str) -> str:
    """One line, in which `|` and `<` are what they are; `<` in code is already."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))

"""What is run, planned, explained or searched: a lifecycle's config, or a flow `module:flow` with its parameters."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import load_config, parse_overrides, validate
from xray_runtime.config.paths import put
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.graph.current import planning
from xray_runtime.graph.graph import Graph, OnlyPlannedError


class Subject(BaseModel):
    """A lifecycle's `config`, or a `flow`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: LifecycleConfig | None = None
    flow: str | None = None
    """`module:flow`."""
    parameters: dict[str, Any] = {}
    """Of the flow."""
    fields: dict[str, Any] = {}
    """`STAGE.FIELD` or `runtime.FIELD` → value, in place of what the flow says."""

    @property
    def name(self) -> str:
        return self.config.project if self.config is not None else str(self.flow)

    @property
    def runtime(self) -> RuntimeConfig:
        """Of the config; a flow's workspace says its own."""
        return self.config.runtime if self.config is not None else RuntimeConfig()

    def with_values(self, values: Mapping[str, Any], what: str = "fields.") -> Subject:
        """The same with the values at dotted paths: of the config; of a flow its parameters, and stages' fields.

        Args:
            what: where the paths stand, for error messages.

        Raises:
            ConfigError: a path or a value is not allowed in the config. A flow's are checked as its graph is recorded.
        """
        if self.config is not None:
            data = self.config.model_dump(mode="json")
            for path, value in values.items():
                put(data, path, value, f"{what}{path}")
            return self.model_copy(update={"config": validate(data)})
        known = list(inspect.signature(load_flow(self.name)).parameters) if values else []
        parameters, fields = copy.deepcopy(self.parameters), dict(self.fields)
        for path, value in values.items():
            first, dot, _ = path.partition(".")
            if first in known:
                put(parameters, path, value, f"{what}{path}")
            elif dot:
                fields[path] = value
            else:
                raise ConfigError(
                    f"{what}{path}: is not allowed: must be STAGE.FIELD, runtime.FIELD, or a parameter of the "
                    f"flow, which has {', '.join(known) or 'none'}"
                )
        return self.model_copy(update={"parameters": parameters, "fields": fields})

    def content(self) -> dict[str, Any]:
        """All of it, for digests and records."""
        return self.model_dump(mode="json", exclude_defaults=self.config is None)

    def job(self) -> dict[str, Any]:
        """The fields of a `Job` that say what is run."""
        return self.model_dump(
            mode="json", include={"config"} if self.config is not None else {"flow", "parameters", "fields"}
        )

    def recorded(self) -> Graph:
        """The graph, as far as it can be known before it runs. Raises ConfigError as `recorded_graphs`."""
        if self.config is not None:
            return recorded_graph(self.config)
        graphs, _ = self.recorded_graphs()
        if len(graphs) != 1:
            raise ConfigError(f"{self.flow}: opens {len(graphs)} workspaces; must open one")
        return graphs[0][1]

    def recorded_graphs(self) -> tuple[list[tuple[Path, Graph]], str | None]:
        """(the graph of each workspace that a flow opens with its output directory; the stage whose result it waits
        for, where it does: what it calls after that is not known).

        Raises:
            ConfigError: the flow cannot be imported, or a parameter or a field of a stage is not allowed.
        """
        waits_for = None
        with planning(self.fields) as graphs:
            try:
                self._call()
            except OnlyPlannedError as error:
                waits_for = error.stage
        stages = [name for _, graph in graphs for name in graph.calls]
        for path in self.fields if waits_for is None else ():
            if not any(path.startswith(f"{name}.") for name in (*stages, "runtime")):
                raise ConfigError(f"{path}: is no field of a stage; the stages are {', '.join(stages) or 'none'}")
        return graphs, waits_for

    def run(self, build: Callable[[LifecycleConfig], None]) -> None:
        """Run it: a flow, or with `build` a lifecycle. Raises ConfigError as `recorded_graphs`."""
        if self.config is not None:
            build(self.config)
        else:
            self._call()

    def _call(self) -> None:
        """Call the function itself: in a flow of Prefect's that is at work, or in none."""
        flow = load_flow(self.name)
        function = getattr(flow, "fn", flow)
        hints, parameters = _hints(function), dict(self.parameters)
        for name, value in parameters.items():
            try:
                parameters[name] = TypeAdapter(hints.get(name, Any)).validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Input should be ")
                raise ConfigError(f"{self.flow}: {name}: {value!r} is not allowed: must be {reason}") from None
        try:
            inspect.signature(function).bind(**parameters)
        except TypeError as error:
            raise ConfigError(f"{self.flow}: {error}") from None
        function(**parameters)


def read_subject(target: str, overrides: Sequence[str] = ()) -> Subject:
    """What a command line names: `target`, a YAML file or `module:flow`, with `KEY.PATH=VALUE` overrides.

    Raises:
        ConfigError: there is no such file or flow, or an override is not allowed.
    """
    if not is_flow(target):
        if not Path(target).suffix.startswith(".y") and not Path(target).exists():
            raise ConfigError(f"{target}: no such file; name your own flow as MODULE:FLOW")
        return Subject(config=load_config(target, overrides))
    return Subject(flow=target).with_values(parse_overrides(overrides), "--set ")


def output_name(target: str) -> str:
    """The directory below runs/ where nothing says another."""
    return target.rpartition(":")[2] if is_flow(target) else Path(target).stem


def is_flow(target: str) -> bool:
    """Whether `target` names a flow and no file. Raises ConfigError if it names a Python file."""
    file, _, flow = target.partition(":")
    path = Path(file)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"{file}: no such file")
        module = ".".join(path.with_suffix("").parts)
        raise ConfigError(
            f"{target!r} is not allowed: must be a YAML file or MODULE:FLOW, such as {module}:{flow or _flow_in(path)};"
            f" a script that opens a workspace of its own runs as `python {file}`"
        )
    return ":" in target and not Path(target).exists()


def _flow_in(path: Path) -> str:
    """Name of the first flow in a file; "FLOW" if there is none."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, RecursionError):
        return "FLOW"
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return next((f.name for f in functions if any("flow" in ast.unparse(d) for d in f.decorator_list)), "FLOW")


def _hints(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError:
        # Of names that are imported for type checkers alone nothing can be checked.
        return {}


def add_working_directory() -> None:
    """Find modules in the working directory too: users' flows, functions and environments."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def import_modules(names: Sequence[str]) -> None:
    """Import modules that a command line names, such as those that register stage kinds. Raises ConfigError."""
    add_working_directory()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"--import: {name!r} cannot be imported ({reason})") from error


def load_flow(name: str) -> Any:
    """The flow `module:flow`. Raises ConfigError."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{name!r} is not allowed: must be a YAML file or MODULE:FLOW")
    add_working_directory()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{name!r} cannot be imported ({reason})") from error
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function")
    return found

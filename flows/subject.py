"""The subject of a command such as `xray run`: a lifecycle's config, or a flow `module:flow` with parameters."""

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
from xray_runtime.kernel.config.loading import parse_overrides
from xray_runtime.kernel.config.paths import put
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import Graph, OnlyPlannedError
from xray_runtime.kernel.graph.planning import planning
from xray_runtime.kernel.tracking.registry import own_store
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.loading import load_config, validate


class Subject(BaseModel):
    """A lifecycle's `config`, or a `flow`."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    config: LifecycleConfig | None = None
    flow: str | None = None
    """`module:flow`."""
    parameters: dict[str, Any] = {}
    """The flow's parameters."""
    fields: dict[str, Any] = {}
    """`STAGE.FIELD` or `runtime.FIELD` → value; overrides the flow."""

    @property
    def name(self) -> str:
        return self.config.project if self.config is not None else str(self.flow)

    @property
    def runtime(self) -> RuntimeConfig:
        """The config's runtime; a flow sets its own in its workspace."""
        return self.config.runtime if self.config is not None else RuntimeConfig()

    def with_values(self, values: Mapping[str, Any], what: str = "fields.") -> Subject:
        """The subject with values at dotted paths: fields of the config, or a flow's parameters and its stages' fields.

        Args:
            what: prefix of the paths in error messages.

        Raises:
            ConfigError: a path or a value is not allowed. A flow's values are only checked when its graph is recorded.
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
                    f"{what}{path}: is not allowed: must be STAGE.FIELD, runtime.FIELD, or one of the flow's "
                    f"parameters: {', '.join(known) or 'it has none'}"
                )
        return self.model_copy(update={"parameters": parameters, "fields": fields})

    def content(self) -> dict[str, Any]:
        """All fields, for digests and records."""
        return self.model_dump(mode="json", exclude_defaults=self.config is None)

    def recorded(self) -> Graph:
        """The graph, as far as it is known before it runs. Raises ConfigError like `recorded_graphs`."""
        if self.config is not None:
            return recorded_graph(self.config)
        graphs, _ = self.recorded_graphs()
        if len(graphs) != 1:
            raise ConfigError(f"{self.flow}: opens {len(graphs)} workspaces; must open one")
        return graphs[0][1]

    def recorded_graphs(self) -> tuple[list[tuple[Path, Graph]], str | None]:
        """(output directory and graph of each workspace that a flow opens, the stage whose result the flow waits for,
        if it does; later calls are then unknown).

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
                raise ConfigError(f"{path}: is not a field of a stage; the stages are {', '.join(stages) or 'none'}")
        return graphs, waits_for

    def run(self, build: Callable[[LifecycleConfig], None]) -> None:
        """Run the flow, or the lifecycle with `build`. Raises ConfigError like `recorded_graphs`."""
        if self.config is not None:
            build(self.config)
        else:
            self._call()

    def _call(self) -> None:
        """Call the flow's function directly, inside the current Prefect flow or outside of any."""
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
    """The subject of a command line: `target` is a YAML file or `module:flow`, with `KEY.PATH=VALUE` overrides.

    Raises:
        ConfigError: the file or flow does not exist, or an override is not allowed.
    """
    if not is_flow(target):
        if not Path(target).suffix.startswith(".y") and not Path(target).exists():
            raise ConfigError(f"{target}: no such file; name your own flow as MODULE:FLOW")
        return Subject(config=load_config(target, overrides))
    return Subject(flow=target).with_values(parse_overrides(overrides), "--set ")


def output_directory(target: str, output: Path | None) -> Path:
    """`output`, by default runs/NAME after the target. Raises ConfigError: it is not allowed."""
    name = target.rpartition(":")[2] if is_flow(target) else Path(target).stem
    directory = (output or Path("runs") / name).absolute()
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--output: {str(directory)!r} is not a directory")
    own_store(directory)
    return directory


def is_flow(target: str) -> bool:
    """Whether `target` names a flow, not a file. Raises ConfigError if it names a Python file."""
    file, _, flow = target.partition(":")
    path = Path(file)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"{file}: no such file")
        module = ".".join(path.with_suffix("").parts)
        raise ConfigError(
            f"{target!r} is not allowed: must be a YAML file or MODULE:FLOW, such as {module}:{flow or _flow_in(path)};"
            f" run a script that opens its own workspace with `python {file}`"
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
        # Types that are imported only for type checkers cannot be checked.
        return {}


def add_working_directory() -> None:
    """Add the working directory to the module path, for users' flows, functions and environments."""
    if (directory := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, directory)


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
        flow = getattr(importlib.import_module(module), attribute)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{name!r} cannot be imported ({reason})") from error
    if not callable(flow):
        raise ConfigError(f"{name!r} is not a function")
    return flow

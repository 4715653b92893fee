"""The graph of a lifecycle: stages and their inputs. This module does not run anything.

Calling a stage kind adds a stage and returns a `Handle`, an input for other calls. A `Graph` only records, for plans;
the workspace (`xray.tasks.workspace`) is a graph that runs its stages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

from xray_runtime.kernel.config.allowed_imports import check_import
from xray_runtime.kernel.config.paths import put
from xray_runtime.kernel.config.section import RuntimeConfig, Section, sections
from xray_runtime.kernel.config.validation import CombinationError, ConfigError, hint, validate_as
from xray_runtime.kernel.graph.artifacts import Artifact
from xray_runtime.kernel.graph.binding import Binding, article
from xray_runtime.kernel.graph.current import CURRENT
from xray_runtime.kernel.graph.handles import Handle, RewardSource, reward
from xray_runtime.kernel.graph.kind import KINDS, StageKind
from xray_runtime.kernel.graph.kinds import shipped

STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Stage names are parts of file names."""
MAX_SEED = 2**31
RUNTIME = "runtime."
"""Begins the path of a field of a workspace's runtime, where others begin with a stage."""


class OnlyPlannedError(RuntimeError):
    """The result of a stage that was only recorded."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"{stage}: has no result, because this graph is only planned")
        self.stage = stage


@dataclass(frozen=True)
class StageCall:
    """One stage of a graph before it runs."""

    name: str
    kind: StageKind
    config: Section
    seed: int
    parents: dict[str, Handle]
    """Role → input; a role that takes several has `rewards.0`, `rewards.1`, …"""
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions that were passed as objects, by name: rewards, the gold score, the user's algorithm."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """The graph's runtime, with the GPU shares that `parallel: auto` chose for this stage."""

    def config_json(self) -> dict[str, Any]:
        dumped: dict[str, Any] = self.config.model_dump(mode="json")
        return dumped


class Graph:
    """Stages in the order they were called.

    Args:
        seed: every random choice derives from it.
        defaults: defaults for fields of any stage whose kind has them: generator, frozen, …
        shorten: give every stage a step or two, for the determinism check.
        fields: `STAGE.FIELD` → value, which overrides the stage's call; `runtime.FIELD` overrides `runtime`.

    Raises:
        ConfigError: the seed or a field of the runtime is not allowed, or no kind has a field of a default's name.
    """

    def __init__(
        self,
        seed: int = 0,
        runtime: RuntimeConfig | None = None,
        defaults: Mapping[str, Any] | None = None,
        *,
        shorten: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < MAX_SEED:
            raise ConfigError(f"seed: {seed!r} is not allowed: must be a whole number from 0 to {MAX_SEED - 1}")
        _check_defaults(defaults or {})
        self.defaults, self.shorten, self.fields = dict(defaults or {}), shorten, dict(fields or {})
        self.seed, self.runtime = seed, _with_fields(runtime or RuntimeConfig(), self.fields)
        self.calls: dict[str, StageCall] = {}
        self._handles: dict[str, Handle] = {}

    def __enter__(self) -> Self:
        self._token = CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        CURRENT.reset(self._token)
        return None

    def add(self, kind: StageKind, inputs: Sequence[Any], keywords: Mapping[str, Any], name: str | None) -> Handle:
        """See `StageKind.__call__`."""
        keywords = dict(keywords)
        stage = self._free_name(kind.name) if name is None else name
        if not isinstance(stage, str) or not STAGE_NAME.fullmatch(stage):
            raise ConfigError(f"name: {stage!r} is not allowed: must match {STAGE_NAME.pattern}")
        bound = Binding(self, stage, kind)
        bound.bind(inputs, keywords)
        known = kind.section(keywords, stage).model_fields
        values = {k: v for k, v in self.defaults.items() if k in known and k not in keywords} | keywords | bound.terms
        values = {k: v.model_dump() if isinstance(v, BaseModel) else v for k, v in values.items()}
        for key, value in values.items():
            if callable(value):
                values[key] = bound.add_function(key, reward(value))
            elif isinstance(value, Mapping):
                named = {k: bound.add_function(key, reward(v)) for k, v in value.items() if callable(v)}
                values[key] = {**value, **named}
        for path, value in self.fields.items():
            if path.startswith(f"{stage}."):
                values = copy.deepcopy(values)
                put(values, path.removeprefix(f"{stage}."), value, path)
        config = kind.validated(values, where=stage)
        if self.shorten:
            config = kind.shorten(config)
        try:
            kind.check(config, bound.parents)
            for path, part in sections(config):
                part.check_runtime(self.runtime, path)
                part.check_call(path, bound.functions, bound.columns)
            for function in kind.functions_of(config):
                if function not in bound.functions:
                    check_import(function)
        except ValueError as error:
            raise CombinationError(f"{stage}: {error}") from None
        call = StageCall(stage, kind, config, self.seed, bound.parents, bound.functions, self.runtime)
        call = self.laid_out(call)
        before = self.calls.get(stage)
        if before is not None:
            if before != call:
                raise ConfigError(f"{stage}: two stages have this name; rename one with name=…")
            return self._handles[stage]
        self.calls[stage] = call
        handle = self._handles[stage] = Handle(self, stage, kind.output, call)
        try:
            self.submit(call)
        except BaseException:
            # The stage does not run, so its name is free for another attempt.
            del self.calls[stage], self._handles[stage]
            raise
        return handle

    def require(self, where: str, type: type[Artifact], value: Any) -> Handle:
        """Check that `value` is an input of this type. Raises ConfigError, which begins with `where`."""
        wanted = f"must be {article(type)}"
        if not isinstance(value, Handle):
            shown = value.name if isinstance(value, RewardSource | StageKind) else repr(value)
            raise ConfigError(f"{where}: {shown} is not allowed: {wanted}, the result of a stage")
        if value.graph is not self:
            raise ConfigError(
                f"{where}: {value!r} belongs to another workspace: use its checkpoint, "
                f"xray.checkpoint('DIR#{value.name}')"
            )
        # A plan does not open checkpoints, so their type is unknown.
        if not issubclass(value.output, type) and (value.call is not None or value.output is not Artifact):
            raise ConfigError(f"{where}: {value!r} is not allowed: {wanted}")
        return value

    def _free_name(self, kind: str) -> str:
        name, number = kind, 1
        while name in self.calls:
            number += 1
            name = f"{kind}-{number}"
        return name

    def checkpoint(self, ref: str) -> Handle:
        """An existing checkpoint; a plan does not check its type."""
        return Handle(self, ref, Artifact, None)

    def register(self, policy: Handle, evaluation: Handle | None = None, name: str | None = None) -> None:
        """Register a policy. Does nothing in a plan."""

    def laid_out(self, call: StageCall) -> StageCall:
        """`call` with the layouts that `parallel: auto` chooses. A plan leaves them open.

        Raises:
            ConfigError: the call sets a layout that `auto` chooses, or no layout fits.
        """
        if self.runtime.parallel == "auto":
            for role in call.kind.models(call.config).values():
                role.check_left_open(call.name)
        return call

    def directory_of(self, handle: Handle) -> Path:
        """Directory of an existing checkpoint."""
        return Path(handle.name)

    def submit(self, call: StageCall) -> None:
        """Called once for each stage, in order. Does nothing in a plan."""

    def result_of(self, handle: Handle) -> Any:
        raise OnlyPlannedError(handle.name)


@contextmanager
def recording(seed: int = 0, runtime: RuntimeConfig | None = None, defaults: Any = None) -> Iterator[Graph]:
    """A graph that only records the stages called in the block."""
    with Graph(seed, runtime, defaults) as graph:
        yield graph


def _with_fields(runtime: RuntimeConfig, fields: Mapping[str, Any]) -> RuntimeConfig:
    """`runtime` with the values of `runtime.FIELD`. Raises ConfigError."""
    chosen = {path.removeprefix(RUNTIME): value for path, value in fields.items() if path.startswith(RUNTIME)}
    if not chosen:
        return runtime
    return validate_as(RuntimeConfig, runtime.model_dump(exclude_unset=True) | chosen, where="runtime")


def _check_defaults(defaults: Mapping[str, Any]) -> None:
    shipped()  # registers them
    known = sorted({name for kind in KINDS.values() for name in kind.all_field_names})
    for name in defaults:
        if name not in known:
            raise ConfigError(f"{name}: unknown field{hint(name, known)}: no stage kind has a field of this name")

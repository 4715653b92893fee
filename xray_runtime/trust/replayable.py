"""A published stage that can be computed again, with the arguments of its body."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.data.gold import import_function
from xray_runtime.data.ledger import iterations
from xray_runtime.kernel.config.section import RuntimeConfig, Section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.graph.kind import StageKind, config_of
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.store.checkpoints import inspect
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.methods.common.environment import AgentConfig, environment_of
from xray_runtime.trust.replay_answers import require_answers
from xray_runtime.trust.rollouts import require_ledger

if TYPE_CHECKING:
    from xray_runtime.kernel.store.identity import Identity


@dataclass(frozen=True)
class Replayable:
    """A stage that can be replayed, with the arguments of its body."""

    node: Node
    kind: StageKind
    config: Section
    runtime: RuntimeConfig
    paths: dict[str, Path]
    """Role → checkpoint of each input."""

    @property
    def ledger(self) -> Path:
        return self.node.directory / LEDGER

    def identity(self, memory: Any) -> Identity:
        """The stage's identity today: code and libraries may differ from those that computed it."""
        from xray_runtime.kernel.graph.stage_identity import identify

        manifest = self.node.manifest
        parents = manifest.parents
        found = identify(self.kind, manifest.stage, self.config, manifest.seed, self.runtime, parents, {}, memory)
        return found[0]


def replayable(node: Node, graph: CheckpointGraph, iteration: int | None) -> Replayable:
    """The stage of a checkpoint, ready to replay up to `iteration`, or to its end.

    Raises:
        ConfigError: it has no ledger of that iteration; its kind is unknown; it reads what is not in the store; a
            parent is missing or damaged; a function cannot be imported; or a source of reward might answer differently,
            and its answers are not in the checkpoint.
    """
    manifest, kind = node.manifest, node.kind
    kept = iterations(node.directory / LEDGER) if iteration is None else require_ledger(node, iteration)
    if kind is None:
        raise ConfigError(
            f"REF: {node.name} is not allowed: its stage kind {manifest.kind!r} is unknown here; name the module that "
            "registers it with --import"
        )
    values = {name: value for name, value in manifest.config.items() if name != "runtime"}
    try:
        config = config_of(kind, values)
        runtime = RuntimeConfig(**(manifest.config["runtime"] if kind.computes else {}))
    except (ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise ConfigError(f"REF: {node.name}: this version of X-ray cannot read its config ({reason})") from None
    if outside := ", ".join(name for name in kind.outside_of(config) if not name.startswith("environment.")):
        raise ConfigError(
            f"REF: {node.name} is not allowed: it reads {outside} from outside the store, which has only a digest of it"
        )
    require_answers(node, config, kept, iteration if iteration is not None else max(kept, default=0))
    for role, sha256 in manifest.parents.items():
        parent = graph.nodes.get(sha256)
        if parent is None:
            raise ConfigError(f"REF: {role} {sha256[:12]} of {node.name} is not in the store (`xray fetch`?)")
        damages = inspect(parent.directory, sha256)
        if damages:
            raise ConfigError(f"REF: {role} {parent.name} is not what {node.name} was made from: {damages[0].text}")
    # An agent does not run again: neither its function nor its directory is read.
    played = environment_of(config)
    agent = played.called_functions if isinstance(played, AgentConfig) else ()
    for name in (name for name in kind.functions_of(config) if name not in agent):
        try:
            import_function(name, "function")
        except ValueError as error:
            raise ConfigError(f"REF: {node.name}: {error}") from None
    paths = {role: graph.nodes[sha256].directory.absolute() for role, sha256 in manifest.parents.items()}
    return Replayable(node, kind, config, runtime, paths)

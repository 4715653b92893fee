"""The checkpoint that REF names, whether it follows the champion, and whether it may be served."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import (
    CHAMPION,
    LineageStore,
    champion_of,
    open_lineage_store,
    require_language_model,
    resolve,
)
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.withdrawal import refusal

SETTLE_SECONDS = 20.0
"""Time that a promotion may take between writing its decisions and the aliases."""
FIRST_WAIT_S, LONGEST_WAIT_S = 4.0, 300.0
"""Time between two audits of a rejected champion, which may be repaired; an audit reads all its bytes."""


@dataclass(frozen=True)
class ModelChoice:
    """A checkpoint, and its names in requests."""

    store: LineageStore
    node: Node
    names: tuple[str, ...]
    """Answers contain the first, which names only this checkpoint."""

    @property
    def title(self) -> str:
        """Its displayed name."""
        return self.node.name if self.names[0] in self.node.name else f"{self.names[0]} ({self.node.name})"


def followed(reference: str, output: Path | None) -> str | None:
    """The registered model whose champion `reference` follows; None if it names one checkpoint.

    Raises:
        ConfigError: there is no champion, or several models have one.
    """
    name, _, alias = reference.rpartition("@")
    if alias != CHAMPION:
        return None
    if output is None:
        raise ConfigError(f"REF: {reference!r} needs --output DIR, the directory where it was promoted")
    names = sorted(known for known, decided in view(output).decided if decided == CHAMPION and name in ("", known))
    if not names:
        raise ConfigError(
            f"REF: {reference!r} is not allowed: {output} has no such champion; promote one with `xray promote`"
        )
    if len(names) > 1:
        choices = ", ".join(f"{known}@{CHAMPION}" for known in names)
        raise ConfigError(f"REF: {reference!r} is not allowed: it names {len(names)} models: {choices}")
    return names[0]


def fixed(reference: str, output: Path | None, tracking_uri: str | None) -> ModelChoice:
    """The checkpoint that `reference` names. Raises ConfigError if it is not a language model."""
    store, node = resolve(reference, output, tracking_uri)
    require_language_model(node)
    own = () if Path(reference).exists() else (reference,)
    return ModelChoice(store, node, tuple(dict.fromkeys((node.sha256[:12], node.sha256, node.manifest.stage, *own))))


def champion(name: str, output: Path, tracking_uri: str | None) -> ModelChoice:
    """The champion of `name` by the last signed decision, since MLflow's alias is not signed.

    Raises:
        NotServedError: there is no champion, or it is not in the store.
    """
    store = open_lineage_store(output, tracking_uri)
    decision = champion_of(store, name)
    node = store.graph.nodes.get(decision.checkpoint) if decision is not None else None
    if decision is None or node is None:
        raise NotServedError(f"the champion of {name} is not in {output}")
    names = (f"{name}/{decision.version}", decision.checkpoint, name, f"{name}@{CHAMPION}", CHAMPION)
    return ModelChoice(store, node, names)


def require_sound(choice: ModelChoice, public: Path | None) -> None:
    """Audit the checkpoint and its ancestors.

    Raises:
        NotServedError: the audit finds something, or data that it descends from was withdrawn.
    """
    if (refused := refusal(choice.store, choice.node)) is not None:
        raise NotServedError(refused)
    broken = evidence().audit(choice.store, [choice.node], public)
    if broken:
        raise NotServedError(f"{choice.node.name}: the audit found {'; '.join(broken)}")


def require_splittable(choice: ModelChoice, tensor_parallel: int) -> None:
    """Raise ConfigError if the model's attention heads cannot be split over `tensor_parallel` devices."""
    heads = json.loads((choice.node.directory / "config.json").read_bytes()).get("num_attention_heads", 1)
    if heads % tensor_parallel:
        raise ConfigError(
            f"--tensor-parallel: {tensor_parallel} is not allowed: must divide the model's {heads} attention heads"
        )


class Follower:
    """Detects that another checkpoint becomes champion of `name`, and audits it.

    Args:
        serving: sha256 of the served checkpoint; the caller updates it.
        public: the public key to trust; by default the output directory's.
    """

    def __init__(
        self,
        name: str,
        output: Path,
        tracking_uri: str | None,
        public: Path | None,
        serving: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serving = serving
        self._name, self._output, self._tracking_uri, self._public = name, output, tracking_uri, public
        self._clock = clock
        self._seen: str | None = None
        self._num_withdrawals = 0

    def next_champion(self) -> ModelChoice | None:
        """Another champion with a sound audit, if there is one; repeated after a while until it is served.

        Raises:
            NotServedError: another champion must not be served, or data of the one that is served was withdrawn;
                raised once for each.
        """
        decision = view(self._output).decided.get((self._name, CHAMPION))
        if decision is None or decision.checkpoint == self.serving:
            self._seen = None
            self._require_no_new_withdrawal()
            return None
        now = self._clock()
        if decision.checkpoint != self._seen:
            self._seen, self._since, self._reported = decision.checkpoint, now, False
            self._next, self._wait_s = now, FIRST_WAIT_S
        if now < self._next:
            return None
        self._next, self._wait_s = now + self._wait_s, min(2 * self._wait_s, LONGEST_WAIT_S)
        try:
            choice = champion(self._name, self._output, self._tracking_uri)
            require_sound(choice, self._public)
        except (NotServedError, ConfigError, OSError) as error:
            if self._reported or now - self._since < SETTLE_SECONDS:
                return None
            self._reported = True
            raise NotServedError(str(error)) from error
        return choice

    def _require_no_new_withdrawal(self) -> None:
        if (count := len(view(self._output).state(Withdrawals))) != self._num_withdrawals:
            self._num_withdrawals = count
            choice = champion(self._name, self._output, self._tracking_uri)
            if (refused := refusal(choice.store, choice.node)) is not None:
                raise NotServedError(refused)

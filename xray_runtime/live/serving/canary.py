"""The canary of a served champion: begins, is monitored and ends as the signed log and the records say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.canary import Canary, CanaryEnded
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store, require_language_model
from xray_runtime.live.canary import end, running
from xray_runtime.live.feedback.canary import Monitor
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.canary_metrics import CanaryState
from xray_runtime.live.serving.choice import ModelChoice, require_sound
from xray_runtime.live.serving.replica import ServedModel
from xray_runtime.live.serving.server import ModelServer

CHECK_SECONDS = 5.0


class CanaryFollower:
    """Starts, monitors and ends canaries; call `step` periodically.

    Args:
        name: the registered model whose champion is served.
        load: the settings of a replica of a model.
        records: whether answers are recorded; without that nothing can be compared, and no canary begins.
        public: the public key to trust.
        clock: seconds.
    """

    def __init__(
        self,
        server: ModelServer,
        store: LineageStore,
        name: str,
        load: Callable[[ModelChoice], ServedModel],
        records: bool,
        public: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._output, self._tracking_uri = server, store.output, store.tracking_uri
        self._name, self._load, self._records, self._public, self._clock = name, load, records, public, clock
        self._monitor: Monitor | None = None
        self._passed_over: str | None = None
        self._next_check = 0.0

    def step(self, champion: str) -> str | None:
        """Begin, monitor or end; returns what happened, as a line.

        Args:
            champion: sha256 of the served champion.
        """
        if self._monitor is not None:
            return self._check(self._monitor, champion)
        canary = running(view(self._output), self._name)
        if canary is None or canary.id == self._passed_over:
            return None
        if not self._records:
            self._passed_over = canary.id
            return f"the canary of {canary.began.candidate[:12]} needs --record: it gets no requests here"
        return self._begin(canary, champion)

    def _begin(self, canary: Canary, champion: str) -> str:
        began = canary.began
        monitor = Monitor(open_lineage_store(self._output, self._tracking_uri), canary, self._public)
        decision = monitor.check()
        if decision is None and began.champion != champion:
            decision = monitor.decision("undecided", f"{began.champion[:12]} is no longer the champion")
        if decision is None:
            try:
                self._server.begin_canary(self._load(self._choice(canary)), began.rules.share)
            except (NotServedError, ConfigError, OSError) as error:
                decision = monitor.decision("rolled back", f"it cannot be served ({error})")
        if decision is not None:
            return self._end(monitor, decision)
        self._monitor, self._next_check = monitor, self._clock() + CHECK_SECONDS
        self._server.canary = CanaryState(True, monitor.decision("undecided", "").arms)
        return f"canary: {began.candidate[:12]} answers {began.rules.share:.0%} of users"

    def _choice(self, canary: Canary) -> ModelChoice:
        """The candidate, after its audit. It answers to the champion's names too: clients do not know of it."""
        evidence().sound_view(self._output, self._public)
        store = open_lineage_store(self._output, self._tracking_uri)
        node = store.graph.nodes[canary.began.candidate]
        require_language_model(node)
        names = (node.sha256[:12], node.sha256, self._name, f"{self._name}@champion", "champion")
        choice = ModelChoice(store, node, names)
        require_sound(choice, self._public)
        return choice

    def _check(self, monitor: Monitor, champion: str) -> str | None:
        failure = self._server.candidate_failure
        if failure is not None:
            return self._end(monitor, monitor.decision("rolled back", f"its engine died ({failure})"))
        if monitor.canary.began.champion != champion:
            reason = f"{monitor.canary.began.champion[:12]} is no longer the champion"
            return self._end(monitor, monitor.decision("undecided", reason))
        if self._clock() < self._next_check:
            return None
        self._next_check = self._clock() + CHECK_SECONDS
        decision = monitor.check()
        if decision is not None:
            return self._end(monitor, decision)
        self._server.canary = CanaryState(True, monitor.decision("undecided", "").arms)
        return None

    def _end(self, monitor: Monitor, decision: CanaryEnded) -> str:
        # Requests are rerouted first: they must not wait for the disk.
        self._server.end_canary()
        self._server.canary = CanaryState(False, decision.arms)
        self._monitor, self._passed_over = None, monitor.canary.id
        line = f"canary of {monitor.canary.began.candidate[:12]}: {{}}; the champion answers everyone"
        try:
            written = end(self._output, decision)
        except (OSError, ValueError) as error:
            return line.format(f"{decision.outcome}: {decision.reason}, which cannot be recorded ({error})")
        return line.format(f"{written.outcome}: {written.reason}")

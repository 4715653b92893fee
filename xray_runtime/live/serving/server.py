"""Serves one model on one port, and replaces it with another without losing a request.

Replicas are Ray actors (`replica`) behind HAProxy (`reverse_proxy`). The next model is loaded while the present one
answers; when all its replicas are up, all requests go to it at once, and the old replicas end after their last answer.
A replica that dies or hangs is replaced.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from xray_runtime.kernel.errors import error_summary
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.canary_metrics import CanaryState
from xray_runtime.live.serving.recorder import RecorderHandle
from xray_runtime.live.serving.replica import Replica, ServedModel
from xray_runtime.live.serving.reverse_proxy import CANARY, Address, ReverseProxy

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
DRAIN_SECONDS = 600.0
"""Time for the last answers of a model that was replaced."""
STOP_SECONDS = 60.0
"""Time for the last answers when the command stops."""
END_SECONDS = 10.0
HEALTH_SECONDS = 180.0
"""A replica that does not answer for this long is replaced."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
"""Wait before a replica is replaced: doubled for each replacement in a row."""


class ModelServer:
    """Ray must be up.

    Args:
        num_replicas: of each model.
        log_dir: where HAProxy's log is written.
        recorder: records the answers; `stop` closes it.

    Raises:
        NotServedError: nothing can listen on `host` and `port`.
    """

    def __init__(
        self, host: str, port: int, num_replicas: int, log_dir: Path, recorder: RecorderHandle | None = None
    ) -> None:
        self._num_replicas, self.recorder = num_replicas, recorder
        self.proxy = ReverseProxy(host, port, num_replicas, log_dir / "front.log")
        self._served: _Replicas | None = None
        self._drained: _Replicas | None = None
        """The previous model, while it finishes its answers."""
        self._candidate: _Replicas | None = None
        self.candidate_failure: str | None = None
        """Why the candidate of a canary was taken away; None while it answers."""
        self.canary: CanaryState | None = None
        """The last canary, which replicas show on /metrics."""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def deploy(self, model: ServedModel) -> None:
        """Replace the present model with `model` once that can answer.

        Raises:
            NotServedError: it cannot be loaded; the present one continues.
        """
        with self._loaded(model) as replicas:
            replicas.backend = self.proxy.move(replicas.addresses())
            self._served, self._drained = replicas, self._served
            self._drained_until = time.monotonic() + DRAIN_SECONDS

    def begin_canary(self, model: ServedModel, share: float) -> None:
        """Let `model` answer this share of the users, beside the present one. The first replica of it that dies ends
        that, and `candidate_failure` says so.

        Raises:
            NotServedError: it cannot be loaded.
        """
        with self._loaded(model) as replicas:
            self.proxy.begin_canary(model.sha256, replicas.addresses(), share)
            replicas.backend, self.candidate_failure, self._candidate = CANARY, None, replicas

    @contextmanager
    def _loaded(self, model: ServedModel) -> Iterator[_Replicas]:
        """Replicas of `model` that can answer, for the proxy to use, under the lock; they end if that fails."""
        # There is memory for two models, not for three.
        while self._drained is not None:
            time.sleep(WATCH_SECONDS)
        replicas = _Replicas(self.proxy, [_Lifetime(model, self) for _ in range(self._num_replicas)])
        try:
            while not replicas.all_up():
                time.sleep(WATCH_SECONDS)
            with self._lock:
                self.proxy.restart_if_dead()
                yield replicas
        except BaseException:
            replicas.end()
            raise

    def end_canary(self) -> None:
        """Send all later requests to the champion; the candidate finishes what it has begun."""
        with self._lock:
            if self._candidate is not None:
                self.proxy.end_canary()
                self._drained, self._candidate = self._candidate, None
                self._drained_until = time.monotonic() + DRAIN_SECONDS

    def stop(self) -> None:
        """Accept no more requests, and finish those under way within STOP_SECONDS."""
        self._ended.set()
        self._watching.join()
        self.proxy.stop(STOP_SECONDS)
        for replicas in (self._served, self._candidate, self._drained):
            if replicas is not None:
                replicas.end()
        if self.recorder is not None and not self.recorder.close():
            log.warning("recording: the last answers could not be written")

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            try:
                with self._lock:
                    self._check()
            except Exception:
                log.exception("serving continues, and this is tried again")

    def _check(self) -> None:
        if self.proxy.restart_if_dead():
            log.warning("HAProxy stopped; it was restarted")
        if self._served is not None:
            self._served.replace_dead()
        if self._candidate is not None:
            try:
                self._candidate.all_up()
            except NotServedError as error:
                self.candidate_failure = str(error)
                self.proxy.end_canary()
                self._candidate.end()
                self._candidate = None
        drained = self._drained
        if drained is not None:
            assert drained.backend is not None
            if self.proxy.num_requests(drained.backend) == 0 or time.monotonic() > self._drained_until:
                drained.end()
                self._drained = None


class _Replicas:
    """The replicas of one model."""

    def __init__(self, proxy: ReverseProxy, replicas: list[_Lifetime]) -> None:
        self.backend: str | None = None
        """Their back end, once they get requests."""
        self._proxy, self._replicas = proxy, replicas

    def all_up(self) -> bool:
        """Whether all can answer. Raises NotServedError if one cannot be loaded."""
        for replica in self._replicas:
            replica.poll()
        return all(replica.address is not None for replica in self._replicas)

    def addresses(self) -> list[Address]:
        """Addresses of the replicas that are up."""
        return [replica.address for replica in self._replicas if replica.address is not None]

    def replace_dead(self) -> None:
        """Replace those that died, and tell HAProxy their addresses."""
        assert self.backend is not None
        for number, replica in enumerate(self._replicas):
            try:
                replica.poll()
            except NotServedError as error:
                log.warning("a replica is replaced: %s", error)
                replica.end()
            self._proxy.enter(self.backend, number, replica.address)

    def end(self) -> None:
        for replica in self._replicas:
            replica.end()


class _Lifetime:
    """One replica, or its replacement.

    Attributes:
        address: where it listens; None while it loads.
    """

    def __init__(self, model: ServedModel, server: ModelServer) -> None:
        self._model, self._server, self._wait_s = model, server, FIRST_WAIT_S
        self._start()

    def _start(self) -> None:
        model = self._model
        options: dict[str, Any] = {"num_cpus": model.runtime.cpus_per_workhorse * model.tensor_parallel}
        if model.device == "cuda":
            # Ray cannot give parts of several GPUs.
            is_split = model.tensor_parallel > 1
            options["num_gpus"] = model.tensor_parallel if is_split else model.runtime.gpu_memory_fraction
        node, server = ray.get_runtime_context().get_node_id(), self._server
        self.address: Address | None = None
        self._actor = ray.remote(Replica).options(**options).remote(model, server.proxy.secret, node, server.recorder)
        self._placed = False
        self._ask(self._actor.__ray_ready__.remote(), model.runtime.wait_timeout_s)

    def _ask(self, call: Any, limit_s: float) -> None:
        self._call, self._deadline = call, time.monotonic() + limit_s

    def poll(self) -> None:
        """Continue if the last call was answered, or replace a replica that ended.

        Raises:
            NotServedError: it died, hangs, or no device is free for it.
        """
        late = time.monotonic() > self._deadline
        if self._actor is None:
            if late:
                self._start()
        elif ray.wait([self._call], timeout=0)[0]:
            self._go_on()
        elif late:
            raise NotServedError("it does not answer" if self._placed else "the cluster has no free devices for it")

    def _go_on(self) -> None:
        try:
            answer = ray.get(self._call)
        except ray.exceptions.RayError as error:
            raise NotServedError(error_summary(error)) from error
        if not self._placed:
            # Loading has no time limit.
            self._placed = True
            self._ask(self._actor.start.remote(), math.inf)
            return
        if self.address is None:
            self.address = answer
        else:
            self._wait_s = FIRST_WAIT_S
        self._ask(self._actor.check.remote(self._server.canary), HEALTH_SECONDS)

    def end(self) -> None:
        """End it; `poll` replaces it after a while."""
        if self._actor is None:
            return
        if self._placed:
            # The engine is a separate process, which does not listen while it loads.
            ray.wait([self._actor.stop.remote()], timeout=END_SECONDS if self.address else 0)
        ray.kill(self._actor)
        self._actor = self.address = None
        self._deadline = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

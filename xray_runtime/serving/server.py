"""A model behind one port, and another in its place without a request lost.

Replicas are Ray actors (`replica`), HAProxy is in front of them (`front`). Another model is loaded beside the one that
answers; when all its replicas are up, all requests go to it at once, and the old ones end with their last answer. A
replica that dies or hangs is replaced.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import ray

from xray_runtime.errors import error_summary
from xray_runtime.serving import NotServedError
from xray_runtime.serving.replica import Replica, ServedModel
from xray_runtime.serving.reverse_proxy import Address, ReverseProxy

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
DRAIN_SECONDS = 600.0
"""What the last answers of a model that was replaced may take."""
STOP_SECONDS = 60.0
"""What the last answers may take when the command is told to stop."""
END_SECONDS = 10.0
HEALTH_SECONDS = 180.0
"""A replica that says nothing for so long is replaced."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
"""Before a replica is replaced, and the one that replaced it, and so on."""


class Server:
    """Ray must be up.

    Args:
        num_replicas: of each model.
        log_dir: where HAProxy's log is written.

    Raises:
        NotServedError: nothing can listen on `host` and `port`.
    """

    def __init__(self, host: str, port: int, num_replicas: int, log_dir: Path) -> None:
        self._num_replicas = num_replicas
        self._front = ReverseProxy(host, port, num_replicas, log_dir / "front.log")
        self._served: _Replicas | None = None
        self._drained: _Replicas | None = None
        """The model before, while it finishes what it has begun."""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def deploy(self, model: ServedModel) -> None:
        """Serve `model`, in place of the one before, which goes on answering until this one can.

        Raises:
            NotServedError: it cannot be loaded; the one before goes on.
        """
        # Memory is for two models, not for three.
        while self._drained is not None:
            time.sleep(WATCH_SECONDS)
        replicas = _Replicas(model, self._num_replicas, self._front)
        try:
            while not replicas.all_up():
                time.sleep(WATCH_SECONDS)
            with self._lock:
                self._front.restart_if_dead()
                replicas.backend = self._front.move(replicas.addresses())
                self._served, self._drained = replicas, self._served
                self._drained_until = time.monotonic() + DRAIN_SECONDS
        except BaseException:
            replicas.end()
            raise

    def stop(self) -> None:
        """Take no more requests, and finish those at hand (within a minute)."""
        self._ended.set()
        self._watching.join()
        self._front.stop(STOP_SECONDS)
        for replicas in (self._served, self._drained):
            if replicas is not None:
                replicas.end()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            try:
                with self._lock:
                    self._tend()
            except Exception:
                log.exception("serving goes on, and this will be tried again")

    def _tend(self) -> None:
        if self._front.restart_if_dead():
            log.warning("HAProxy stopped; it was restarted")
        if self._served is not None:
            self._served.tend()
        drained = self._drained
        if drained is not None:
            assert drained.backend is not None
            if self._front.num_requests(drained.backend) == 0 or time.monotonic() > self._drained_until:
                drained.end()
                self._drained = None


class _Replicas:
    """Those of one model."""

    def __init__(self, model: ServedModel, num_replicas: int, front: ReverseProxy) -> None:
        self.backend: str | None = None
        """Where the front has them, once they are asked."""
        self._front = front
        self._replicas = [_Life(model, front.secret) for _ in range(num_replicas)]

    def all_up(self) -> bool:
        """Raises NotServedError where one of them cannot be loaded."""
        for replica in self._replicas:
            replica.poll()
        return all(replica.address is not None for replica in self._replicas)

    def addresses(self) -> list[Address]:
        """Of those that are up."""
        return [replica.address for replica in self._replicas if replica.address is not None]

    def tend(self) -> None:
        """Replace those that died, and tell the front where they are."""
        assert self.backend is not None
        for number, replica in enumerate(self._replicas):
            try:
                replica.poll()
            except NotServedError as error:
                log.warning("a replica is replaced: %s", error)
                replica.end()
            self._front.enter(self.backend, number, replica.address)

    def end(self) -> None:
        """All at once."""
        for replica in self._replicas:
            replica.end()


class _Life:
    """One replica, and after it the one that takes its place.

    Attributes:
        address: where it listens; None while it loads.
    """

    def __init__(self, model: ServedModel, secret: str) -> None:
        self._model, self._secret, self._wait_s = model, secret, FIRST_WAIT_S
        self._start()

    def _start(self) -> None:
        model = self._model
        options: dict[str, Any] = {"num_cpus": model.runtime.cpus_per_workhorse * model.tensor_parallel}
        if model.device == "cuda":
            # Of several GPUs Ray gives no parts.
            whole = model.tensor_parallel > 1
            options["num_gpus"] = model.tensor_parallel if whole else model.runtime.gpu_memory_fraction
        node = ray.get_runtime_context().get_node_id()
        self.address: Address | None = None
        self._actor = ray.remote(Replica).options(**options).remote(model, self._secret, node)
        self._placed = False
        self._ask(self._actor.__ray_ready__.remote(), model.runtime.wait_timeout_s)

    def _ask(self, call: Any, limit_s: float) -> None:
        self._call, self._deadline = call, time.monotonic() + limit_s

    def poll(self) -> None:
        """Go on where the last call was answered, or it is time to replace one that ended.

        Raises:
            NotServedError: it died, hangs, or there is no room for it.
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
            # Loading takes as long as it takes.
            self._placed = True
            self._ask(self._actor.start.remote(), math.inf)
            return
        if self.address is None:
            self.address = answer
        else:
            self._wait_s = FIRST_WAIT_S
        self._ask(self._actor.check.remote(), HEALTH_SECONDS)

    def end(self) -> None:
        """End it; if it is polled again, another takes its place after a while."""
        if self._actor is None:
            return
        if self._placed:
            # The engine is a process of its own. One that loads does not listen.
            ray.wait([self._actor.stop.remote()], timeout=END_SECONDS if self.address else 0)
        ray.kill(self._actor)
        self._actor = self.address = None
        self._deadline = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

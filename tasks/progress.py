"""Progress of a stage: immediately at the terminal, at intervals in the log and on Prefect's page."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from xray.tasks.prefect_run import show
from xray_runtime.cluster.progress import find_progress
from xray_runtime.kernel.errors import StageInterruptedError

if TYPE_CHECKING:
    from xray.tasks.spec import StageResult

log = logging.getLogger(__name__)

PAGE_SECONDS = 10.0
LOG_SECONDS = 30.0


class StageProgress:
    """Reports progress to the run's progress actor, to the log, and to the stage's artifact on Prefect's page.

    The actor's answer says whether the run was asked to stop; then `on_stop` is called.
    """

    def __init__(self, stage: str, run_id: str) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        self._actor = find_progress(run_id)
        self._stage = stage
        self._answer: Any = None
        self._shown, self._logged = -PAGE_SECONDS, -LOG_SECONDS
        self._note = ""
        self._stopped = False

    def __call__(self, name: str, done: int, total: int, unit: str, note: str) -> None:
        if self._actor is not None:
            self._report(self._actor, name, done, total, unit, note)
        now = time.monotonic()
        if not total:
            if note != self._note:
                log.info("%s: %s", self._stage, note)
            self._note = note
            return
        text = f"{done}/{total} {unit} {note}".rstrip()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.info("%s: %s", self._stage, text)
        if now - self._shown >= PAGE_SECONDS:
            self._shown = now
            self._show(text, text)

    def ended(self, result: StageResult, headline: str, page: str) -> None:
        """Log that the stage has ended, and show `page` (Markdown) in place of its progress."""
        log.info("%s: done in %.0f s%s", self._stage, result.seconds, f", {headline}" if headline else "")
        self._show(headline or "done", page)

    def cached(self) -> None:
        """Log that the stage came from the store."""
        log.info("%s: found in the store, nothing was computed", self._stage)

    def _show(self, title: str, text: str) -> None:
        try:
            show(artifact_key(self._stage), title, text)
        except Exception:
            # The page is out of date for a while; the training continues.
            log.warning("Prefect refused the progress", exc_info=True)

    def raise_if_stopped(self) -> None:
        """Raises StageInterruptedError if the run was asked to stop."""
        if self._stopped:
            raise StageInterruptedError(f"{self._stage}: stopped while waiting")

    def _report(self, actor: Any, *progress: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            if self._answer is not None and ray.wait([self._answer], timeout=0)[0] and ray.get(self._answer):
                self._stopped = True
                self.on_stop()
            self._answer = actor.report.remote(*progress)


def artifact_key(stage: str) -> str:
    """A stage's name as a key of artifacts: lower-case letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in stage.lower())

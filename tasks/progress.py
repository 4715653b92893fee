"""What a stage shows while it works: to the terminal at once, on Prefect's page now and then."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact

from xray.tasks.summary import Series, stage_markdown
from xray_runtime.errors import StageInterruptedError
from xray_runtime.progress import find_progress

if TYPE_CHECKING:
    from xray.tasks.spec import StageResult
    from xray_runtime.stages.kind import StageKind

log = logging.getLogger(__name__)

ARTIFACT_SECONDS = 10.0


class StageProgress:
    """Reports to the run's progress actor at once and to Prefect's page every ARTIFACT_SECONDS.

    The actor's answer says whether the run was asked to stop; then `on_stop` is called.
    """

    def __init__(self, stage: str, run_id: str) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        self._actor = find_progress(run_id)
        self._stage = stage
        self._answer: Any = None
        self._artifact: Any = None
        self._sent = 0.0
        self._stopped = False

    def __call__(self, name: str, done: int, total: int, unit: str, note: str) -> None:
        if self._actor is not None:
            self._report(self._actor, name, done, total, unit, note)
        now = time.monotonic()
        if not total or (now - self._sent < ARTIFACT_SECONDS and done != total):
            return
        self._sent = now
        percent, text = 100.0 * done / total, f"{self._stage}: {done}/{total} {unit} {note}"
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(
                    percent, key=f"xray-{artifact_key(self._stage)}", description=text
                )
            else:
                update_progress_artifact(self._artifact, percent, description=text)
        except Exception:
            # Somebody's page stands still for a while; the training does not.
            log.warning("Prefect did not take the progress", exc_info=True)

    def raise_if_stopped(self) -> None:
        """Raises StageInterruptedError where the run was asked to stop."""
        if self._stopped:
            raise StageInterruptedError(f"{self._stage}: stopped while waiting")

    def _report(self, actor: Any, *progress: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            if self._answer is not None and ray.wait([self._answer], timeout=0)[0] and ray.get(self._answer):
                self._stopped = True
                self.on_stop()
            self._answer = actor.report.remote(*progress)


def publish_summary(kind: StageKind, result: StageResult, series: Series, page: str | None, image: str | None) -> None:
    """What a stage made, as an artifact on its page."""
    text = stage_markdown(kind, result, series, page, image)
    try:
        create_markdown_artifact(
            text, key=f"xray-{artifact_key(result.name)}-summary", description=f"Results of {result.name}."
        )
    except Exception:
        # The stage is done and recorded, whatever becomes of its page.
        log.warning("Prefect did not take the summary", exc_info=True)


def artifact_key(stage: str) -> str:
    """A stage as keys of artifacts call it: they hold small letters, digits and dashes alone."""
    return "".join(c if c.isalnum() else "-" for c in stage.lower())

"""Close the records of lost runs, whose process was killed or lost its Ray.

`python -m xray.tasks.lost_runs OUTPUT [FILE]` does so in the output directory OUTPUT, and in those that FILE lists, one
per line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import Timeout

from xray_runtime.kernel.evidence.log import LIFECYCLE, read_run, view
from xray_runtime.kernel.evidence.view import run_lock

log = logging.getLogger(__name__)


def command_to_close(output: Path, *listed: Path) -> list[str]:
    """The command line above, for a process that outlives the run. `listed`: FILE."""
    return [sys.executable, "-m", "xray.tasks.lost_runs", str(output), *map(str, listed)]


def outputs_in(listed: Path) -> list[Path]:
    """The output directories that the file `listed` names."""
    return [Path(line) for line in listed.read_text(encoding="utf-8").splitlines()] if listed.exists() else []


def close_lost_runs(outputs: Iterable[Path]) -> None:
    """Mark runs failed that are recorded as running in `outputs` and have no process: in lifecycle.json, in MLflow and,
    if PREFECT_API_URL is set, in Prefect."""
    for output in set(outputs):
        for path in (output / LIFECYCLE, *output.glob(f"searches/*/trials/*/{LIFECYCLE}")):
            content = _running(path)
            if content is None:
                continue
            with contextlib.suppress(Timeout), run_lock(output, content["run_id"]).acquire(timeout=0):
                content = _running(path)
                if content is not None:
                    _close(output, path, content)


def _running(path: Path) -> dict[str, Any] | None:
    """The lifecycle.json at `path` if it says that the run is running, else None."""
    content = read_run(path.parent)
    return content if content.get("status") == "running" and content.get("run_id") else None


def _close(output: Path, path: Path, content: dict[str, Any]) -> None:
    from xray.tasks.prefect_run import crash_lost_flow_run
    from xray.tasks.run_summary import end_record
    from xray_runtime.kernel.config.validation import ConfigError
    from xray_runtime.kernel.credentials import tracking_address
    from xray_runtime.kernel.history.evidence import evidence
    from xray_runtime.kernel.tracking.mlflow_tracker import abandon_run
    from xray_runtime.kernel.tracking.registry import LOG_TAG, own_store

    # Edits of its record by somebody else are not signed.
    sealed = evidence().seal(output).read_sealed(path)
    facts = json.loads(sealed) if sealed is not None else _from_log(output, content["run_id"])
    if facts is None:
        log.warning("%s: no run of the signed log wrote it; it is left as it is", path)
        return
    try:
        # Nobody waits here for an agent that is gone.
        evidence().require_signer()
        end_record(output, path, json.dumps(facts | {"status": "failed"}, indent=2))
    except (ConfigError, OSError) as error:
        # The run's own error counts. The next run of this lifecycle ends this one.
        log.error("%s: the end of the run is not signed: %s", path, error)
        return
    try:
        tags = {LOG_TAG: view(output).mark}
        abandon_run(tracking_address() or own_store(output), content["run_id"], tags)
        if os.environ.get("PREFECT_API_URL"):
            crash_lost_flow_run(facts["flow_run_id"], None)
    except Exception:
        # The run's own servers may be gone. The next run of this lifecycle updates them.
        log.info("the servers do not know that run %s was lost", content["run_id"], exc_info=True)


def _from_log(output: Path, run_id: str) -> dict[str, Any] | None:
    """The facts of a run that the signed log has; None without such a run."""
    from xray_runtime.kernel.history.evidence import evidence

    began = evidence().trusted_view(output).runs.get(run_id)
    if began is None:
        return None
    return {"run_id": run_id, "flow_run_id": None, "seconds": 0.0, "stages": [], **began.facts}


if __name__ == "__main__":
    close_lost_runs([Path(sys.argv[1]), *(output for file in sys.argv[2:] for output in outputs_in(Path(file)))])

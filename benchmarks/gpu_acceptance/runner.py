"""Each step in a process of its own, with its own limit; a step that fails, hangs or dies does not stop the others."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_acceptance.setting import Setting
from benchmarks.gpu_acceptance.steps import AcceptanceStep
from benchmarks.machine import table
from benchmarks.ranks import PRELOAD
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.processes import redirect_output

Record = dict[str, Any]
"""`step`, `status` (passed, failed, skipped), `seconds`, `limit_s`, `reason` (unless it passed), `figures`."""
LOG_TAIL_CHARS = 300


def run_all(steps: Sequence[AcceptanceStep], setting: Setting, deadline: float) -> list[Record]:
    """The record of each step, in order; each is printed and appended to `records.jsonl` at once.

    Args:
        deadline: `time.monotonic()` after which no step starts.
    """
    # CUDA does not survive a fork of a process that has looked for it; on a CPU a fork spares imports.
    context: Any = multiprocessing.get_context("forkserver" if setting.device == "cpu" else "spawn")
    if setting.device == "cpu":
        context.set_forkserver_preload([*PRELOAD, __name__])
    records = []
    for step in steps:
        start, limit_s = time.monotonic(), step.limit_s * load()
        if start < deadline:
            record = _in_process(context, step, setting, limit_s)
        else:
            record = {"status": "skipped", "reason": "no time left"}
        record = {"step": step.name, "seconds": round(time.monotonic() - start, 1), "limit_s": limit_s, **record}
        line = json.dumps(record)
        print(line, flush=True)
        with (setting.folder / "records.jsonl").open("a") as file:
            file.write(f"{line}\n")
        records.append(record)
    return records


def _in_process(context: Any, step: AcceptanceStep, setting: Setting, limit_s: float) -> Record:
    """Status, reason and figures of a step."""
    ours, theirs = context.Pipe()
    log = setting.folder / "logs" / f"{step.name}.log"
    log.touch()
    process = context.Process(target=_work, args=(theirs, step, setting))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return {"status": "failed", "reason": f"took more than its {limit_s:.0f} s"}
        found: Record = ours.recv()
        return found
    except EOFError:
        process.join()
        tail = log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return {"status": "failed", "reason": f"ended with exit code {process.exitcode}: {tail}"}
    finally:
        # Its session too: the ranks that it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _work(connection: Any, step: AcceptanceStep, setting: Setting) -> None:
    os.setsid()
    redirect_output(setting.folder / "logs" / f"{step.name}.log")
    reason = step.skip_reason(setting)
    try:
        if reason is None:
            connection.send({"status": "passed", "figures": step.run(setting)})
        else:
            connection.send({"status": "skipped", "reason": reason})
    except Exception as error:
        traceback.print_exc()
        connection.send({"status": "failed", "reason": _reason(error)})
    # Threads of libraries may still wait for peers that are gone.
    os._exit(0)


def _reason(error: Exception) -> str:
    """The error in one line: the last of its text, which is where other processes' tracebacks have theirs."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"


def summary(records: Sequence[Record]) -> None:
    """Print what came out, with the figures that are numbers."""
    rows = []
    for record in records:
        figures = record.get("figures", {})
        shown = [f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, int | float)]
        rows.append([record["step"], record["status"], record["seconds"], record.get("reason") or ", ".join(shown)])
    table(["step", "status", "seconds", "figures, or the reason"], rows)


def is_passed(records: Sequence[Record]) -> bool:
    return all(record["status"] != "failed" for record in records)

"""Continue a stage that runs out of memory with smaller micro-batches."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.errors import StageOutOfMemoryError, error_summary, is_out_of_memory

if TYPE_CHECKING:
    from xray_runtime.tracking.recorder import StageRecorder

log = logging.getLogger(__name__)

MAX_DIVISOR = 64


def run_in_memory(
    name: str, runtime: RuntimeConfig, built: Path, recorder: StageRecorder, body: Callable[[RuntimeConfig], int]
) -> int:
    """Run a stage's body; after running out of memory, repeat it from the last snapshot with smaller micro-batches.

    Args:
        built: directory that the body writes into; it is emptied before another attempt.

    Raises:
        StageOutOfMemoryError: `runtime.on_out_of_memory` is "fail", or micro-batches cannot get smaller.
    """
    while True:
        try:
            return body(runtime)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            divisor, reason = runtime.micro_batch_divisor * 2, error_summary(error)
            if runtime.on_out_of_memory == "fail" or divisor > MAX_DIVISOR:
                raise StageOutOfMemoryError(
                    f"{name}: out of memory ({reason}); lower engine.micro_batch_tokens, or raise "
                    f"runtime.micro_batch_divisor (now {runtime.micro_batch_divisor})"
                ) from error
            log.warning("%s: out of memory (%s); continuing with micro-batches 1/%d as large", name, reason, divisor)
            runtime = runtime.model_copy(update={"micro_batch_divisor": divisor})
            for left in built.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            recorder.begin()

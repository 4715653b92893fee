"""A process that checks replies, one a line: `python -m xray_runtime.rewards.worker`.

Each input line is [name of a check, its arguments], each output line {"score": number} or {"error": why}. The first
output line is {"ready": true}.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable

from xray_runtime.rewards import checks

CHECKS: dict[str, Callable[..., float]] = {
    "math": checks.math,
    "regex": checks.regex,
    "json_schema": checks.json_schema,
}


def main() -> None:
    logging.disable()
    # Keep output of libraries apart from the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: object) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    say({"ready": True})
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            say({"score": CHECKS[name](*arguments)})
        except (RecursionError, MemoryError, ArithmeticError):
            # The reply exceeds the limits of the process.
            say({"score": 0.0})
        except Exception as error:  # of the column's value, or of a library
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()

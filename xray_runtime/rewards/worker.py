"""A process that checks replies, one a line: `python -m xray_runtime.rewards.worker`.

Each input line is [function of `checks`, its arguments], each output line {"score": number} or {"error": why}; for
NAME_gold, which check a column's value, {"refused": why, or null}. The first output line is {"ready": true}.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from xray_runtime.rewards import checks


def answer(name: str, arguments: list[Any]) -> dict[str, Any]:
    """The result of a check, as the module says."""
    check, is_gold = getattr(checks, name), name.endswith("_gold")
    try:
        return {"refused" if is_gold else "score": check(*arguments)}
    except (RecursionError, MemoryError, ArithmeticError):
        # The reply, or the value, exceeds the limits of the process.
        return {"refused": "is too large"} if is_gold else {"score": 0.0}
    except ValueError as error:
        return {"refused": str(error)} if is_gold else {"error": f"ValueError: {error}"}
    except Exception as error:  # of a library
        return {"error": f"{type(error).__name__}: {error}"}


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
        say(answer(name, arguments))


if __name__ == "__main__":
    main()

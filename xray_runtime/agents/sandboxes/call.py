"""The program that calls an agent's function in a sandbox: `python -c SOURCE module:function`.

It is passed as text, since a sandbox may be on another machine, with a Python that has nothing of ours. The module is
imported from the working directory or the packages of that Python. The task is JSON on standard input, and the result
becomes the one line of standard output: what the function prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

USES: tuple[str, ...] = ()
"""It imports an agent's function alone, in a sandbox, where this package is not."""


def main() -> None:
    results = os.dup(1)
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    result = called(getattr(importlib.import_module(module), name), json.load(sys.stdin))
    with os.fdopen(results, "w") as file:
        print(result, file=file)


def called(function: Callable[[dict[str, Any]], Any], task: dict[str, Any]) -> str:
    """The result of an agent's function, which may be async, as JSON."""
    result = function(task)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    # numpy's and torch's numbers are no JSON; texts stay texts, to be refused.
    return json.dumps(result, default=float)


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main()

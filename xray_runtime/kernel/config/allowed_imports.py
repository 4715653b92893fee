"""The code that a config may run: X-ray's own, and the modules in the environment variable XRAY_ALLOWED_IMPORTS."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

VARIABLE = "XRAY_ALLOWED_IMPORTS"
"""Modules, separated by commas: `my_package.rewards` allows only that module, `my_package.*` also all below it."""

ENTRY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\.\*)?")


def check_import(path: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse an import path `module:function` whose module is not allowed: a config may come from a stranger.

    Raises:
        ValueError: it is not allowed (one line that says how to allow it), or the variable does not list modules.
    """
    module = path.partition(":")[0]
    entries = [entry for part in environment.get(VARIABLE, "").split(",") if (entry := part.strip())]
    for entry in entries:
        if not ENTRY.fullmatch(entry):
            raise ValueError(
                f"{VARIABLE}: {entry!r} is not allowed: must be a module, or module.* for everything below it"
            )
    if not any(_matches(module, entry) for entry in entries):
        raise ValueError(
            f"{path!r} is not allowed: it would import {module}, but {VARIABLE} in the environment allows "
            f"{', '.join(entries) or 'nothing'}; to allow it: {VARIABLE}={','.join([*entries, module])}"
        )


def _matches(module: str, entry: str) -> bool:
    above = entry.removesuffix(".*")
    return module == above or (entry != above and module.startswith(f"{above}."))

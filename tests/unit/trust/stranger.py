"""Somebody who has no X-ray, and docs/verify-without-xray.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "verify-without-xray.md"
OURS = ("xray", "xray_runtime", "flows", "tasks", "deployments")
WITHOUT = f"""
import sys, runpy

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {OURS!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__") if sys.argv[0].endswith(".py") else runpy.run_module(
    sys.argv[0], run_name="__main__", alter_sys=True
)
"""
"""Runs a script or a module as in an environment without X-ray."""


def stranger(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", WITHOUT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


def script_of_page(path: Path) -> Path:
    """Write the script on the page to `path`."""
    [text] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path.write_text(text)
    return path

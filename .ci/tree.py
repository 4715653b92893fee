"""Runs a tool on the packages as they are installed: `python .ci/tree.py mypy`.

mypy, import-linter and mkdocstrings look for `xray.flows` in `xray/flows`, and do not know that pyproject.toml maps it
to `flows/`. So they run in `.venv/tree`, a directory of links that has the shape of the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / ".venv" / "tree"
CONFIG = ROOT / "pyproject.toml"
PACKAGES = ("xray_runtime", "benchmarks", "examples", "tests")
"""Linked as they are; `xray` is made of its own files and of the mapped folders."""
TOOLS = {"mypy": ["mypy", f"--config-file={CONFIG}"], "lint-imports": ["lint-imports", f"--config={CONFIG}"]}


def mapping() -> dict[str, str]:
    """Package → its folder, of those that lie elsewhere than their names say."""
    found: dict[str, str] = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    return found


def assemble() -> Path:
    """Make `.venv/tree`, or bring it up to date; returns it."""
    links = {name: ROOT / name for name in PACKAGES}
    links |= {f"xray/{path.name}": path for path in (ROOT / "xray").iterdir() if path.name != "__pycache__"}
    links |= {package.replace(".", "/"): ROOT / folder for package, folder in mapping().items()}
    (TREE / "xray").mkdir(parents=True, exist_ok=True)
    for path in (*TREE.iterdir(), *(TREE / "xray").iterdir()):
        if path.is_symlink() and path.relative_to(TREE).as_posix() not in links:
            path.unlink(missing_ok=True)
    for name, target in links.items():
        # An environment that was copied has the links of the checkout it was made for.
        if not (TREE / name).is_symlink() or (TREE / name).readlink() != target:
            # Another process may do this at the same time; the rename is atomic.
            temporary = TREE / f".{os.getpid()}"
            temporary.symlink_to(target)
            temporary.replace(TREE / name)
    return TREE


def main() -> int:
    """Exit code of the tool."""
    if len(sys.argv) < 2 or sys.argv[1] not in TOOLS:
        print(f"usage: python .ci/tree.py {'|'.join(TOOLS)} [ARGUMENTS]", file=sys.stderr)
        return 2
    program, *arguments = TOOLS[sys.argv[1]]
    command = [str(Path(sys.executable).with_name(program)), *arguments, *sys.argv[2:]]
    return subprocess.run(command, cwd=assemble()).returncode


if __name__ == "__main__":
    sys.exit(main())

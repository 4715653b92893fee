"""Does a pretrained model get better, by a judge that it was not trained against? SmolLM2-135M on two cores.

    python -m benchmarks.smollm2 [--seeds 0 1 2] [--methods ppo grpo]

`ppo`: `configs/smollm2.yaml`, a reward model of noisy pairs. `grpo`: lesson 7 of `examples/`, a function. Each is
run whole, as a user runs it, into a directory of its own; what is held out is asked before and after. Then, what
bfloat16 gives a pass here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import line, machine, ratio, spread, table, times

ROWS, TOKENS, THREADS = 32, 64, 2

TARGETS = {"ppo": "configs/smollm2.yaml", "grpo": "examples.lessons.07_plan_for_gpus:plan_for_gpus"}


def lifecycle(method: str, seed: int, output: Path) -> dict[str, Any]:
    """The evaluation of a whole run."""
    command = [sys.executable, "-m", "xray.cli.main", "run", TARGETS[method], "--set", f"seed={seed}", "--json"]
    done = subprocess.run([*command, "--output", str(output)], check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout)["evaluation"])


def change(evaluation: dict[str, Any], of: str) -> str:
    """A mean before and after, with the 95% interval of the difference."""
    low, high = evaluation[f"{of}_delta_ci95"]
    return f"{evaluation[f'{of}_before']:.3f} → {evaluation[f'{of}_after']:.3f} ({low:+.3f} to {high:+.3f})"


def passes() -> dict[str, list[float]]:
    """Tokens a second through all layers, without a gradient, by precision."""
    import torch
    from transformers import AutoModelForCausalLM

    from xray_runtime.store.location import locate

    torch.set_num_threads(THREADS)
    name, file = locate("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(name, gguf_file=file, dtype=torch.float32, trust_remote_code=False)
    ids = torch.randint(0, model.config.vocab_size, (ROWS, TOKENS))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        layers = model.to(dtype).model
        with torch.no_grad():
            found[str(dtype).removeprefix("torch.")] = [ROWS * TOKENS / s for s in times(lambda: layers(ids))]  # noqa: B023
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"))
    options = parser.parse_args()
    print(f"{machine()}\n")
    table(("method", "seed", "minutes", "reward before → after", "gold before → after", "win rate", "KL, nats"), [])
    for method in options.methods:
        for seed in options.seeds:
            start = time.perf_counter()
            found = lifecycle(method, seed, options.output.absolute() / f"{method}-{seed}")
            minutes = (time.perf_counter() - start) / 60
            rate, kl = found["win_rate"], found["kl"]
            changes = (change(found, of) for of in ("reward", "gold"))
            line((method, seed, f"{minutes:.1f}", *changes, f"{rate:.2f}", f"{kl:.1f}"))
    print()
    speeds = passes()
    table(("passes in", "tokens a second", "÷ float32"), [])
    for precision, speed in speeds.items():
        line((precision, spread(speed), ratio(speed, speeds["float32"])))


if __name__ == "__main__":
    main()

"""What a PPO optimizer step of the quickstart's size is made of: one Learner in this process, without Ray.

    python -m benchmarks.update_step [--repeats 20]
    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=500 python -m benchmarks.update_step     (threads wait as Workhorses' do)

16 replies of 16 tokens to prompts of 14 to 29, as `peers` has them. Two micro-batches at a time, each on
one thread, in turns with one on both. Shares are of the profiler's processor time, with one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from benchmarks.layouts import CONFIG, global_batches, make_model
from benchmarks.machine import line, machine, ratio, spread, table, times
from benchmarks.threads import BASE
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.rows import num_response_tokens
from xray_runtime.engines.training import threads
from xray_runtime.models.ppo_objectives import PPOObjective
from xray_runtime.workers.learner import Learner
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.workhorse import RankInfo, reserve_port

THREADS, PROFILED = 2, 5
PARTS = {"aten::mm": "matrix products", "scaled_dot_product": "attention"}
"""What is in an operation's name → what it is part of."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    learner, reserved = Learner(RuntimeConfig(device="cpu", threads=THREADS)), reserve_port()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), BASE)
        [rows] = global_batches(model, 1, 16, prompt_tokens=(14, 30), reply_tokens=(16, 17))
        rank_info = RankInfo("policy", 0, 0, 1, "127.0.0.1", reserved.getsockname()[1], None)
        learner.build(ModelSpec(model, PPOObjective(CONFIG), training=CONFIG, new_head=True), rank_info)
    totals = {"tokens": float(num_response_tokens(rows))}

    def step() -> None:
        learner.train(rows, totals, CONFIG.lr)

    def whole() -> None:
        with mock.patch.object(threads, "SMALLEST", 2**62):
            step()

    seconds: dict[str, list[float]] = {"two micro-batches at a time": [], "one": []}
    for _ in range(options.repeats):
        seconds["two micro-batches at a time"] += times(step, 1)
        seconds["one"] += times(whole, 1)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED):
            whole()
    spent = dict.fromkeys((*PARTS.values(), "the rest"), 0.0)
    for event in found.key_averages():
        part = next((part for name, part in PARTS.items() if name in event.key), "the rest")
        spent[part] += event.self_cpu_time_total
    print(f"\n{machine()}; {THREADS} threads\n")
    table(("a step on", "ms", "one ÷ it"), [])
    for way, found in seconds.items():
        line((way, spread(1000 * s for s in found), ratio(seconds["one"], found)))
    print()
    table(("of it", "share"), [])
    for part, microseconds in spent.items():
        line((part, f"{microseconds / sum(spent.values()):.0%}"))


if __name__ == "__main__":
    main()

"""SFT, reward model, DPO, KTO, GRPO and PPO beside TRL's: the same policy, rows, batches and threads, in turns.

    python -m benchmarks.peers [--size 1.6M 18M 135M] [--lengths natural fixed] [--only sft dpo] [--turns 2]

X-ray runs its real stages; TRL's newest version, and 1.11.0 for PPO, its last with PPO, run in virtual environments
under `runs/peers` with the torch and transformers of this one. An update is an optimizer step, and of GRPO and PPO an
iteration. The first does not count, nor do steps of X-ray's that also measure held-out rows. Memory is that of all
processes (X-ray's with its servers), files that are only mapped left out. The share of the matrix rate counts the
arithmetic of separate rows, so what is not computed twice raises it.

It fails if the two do not do the same work: the losses of the same rows must be equal, and of sampled replies the mean
reward before the first update within its 99% interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from scipy.stats import ttest_ind  # type: ignore[import-untyped]

import xray
from benchmarks.machine import gflop_per_second, line, machine, ratio, spread, table
from benchmarks.peers_measure import TRL, peak_memory, steps
from benchmarks.peers_work import (
    EPOCHS,
    LAST_WITH_PPO,
    METHODS,
    NEWEST,
    REPLICAS,
    SAMPLES,
    SAMPLING,
    SEED,
    SIZES,
    THREADS,
)
from benchmarks.peers_xray import Work
from xray_runtime.config.base import PretrainedBase
from xray_runtime.planning.shapes import ModelShape, from_pretrained

PASSES = {"sft": 3.0, "reward": 3.0, "dpo": 3.0, "kto": 4.0, "grpo": 5.0}
PASSES |= {"ppo": 5.0 + 6 * EPOCHS, "ppo-shared": 4.0 + 3 * EPOCHS}
"""Forward passes' worth of arithmetic over an update's tokens. Training is three; KTO scores mismatched replies; GRPO
samples and asks the reference; PPO samples and asks policy, reference, reward model and critic."""
LOSSES = {"sft": "sft/loss", "reward": "reward_model/loss", "dpo": "dpo/loss", "kto": "kto/loss"}
TOLERANCE = 0.01
"""Of two losses of the same rows, relative to the larger, and to 0.1 where both are smaller."""
LEVEL = 0.99
COLUMNS = ["size", "lengths", "method", "", "seconds an update", "TRL ÷ it"]
COLUMNS += ["tokens a second", "peak, MiB", "of the matrix rate", "loss, or reward"]


@dataclass
class Side:
    """What one side did with a method, over all turns."""

    name: str
    seconds: list[float] = field(default_factory=list)
    curves: list[list[float]] = field(default_factory=list)
    """Loss, or mean reward, of each update of each turn."""
    lengths: list[float] = field(default_factory=list)
    """Mean tokens of sampled replies."""
    peaks: list[float] = field(default_factory=list)


def run_xray(work: Work, method: str, turn: int, side: Side) -> None:
    here = psutil.Process()
    with peak_memory(lambda: here.children(recursive=True)) as peak:
        found = steps(work.stage(method, turn).result(), work.output)
        side.peaks.append(peak())
    side.seconds += [step["seconds"] for step in found if "seconds" in step]
    if method in SAMPLING:
        side.lengths += [step["rollout/length"] for step in found]
        side.curves.append([step["reward/mean"] for step in found])
    else:
        side.curves.append([step[LOSSES[method]] for step in found if LOSSES[method] in step])


def run_trl(trl: TRL, work: Work, method: str, turn: int, side: Side) -> dict[str, Any]:
    task = work.task(method, turn)
    path = work.output / "task.json"
    path.write_text(json.dumps(task))
    found, peak = trl.train(path)
    side.peaks.append(peak)
    seconds, logs = [one["seconds"] for one in found], [one["logs"] for one in found]
    if method == "grpo":
        # Two optimizer steps an iteration.
        side.seconds += [a + b for a, b in zip(seconds[2::2], seconds[3::2], strict=True)]
        side.lengths += [log["completions/mean_length"] for log in logs[::2]]
        side.curves.append([log["reward"] for log in logs[::2]])
    elif method == "ppo":
        side.seconds += seconds[1:]
        side.curves.append([log["objective/scores"] for log in logs if "objective/scores" in log])
    else:
        side.seconds += seconds[1:]
        side.curves.append([float(log["loss"]) for log in logs])
    return task


def differences(method: str, ours: Side, theirs: Side) -> list[str]:
    """What shows that the sides did not do the same work; empty if nothing does."""
    if method in SAMPLING:
        first = [[curve[0] for curve in side.curves] for side in (ours, theirs)]
        if min(map(len, first)) < 2:
            return []
        interval = ttest_ind(*first, equal_var=False).confidence_interval(LEVEL)
        if interval.low <= 0 <= interval.high:
            return []
        return [f"{method}: the first rewards are {first[0]} and {first[1]}"]
    found = []
    for turn, (own, other) in enumerate(zip(ours.curves, theirs.curves, strict=True)):
        if len(own) != len(other):
            found.append(f"{method}, turn {turn}: {len(own)} and {len(other)} updates")
        for number, (a, b) in enumerate(zip(own, other, strict=False)):
            if not abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 0.1):
                found.append(f"{method}, turn {turn}, update {number}: the losses are {a:.5f} and {b:.5f}")
                break
    return found


def gflop(shape: ModelShape, method: str, tokens: float, replies: float) -> float:
    """Matrix products of an update on separate rows: 2 a parameter and token in a pass, logits at reply tokens."""
    logits = 0.0 if method == "reward" else shape.vocab_size * shape.hidden_size * replies
    return 2e-9 * PASSES[method] * (shape.num_layers * shape.layer_parameters() * tokens + logits)


def report(head: tuple[str, str], method: str, sides: list[Side], counts: tuple[float, float], work: Work) -> None:
    """The lines of a method; the last side is TRL."""
    tokens, replies = counts
    if method in SAMPLING:
        rows = work.size.groups * SAMPLES if method == "grpo" else work.size.prompts
        replies = rows * statistics.mean(length for side in sides for length in side.lengths)
        tokens += replies
    shape = from_pretrained(PretrainedBase(model=str(work.policy.result().path)))
    rate = gflop_per_second(shape.hidden_size, shape.intermediate_size, THREADS)
    for side in sides:
        if not side.seconds:
            sys.exit("--updates, --iterations: too few: no update is left that counts")
        median = statistics.median(side.seconds)
        name = "ppo-shared" if "shared" in side.name else method
        curves = [statistics.mean(curve[at] for curve in side.curves) for at in (0, -1)]
        line(
            (
                *head,
                method,
                side.name,
                spread(side.seconds, " s"),
                ratio(sides[-1].seconds, side.seconds),
                f"{tokens / median:,.0f}",
                f"{max(side.peaks):,.0f}",
                f"{gflop(shape, name, tokens, replies) / median / rate:.2f}",
                f"{curves[0]:.3f} → {curves[1]:.3f}",
            )
        )


def compare(work: Work, method: str, trls: dict[str, TRL], turns: int, head: tuple[str, str]) -> list[str]:
    """Run both sides of a method in turns and print its lines; returns what differs."""
    sides = [Side("X-ray, separate critic"), Side("X-ray, shared critic")] if method == "ppo" else [Side("X-ray")]
    theirs = Side("TRL")
    for turn in range(turns):
        for side in sides:
            run_xray(work, "ppo-shared" if "shared" in side.name else method, turn, side)
        task = run_trl(trls[LAST_WITH_PPO if method == "ppo" else NEWEST], work, method, turn, theirs)
    rows = task["rows"] * (SAMPLES if method == "grpo" else 1)
    report(head, method, [*sides, theirs], work.tokens(method, task["examples"], rows), work)
    return [found for side in sides for found in differences(method, side, theirs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [method for method in METHODS if method != "ppo-shared"]
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["1.6M"])
    parser.add_argument("--lengths", nargs="+", choices=("natural", "fixed"), default=["natural"])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--updates", type=int, default=17, help="optimizer steps of SFT, reward model, DPO and KTO")
    parser.add_argument("--iterations", type=int, default=4, help="of GRPO and PPO")
    parser.add_argument("--output", type=Path, default=Path("runs/peers"))
    options = parser.parse_args()
    root, wrong = options.output.absolute(), []
    torch.set_num_threads(THREADS)
    root.mkdir(parents=True, exist_ok=True)
    versions = {LAST_WITH_PPO if method == "ppo" else NEWEST for method in options.only}
    print(f"{machine()}; {THREADS} threads, float32; TRL {', '.join(sorted(versions))}; {options.turns} turns\n")
    trls = {version: TRL(root, version) for version in sorted(versions)}
    table(COLUMNS, [])
    for size in options.size:
        for lengths in options.lengths:
            output = root / f"{size}-{lengths}"
            with xray.workspace(
                output, project="peers", seed=SEED, runtime={"threads": THREADS, "generator_replicas": REPLICAS}
            ):
                work = Work.make(SIZES[size], lengths, options.updates, options.iterations, output)
                for method in options.only:
                    wrong += compare(work, method, trls, options.turns, (size, lengths))
    for trl in trls.values():
        trl.close()
    if wrong:
        sys.exit("\nnot the same work:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()

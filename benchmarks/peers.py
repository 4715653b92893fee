"""SFT, reward model, DPO, KTO, GRPO and PPO by X-ray and by TRL: the same policy, rows, batches and threads, in turns.

    python -m benchmarks.peers [--size 1.6M 18M 135M] [--lengths natural fixed] [--only sft dpo] [--turns 2]

Each side works alone: a turn is a process tree that begins once the machine is idle and ends before the next one. X-ray
runs its real stages, without any option and with `parallel: auto`; TRL's newest version, and 1.11.0 for PPO, its last
with PPO, run in virtual environments under `runs/peers` with the torch and transformers of this one. An update is an
optimizer step, and of GRPO and PPO an iteration. The first does not count, nor do steps of X-ray's that also measure
held-out rows. Memory is that of all processes (X-ray's with its servers), files that are only mapped left out. The
share of the matrix rate counts the arithmetic of separate rows, so what is not computed twice raises it.

It fails if the two sides do not do the same work: the losses of the same rows must be equal, and of sampled replies the
mean reward before the first update within its 99% interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy.stats import ttest_ind  # type: ignore[import-untyped]

from benchmarks.machine import gflop_per_second, line, machine, ratio, spread, table
from benchmarks.peers_measure import TRL, Measured, run_module, settled
from benchmarks.peers_work import EPOCHS, LAST_WITH_PPO, METHODS, NEWEST, SAMPLING, SIZES, THREADS
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.models.shapes import ModelShape

PASSES = {"sft": 3.0, "reward": 3.0, "dpo": 3.0, "kto": 4.0, "grpo": 5.0}
PASSES |= {"ppo": 5.0 + 6 * EPOCHS, "ppo-shared": 4.0 + 3 * EPOCHS}
"""Forward passes' worth of arithmetic over an update's tokens. Training is three; KTO scores mismatched replies; GRPO
samples and asks the reference; PPO samples and asks policy, reference, reward model and critic."""
TOLERANCE = 0.01
"""Of two losses of the same rows, relative to the larger, and to 0.1 where both are smaller."""
LEVEL = 0.99
COLUMNS = ["size", "lengths", "method", "", "seconds an update", "TRL ÷ it"]
COLUMNS += ["tokens a second", "peak, MiB", "of the matrix rate", "loss, or reward", "load before"]


XRAY: dict[str, dict[str, Any]] = {
    "X-ray": {"at": "", "options": []},
    "X-ray, `parallel: auto`": {"at": "-auto", "options": ["--auto"]},
}
"""X-ray as people have it: without any option, and with the planner's choice. Each has its own output directory."""
PPO_NAMES = {"ppo": ", separate critic", "ppo-shared": ", shared critic"}


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
    loads: list[float] = field(default_factory=list)
    """The machine's load before each turn."""

    def add(self, turn: Measured, load: float) -> None:
        self.seconds += turn.seconds
        self.curves.append(turn.curve)
        self.lengths += turn.lengths
        self.peaks.append(turn.peak)
        self.loads.append(load)


def run_xray(place: Path, options: list[str], methods: list[str], turn: int) -> dict[str, Measured]:
    """A turn of X-ray: a process that opens a workspace, trains by each method, and ends with its servers."""
    written = place / "turn.json"
    run_module("benchmarks.peers_xray", str(place), *options, "--turn", str(turn), "--methods", *methods)
    return {name: Measured(**one) for name, one in json.loads(written.read_text()).items()}


def run_trl(root: Path, version: str, place: Path, methods: list[str], turn: int) -> dict[str, Measured]:
    """A turn of TRL: a process that trains by each method in a forked copy of itself."""
    trl, found = TRL(root, version), {}
    for method in methods:
        updates, peak = trl.train(place / f"{method}-{turn}.json")
        seconds, logs = [one["seconds"] for one in updates], [one["logs"] for one in updates]
        lengths: list[float] = []
        if method == "grpo":
            # Two optimizer steps an iteration.
            counted = [a + b for a, b in zip(seconds[2::2], seconds[3::2], strict=True)]
            lengths = [log["completions/mean_length"] for log in logs[::2]]
            curve = [log["reward"] for log in logs[::2]]
        elif method == "ppo":
            counted, curve = seconds[1:], [log["objective/scores"] for log in logs if "objective/scores" in log]
        else:
            counted, curve = seconds[1:], [float(log["loss"]) for log in logs]
        found[method] = Measured(counted, curve, lengths, peak)
    trl.close()
    return found


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


def report(head: tuple[str, str], method: str, sides: list[Side], work: dict[str, Any]) -> None:
    """The lines of a method; the last side is TRL."""
    tokens, replies = work["counts"][method]
    if method in SAMPLING:
        replies = work["rows"][method] * statistics.mean(length for side in sides for length in side.lengths)
        tokens += replies
    shape = from_pretrained(PretrainedBase(model=work["policy"]))
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
                spread(side.loads, digits=2),
            )
        )


def compare(root: Path, size: str, lengths: str, options: argparse.Namespace) -> list[str]:
    """Run the sides in turns, each alone on the machine, and print their lines; returns what differs."""
    own = [size, lengths, "--updates", str(options.updates), "--iterations", str(options.iterations)]
    place = root / f"{size}-{lengths}"
    run_module("benchmarks.peers_xray", str(place), *own, "--turns", str(options.turns), "--methods", *options.only)
    work = json.loads((place / "work.json").read_text())
    ours = [method for name in options.only for method in (("ppo", "ppo-shared") if name == "ppo" else (name,))]
    sides: dict[tuple[str, str], Side] = {}

    def measured(name: str, found: dict[str, Measured], load: float) -> None:
        for method, one in found.items():
            shown = name + PPO_NAMES.get(method, "") if name != "TRL" else name
            sides.setdefault((method.partition("-")[0], shown), Side(shown)).add(one, load)

    for turn in range(options.turns):
        for name, fields in XRAY.items():
            load, output = settled(), root / f"{size}-{lengths}{fields['at']}"
            measured(name, run_xray(output, own + fields["options"], ours, turn), load)
        for version in (NEWEST, LAST_WITH_PPO):
            methods = [method for method in options.only if (method == "ppo") == (version == LAST_WITH_PPO)]
            if methods:
                load = settled()
                measured("TRL", run_trl(root, version, place, methods, turn), load)
    wrong = []
    for method in options.only:
        *found, theirs = [side for (name, _), side in sides.items() if name == method]
        report((size, lengths), method, [*found, theirs], work)
        wrong += [difference for side in found for difference in differences(method, side, theirs)]
    return wrong


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
    root.mkdir(parents=True, exist_ok=True)
    versions = {LAST_WITH_PPO if method == "ppo" else NEWEST for method in options.only}
    print(f"{machine()}; {THREADS} threads, float32; TRL {', '.join(sorted(versions))}; {options.turns} turns\n")
    table(COLUMNS, [])
    for size in options.size:
        for lengths in options.lengths:
            wrong += compare(root, size, lengths, options)
    if wrong:
        sys.exit("\nnot the same work:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()

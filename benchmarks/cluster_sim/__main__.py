"""The command; `python -m benchmarks.cluster_sim --help`."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster_sim.job import Shares, SimulatedJob, Watch, simulate
from benchmarks.cluster_sim.nodes import GPUNodes
from benchmarks.cluster_sim.workhorse import Scale
from benchmarks.machine import MIB, machine, table
from xray_runtime.cluster.health import HEARTBEAT_SECONDS
from xray_runtime.cluster.pool.acquisition import GROUP_SECONDS

PHASES = ("sync", "generate", "score", "update", "ledger")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.cluster_sim", description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64], help="Workhorses in all, one for each GPU")
    parser.add_argument("--params", type=float, default=70e9, help="parameters of each model")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8, help="replies to a prompt")
    parser.add_argument("--reply-tokens", type=int, default=4096)
    parser.add_argument("--time-scale", type=float, default=0.001, help="seconds slept for a second of the cost model")
    parser.add_argument("--token-scale", type=int, default=64, help="how many times shorter rows are")
    parser.add_argument("--weight-scale", type=int, default=4096, help="how many times smaller weights are")
    parser.add_argument("--lose-node", action="store_true", help="kill a node after half of the iterations")
    args = parser.parse_args()
    for gpus in args.gpus:
        try:
            Shares(gpus)
        except ValueError as error:
            parser.error(str(error))
    if args.iterations < 2:
        parser.error(f"--iterations: {args.iterations} must be at least 2: the first one warms up")
    if args.lose_node and args.iterations < 4:
        parser.error(
            f"--iterations: {args.iterations} must be at least 4 with --lose-node: a node is lost after half of them, "
            "when there is a snapshot, and iterations must follow"
        )
    rows = args.prompts * args.samples
    if rows // 4 < max(args.gpus) // 2:
        parser.error(f"--prompts: {args.prompts} × {args.samples} replies are too few for {max(args.gpus)} GPUs")
    return args


def report(job: SimulatedJob, nodes: int, watch: Watch, points: list[dict[str, Any]]) -> list[str]:
    """A line of the table: medians over the iterations but the first."""
    metrics = [point["metrics"] for point in points][1:]
    took = {phase: statistics.median(m.get(f"seconds/{phase}", 0.0) for m in metrics) for phase in PHASES}
    slept = {phase: job.scale.time * seconds for phase, seconds in job.estimate.phases().items()}
    overhead = {phase: took[phase] - slept.get(phase, 0.0) for phase in PHASES}
    return [
        str(job.num_gpus),
        str(nodes),
        f"{watch.opened[0]:.1f}",
        *(f"{sum(job.estimate.phases().values()):.0f}", f"{sum(slept.values()):.2f}", f"{sum(took.values()):.2f}"),
        *(f"{overhead[phase]:.2f}" for phase in PHASES),
        f"{sum(overhead.values()):.2f}",
        f"{watch.calls / job.iterations:.0f}",
        f"{_rate(job, watch):.2f}",
        f"{watch.driver_bytes / MIB:.0f}",
        f"{watch.store_bytes / MIB:.0f}",
    ]


HEAD = (
    *("GPUs", "nodes", "open, s", "modelled s", "slept s", "took s"),
    *(f"over: {phase}" for phase in PHASES),
    *("overhead, s", "calls", "heartbeats/s each", "driver, MiB", "stores, MiB"),
)


def limits(job: SimulatedJob, watch: Watch) -> list[list[str]]:
    """Each limit of the runtime's beside what came closest to it; what takes simulated time, at full scale."""
    times = [at for _, at in watch.iterations_done]
    silence = max((b - a for a, b in pairwise(times)), default=0.0)
    full = silence + sum(job.estimate.phases().values()) * (1 - job.scale.time)
    runtime = job.runtime
    return [
        [str(job.num_gpus), "stall_timeout_s", f"{runtime.stall_timeout_s:.0f}", f"{full:.0f} between two reports"],
        [str(job.num_gpus), "heartbeats", f"{1 / HEARTBEAT_SECONDS:.2f}/s", f"{_rate(job, watch):.2f}/s"],
        [str(job.num_gpus), "GROUP_SECONDS", f"{GROUP_SECONDS:.0f}", f"{max(watch.opened):.1f} to reserve and build"],
    ]


def _rate(job: SimulatedJob, watch: Watch) -> float:
    """Heartbeats a second of one Workhorse."""
    return watch.heartbeats / job.num_gpus / max(watch.seconds, 1e-9)


def loss(job: SimulatedJob, watch: Watch) -> list[str]:
    """Cost of the lost node."""
    assert watch.killed is not None
    killed = watch.killed
    before = max(done for done, at in watch.iterations_done if at <= killed)
    after = [at for done, at in watch.iterations_done if done > before and at > watch.failures[-1][1]]
    return [
        str(job.num_gpus),
        str(before),
        str(watch.resumed_at[-1]),
        str(before + 1 - watch.resumed_at[-1]),
        f"{watch.failures[0][1] - killed:.1f}",
        f"{watch.opened[-1]:.1f}",
        f"{after[0] - killed:.1f}",
    ]


def main() -> int:
    args = parsed()
    # Simulated processes would otherwise give way to everything else on this machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    scale = Scale(args.time_scale, args.token_scale, args.weight_scale)
    make = partial(SimulatedJob, num_parameters=args.params, iterations=args.iterations, num_prompts=args.prompts)
    lines, limit_lines, loss_lines = [], [], []
    print(f"{machine()}\n", flush=True)
    for gpus in args.gpus:
        job = make(num_gpus=gpus, samples=args.samples, reply_tokens=args.reply_tokens, scale=scale)
        with tempfile.TemporaryDirectory() as folder:
            nodes = GPUNodes(gpus)
            try:
                watch, points = simulate(job, Path(folder), nodes, args.lose_node)
            finally:
                nodes.end()
        lines.append(report(job, len(nodes), watch, points))
        limit_lines += limits(job, watch)
        if args.lose_node:
            loss_lines.append(loss(job, watch))
    table(HEAD, lines)
    print()
    table(("GPUs", "limit", "allowed", "closest"), limit_lines)
    if args.lose_node:
        print()
        table(
            ("GPUs", "killed after", "resumed at", "iterations lost", "found, s", "reopened, s", "next iteration, s"),
            loss_lines,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""PPO with the rollout beside the update (`lag: 1`) against one after the other: does it learn as well?

    python -m benchmarks.lag [--config configs/quickstart.yaml] [--iterations 28] [--seeds 3]

A lifecycle makes the SFT and reward models once; from them the config's first PPO stage runs with both values, in
turns. Otherwise only the stages' names differ, from which their random choices derive. Curves are means over the seeds;
the end is the last of their parts, and its difference comes with a 95% interval of Welch's t.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from scipy.stats import ttest_ind  # type: ignore[import-untyped]

import xray
from benchmarks.machine import line, machine, spread, table
from benchmarks.peers_measure import Series, series
from xray_runtime.config.base import FreshBase
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import load_config

CURVES = ("reward/gold", "reward/mean", "kl/reference_k1")
POINTS = 8
"""Parts of a curve that are shown."""
PHASES = ("sync", "generate", "score", "update", "total")


def start(config: LifecycleConfig) -> tuple[xray.Handle, xray.Handle, xray.Handle]:
    """(prompts, SFT model, reward model) of a config with a fresh base, as its lifecycle makes them."""
    assert config.sft is not None
    assert config.reward is not None
    assert config.preferences is not None
    assert isinstance(config.base, FreshBase)
    chats = xray.prepare(**fields(config.data))
    sft = xray.sft(xray.fresh_base(chats, **fields(config.base)), data=chats, **fields(config.sft))
    pairs = xray.preferences(policy=sft, data=chats, gold=config.gold, **fields(config.preferences))
    return chats, sft, xray.reward_model(sft, pairs, **fields(config.reward))


def fields(section: BaseModel) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields if name != "kind"}


def parts(values: list[float]) -> list[float]:
    """Means of `POINTS` parts of a curve."""
    edges = [round(n * len(values) / POINTS) for n in range(POINTS + 1)]
    return [statistics.mean(values[a:b]) for a, b in pairwise(edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--iterations", type=int, default=28)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/lag"))
    options = parser.parse_args()
    config, output, about = load_config(options.config), options.output.absolute(), machine()
    runs: dict[int, list[Series]] = {0: [], 1: []}
    with xray.workspace(output, project="lag", seed=config.seed, runtime=config.runtime):
        chats, sft, judge = start(config)
        for seed in range(options.seeds):
            for lag in sorted(runs, reverse=bool(seed % 2)):
                stage = fields(config.ppo_stages[0]) | {"iterations": options.iterations, "lag": lag}
                policy = xray.ppo(
                    sft, prompts=chats, rewards=[judge], gold=config.gold, name=f"ppo-lag{lag}-{seed}", **stage
                )
                runs[lag].append(series(policy.result(), output))
    print(f"{about}; {options.config}, {options.iterations} iterations, {options.seeds} seeds\n")
    table(("", "lag", *(f"part {n + 1} of {POINTS}" for n in range(POINTS)), "end, lag 1 − lag 0"), [])
    for name in CURVES:
        curves = {lag: [parts(run[name]) for run in found] for lag, found in runs.items()}
        ends = {lag: [curve[-1] for curve in found] for lag, found in curves.items()}
        interval = ttest_ind(ends[1], ends[0], equal_var=False).confidence_interval(0.95)
        gap = statistics.mean(ends[1]) - statistics.mean(ends[0])
        for lag, found in curves.items():
            means = [f"{statistics.mean(point):.3f}" for point in zip(*found, strict=True)]
            line((name, lag, *means, f"{gap:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})" if lag else ""))
    print()
    table(("lag", *(f"{phase}, s" for phase in PHASES), "mismatch, nats", "effective share of samples"), [])
    for lag, of_lag in runs.items():
        # The first iteration does not count: caches are cold, and with lag two rollouts are sampled.
        each = {name: [value for run in of_lag for value in run[name][1:]] for name in of_lag[0]}
        seconds = [spread(each[f"seconds/{phase}"]) for phase in PHASES]
        line((lag, *seconds, spread(each["rollout/mismatch"]), spread(each["rollout/effective_sample_share"])))


if __name__ == "__main__":
    main()

"""GRPO with and without score centering, where the sampler is not the policy that learns.

    python -m benchmarks.score_centering --out docs/score-centering.md

Task, model and loop are those of `benchmarks.methods`: the largest of four digits, in this process. The policy learns
in float32; its sampler computes in bfloat16, has noise in its weights, or is the policy of some iterations ago.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.methods import HELDOUT, MethodRun, MethodTrainer, of_sft, problems, right, sample
from xray_runtime.data.batch import Rollout, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.experience import build_experience
from xray_runtime.methods.ppo.functions import Functions, RowFacts
from xray_runtime.methods.ppo.objectives import PPOObjective

SEEDS, ITERATIONS, NUM_TOP = 3, 40, 4
"""`NUM_TOP`: likeliest tokens reported, of a vocabulary of 16."""
SHOWN = 10
"""Iterations that a number of the table is the mean of: the first and the last."""


@dataclass(frozen=True)
class SamplerSetting:
    """How the sampler differs from the policy, and what the loss does about it."""

    correction: str
    noise: float = 0.0
    """Standard deviation of what its weights are multiplied by, around 1; drawn anew in each iteration."""
    lag: int = 0


SETTINGS: Mapping[str, SamplerSetting] = {
    "bfloat16": SamplerSetting("none"),
    "noise 0.3, no weights": SamplerSetting("none", noise=0.3),
    "noise 0.3": SamplerSetting("truncate", noise=0.3),
    "lag 4": SamplerSetting("truncate", lag=4),
    "lag 8": SamplerSetting("truncate", lag=8),
}


@dataclass
class CenteringCurve:
    """A number an iteration."""

    reward: list[float] = field(default_factory=list)
    """Share of right replies."""
    mismatch: list[float] = field(default_factory=list)
    """Mean |log-probability difference| of the policy and its sampler, nats a token."""
    heldout: float = 0.0
    """Share of right replies to held-out problems, by the policy itself after the last iteration."""


class Centred(MethodTrainer):
    """The trainer of `benchmarks.methods` with a sampler of `setting`."""

    def __init__(self, setting: SamplerSetting, *, centred: bool, weights: dict[str, Tensor], seed: int) -> None:
        super().__init__("grpo", weights, seed)
        given = {"score_centering": centred, "top_logprobs": NUM_TOP, "importance_correction": setting.correction}
        self.config = self.config.model_copy(update=given)
        self.setting, self.functions = setting, Functions.of(self.config)
        self.objective, self.curve = PPOObjective(self.config), CenteringCurve()
        self._samplers: list[Any] = []

    def iterate(self, run: MethodRun) -> None:
        self._samplers = [*self._samplers, copy.deepcopy(self.module.lm)][-1 - self.setting.lag :]
        sampler = copy.deepcopy(self._samplers[0])
        for weight in sampler.parameters():
            weight.data *= 1 + self.setting.noise * torch.randn(weight.shape, generator=self.random)
        sampler = sampler.bfloat16()
        drawn = problems(self.config.prompts_per_iteration, self.draw)
        prompts = [prompt for prompt in drawn for _ in range(self.config.samples_per_prompt)]
        rollout = sample(sampler, prompts, self.random)
        text = TextBatch.of(prompts, rollout.response_ids).with_columns(id=np.arange(len(prompts)))
        if self.config.score_centering:
            rollout = rollout.with_columns(**likeliest(sampler, text, rollout))
        rewards, scores = right(prompts, rollout), self.scores(text)
        facts = RowFacts(sources={"right": rewards}, weights={"right": 1.0})
        given = self.config, text, rollout, scores, rewards, self.kl.coef, self.functions
        made = build_experience(*given, math.inf, facts)
        self.curve.reward.append(float(rewards.mean()))
        self.curve.mismatch.append(made.metrics["rollout/mismatch"])
        self.update(made)
        self.kl.update(made.reference_kl, made.num_rows)


@torch.no_grad()
def likeliest(sampler: Any, text: TextBatch, rollout: Rollout) -> dict[str, Ragged]:
    """The columns of the sampler's likeliest tokens."""
    ids, ends = text.input_ids.dense(), rollout.response_ids
    logprobs = sampler(input_ids=torch.from_numpy(ids)).logits[:, 3:-1].float().log_softmax(-1)
    found, there = logprobs.topk(NUM_TOP), ends.mask()
    return {
        "topk_ids": ends.like(found.indices.numpy().astype(np.int32)[there]),
        "topk_logprobs": ends.like(found.values.numpy()[there]),
    }


def run(
    setting: SamplerSetting, *, centred: bool, weights: dict[str, Tensor], seed: int, iterations: int
) -> CenteringCurve:
    trainer = Centred(setting, centred=centred, weights=weights, seed=seed)
    for _ in range(iterations):
        trainer.iterate(MethodRun(0.0, 0.0, 0.0))
    heldout = problems(HELDOUT, random.Random(9000 + seed))
    replies = sample(trainer.module.lm, heldout, torch.Generator().manual_seed(seed))
    trainer.curve.heldout = float(right(heldout, replies).mean())
    return trainer.curve


Curves = dict[tuple[str, bool], list[CenteringCurve]]
"""Setting and whether it is centred → a curve a seed."""


def page(curves: Curves, picture: str) -> Iterator[str]:
    """The page of the docs, line by line."""
    yield "# Score centering, with and without"
    yield ""
    yield f"Made by `python -m benchmarks.score_centering --out docs/score-centering.md` ({machine()})."
    yield "GRPO on the task of the [table of methods](methods-table.md), the largest of four digits, from a model that"
    yield "is right half of the time. The policy learns in float32 and its sampler computes in bfloat16; with *noise*"
    yield "each of the sampler's weights is multiplied by 1 ± 0.3 too, with *lag n* it is the policy of n iterations"
    yield "ago. All but the first two have importance weights of at most 2. Centering has the four likeliest of 16"
    yield "tokens."
    yield ""
    yield f"Means of three seeds, of the first and the last {SHOWN} of {ITERATIONS} iterations; *reward* is the share"
    yield "of right replies of the sampler, *held out* that of the policy at the end, by seed. The seeds, problems and"
    yield "first weights are the same in both ways."
    yield ""
    header = "sampler", "centering", "reward, first", "reward, last", "mismatch, first", "mismatch, last", "held out"
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for (name, centred), found in curves.items():
        ends = (slice(None, SHOWN), slice(-SHOWN, None))
        numbers = [
            f"{fmean(fmean(getattr(curve, of)[part]) for curve in found):.3g}"
            for of in ("reward", "mismatch")
            for part in ends
        ]
        seeds = ", ".join(f"{curve.heldout:.3f}" for curve in found)
        yield f"| {name} | {'yes' if centred else 'no'} | {' | '.join(numbers)} | {seeds} |"
    yield ""
    yield f"![Reward by iteration, with and without centering]({picture})"


def draw(curves: Curves, path: Path) -> None:
    """Rewards over iterations, a panel a setting, a thin line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(SETTINGS), 2.6), layout="constrained")
    panels: Any = figure.subplots(1, len(SETTINGS), sharey=True)
    for panel, name in zip(panels, SETTINGS, strict=True):
        for centred, color in ((False, "#e07b39"), (True, "#2f7ed8")):
            rewards = np.array([curve.reward for curve in curves[name, centred]])
            panel.plot(rewards.T, color=color, linewidth=0.5, alpha=0.5)
            panel.plot(rewards.mean(0), color=color, label="centred" if centred else "plain")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("iteration")
    panels[0].set_ylabel("right replies")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights, curves = [of_sft(seed) for seed in range(options.seeds)], Curves()
    for name, setting in SETTINGS.items():
        for centred in (False, True):
            given = {"centred": centred, "iterations": options.iterations}
            curves[name, centred] = [run(setting, weights=w, seed=seed, **given) for seed, w in enumerate(weights)]
    picture = Path("images/score-centering.png")
    text = "\n".join(page(curves, str(picture))) + "\n"
    print(text)
    if options.out is not None:
        (options.out.parent / picture).parent.mkdir(exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
        draw(curves, options.out.parent / picture)


if __name__ == "__main__":
    main()

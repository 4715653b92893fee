"""Compare distillation on the student's samples with SFT on the teacher's replies at equal tokens, in this process.

    python -m benchmarks.distillation [--seeds 3]

The task, the student's start and the sampler are those of `benchmarks.methods`: the largest of four digits, from
demonstrations that are right half of the time. The teacher, of 1.1 million parameters, has learned from right ones. All
ways get the same prompts, minibatches, learning rate and optimizer, and train on each reply once; only who samples the
reply and what is learned of it differ. Success is of replies sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import line, machine, table
from benchmarks.methods import (
    END,
    HELDOUT,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    MINIBATCH,
    ROLLOUT,
    VOCABULARY,
    fresh,
    of_sft,
    problems,
    right,
    sample,
    tensors,
    wilson,
)
from xray_runtime.data.batch import Scores, StepTotals, TextBatch
from xray_runtime.methods.distill.config import DistillConfig
from xray_runtime.methods.ppo.experience import build_experience
from xray_runtime.methods.ppo.functions import Functions
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import SFTObjective, training_loss
from xray_runtime.models.teacher_objective import TeacherObjective

BUDGETS = (2, 4, 8, 16)
"""Iterations of `ROLLOUT` replies after which the student is measured."""
TEACHER_STEPS = 600
SFT = "SFT on the teacher's replies"
WAYS: dict[str, dict[str, Any] | None] = {
    SFT: None,
    "reverse KL at the sampled token": {},
    "reverse KL, whole vocabulary": {"beta": 1.0, "top_k": None},
    "reverse KL, the teacher's top 4": {"beta": 1.0, "top_k": 4},
    "JSD, β = 0.5, whole vocabulary": {"beta": 0.5, "top_k": None},
    "forward KL, whole vocabulary": {"beta": 0.0, "top_k": None},
}
"""Name → the stage's `distillation`."""


class Distilled(NamedTuple):
    """A student after a budget."""

    tokens: int
    success: float
    kl: float
    """To the teacher on its own replies, nats a token."""


def trained_teacher(seed: int) -> HeadedLM:
    draw = random.Random(500 + seed)
    torch.manual_seed(500 + seed)
    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    module = HeadedLM(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for _ in range(TEACHER_STEPS):
        ids = torch.tensor([[*p, max(p), END] for p in problems(128, draw)])
        logits = module.lm(input_ids=ids[:, :-1]).logits[:, 3:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module


class Student:
    """A student on its way; `distillation` None: by SFT."""

    def __init__(self, weights: dict[str, Tensor], teacher: HeadedLM, way: str, seed: int) -> None:
        self.distillation = WAYS[way]
        sizes: dict[str, Any] = {"prompts_per_iteration": ROLLOUT, "minibatch_size": MINIBATCH}
        self.config = DistillConfig(
            **sizes,
            max_new_tokens=MAX_NEW_TOKENS,
            distillation=self.distillation or {},  # type: ignore[arg-type]
        )
        self.functions, self.teacher = Functions.of(self.config), teacher
        self.module = fresh(seed, head=False)
        self.module.lm.load_state_dict(weights)
        self.objective = SFTObjective() if self.distillation is None else PPOObjective(self.config)
        given = self.config.distillation
        top_k = 0 if given.beta is None else given.top_k or VOCABULARY
        self.taught = TeacherObjective(1.0, top_k, VOCABULARY)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.draw, self.random, self.tokens = random.Random(1000 + seed), torch.Generator().manual_seed(seed), 0

    def iterate(self) -> None:
        """One rollout, and one pass over it."""
        prompts = problems(ROLLOUT, self.draw)
        sampler = self.teacher.lm if self.distillation is None else copy.deepcopy(self.module.lm).bfloat16()
        rollout = sample(sampler, prompts, self.random)
        rows: TextBatch = TextBatch.of(prompts, rollout.response_ids)
        if self.distillation is not None:
            scores = self.scores(rows.with_columns(id=np.arange(len(rows))))
            zeros = torch.zeros(len(rows))
            rows = build_experience(self.config, rows, rollout, scores, zeros, 0.0, self.functions, math.inf).rows
        self.tokens += rows.num_response_tokens()
        for index in torch.randperm(len(rows), generator=self.random).chunk(ROLLOUT // MINIBATCH):
            part = rows.take(index.numpy())
            loss, _ = training_loss(self.module, self.objective, tensors(part), StepTotals.of(part))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()

    @torch.no_grad()
    def scores(self, rows: TextBatch) -> Scores:
        given = tensors(rows)
        found = PPOObjective(self.config).score(self.module, given)
        joined: Scores = found.with_columns(**self.taught.score(self.teacher, given).columns()).map(  # type: ignore[assignment]
            lambda values: values.numpy()
        )
        return joined

    def measured(self, heldout: Sequence[list[int]], seed: int) -> Distilled:
        rollout = sample(self.module.lm, heldout, torch.Generator().manual_seed(seed))
        scores = self.scores(TextBatch.of(heldout, rollout.response_ids))
        apart = scores.logprobs.values - scores.teacher_logprobs.values
        return Distilled(self.tokens, float(right(heldout, rollout).mean()), float(apart.mean()))


def learned(way: str, weights: dict[str, Tensor], teacher: HeadedLM, seed: int) -> list[Distilled]:
    """The student after each budget."""
    student, heldout = Student(weights, teacher, way, seed), problems(HELDOUT, random.Random(9000 + seed))
    found = []
    for number in range(1, max(BUDGETS) + 1):
        student.iterate()
        if number in BUDGETS:
            found.append(student.measured(heldout, seed))
    return found


def row(way: str, runs: Sequence[Distilled]) -> tuple[str, ...]:
    success, tokens = float(np.mean([run.success for run in runs])), float(np.mean([run.tokens for run in runs]))
    by_seed = ", ".join(f"{run.success:.3f}" for run in runs)
    kl = [run.kl for run in runs]
    spread = f"{np.mean(kl):.3f} ({min(kl):.3f} to {max(kl):.3f})"
    return way, f"{tokens:,.0f}", wilson(success, HELDOUT * len(runs)), by_seed, spread


def report(seeds: int) -> None:
    torch.set_num_threads(1)
    starts = [(of_sft(seed), trained_teacher(seed)) for seed in range(seeds)]
    heldout = [problems(HELDOUT, random.Random(9000 + seed)) for seed in range(seeds)]
    both = {"student before": [], "teacher": []}  # type: dict[str, list[float]]
    for seed, (weights, teacher) in enumerate(starts):
        student = Student(weights, teacher, SFT, seed)
        for name, lm in (("student before", student.module.lm), ("teacher", teacher.lm)):
            both[name].append(
                float(right(heldout[seed], sample(lm, heldout[seed], torch.Generator().manual_seed(seed))).mean())
            )
    print(f"{machine()}; {seeds} seeds, {HELDOUT} held-out problems each")
    for name, found in both.items():
        print(f"{name}: {wilson(float(np.mean(found)), HELDOUT * seeds)}; {', '.join(f'{x:.3f}' for x in found)}")
    print()
    table(("learned by", "reply tokens", "success", "by seed", "KL to the teacher, nats a token (least to most)"), [])
    runs = {way: [learned(way, *starts[seed], seed) for seed in range(seeds)] for way in WAYS}
    for number in range(len(BUDGETS)):
        for way in WAYS:
            line(row(way, [of_seed[number] for of_seed in runs[way]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    report(parser.parse_args().seeds)


if __name__ == "__main__":
    main()

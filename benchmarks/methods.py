"""Compare every method of `ppo` on one verifiable task, in this process, without Ray or an engine.

    python -m benchmarks.methods [--seeds 3] [--methods grpo dppo_tv …]

Which is the largest of four digits? A transformer of two layers learns it from demonstrations that are right half of
the time, and each method trains that model on. Config, experience and loss are the product's; sampling is a loop here,
by a copy of the policy whose weights and hidden states are rounded to bfloat16, as generators have them. The update has
four minibatches, so that the policy has moved away from the sampler in the last three.

`echo` plays episodes of two turns, and so does `two_turns`, GRPO beside it: after a first answer the policy reads the
larger of the first two digits, and answers again.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import line, machine, table
from xray_runtime.algorithms.kl import make_kl_controller
from xray_runtime.algorithms.rewards import MovingMeans
from xray_runtime.data.batch import Rollout, Scores, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.experience import Experience, build_experience
from xray_runtime.methods.ppo.functions import Functions, RowFacts
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.ppo.published import METHODS
from xray_runtime.methods.ppo.update import step_totals
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import ReferenceObjective, training_loss

END, VOCABULARY, MAX_NEW_TOKENS = 10, 16, 3
ROLLOUT, MINIBATCH, ITERATIONS, HELDOUT = 256, 64, 20, 512
SFT_STEPS, LEARNING_RATE = 250, 1e-3
HINT, TURN = 11, 2
"""Token before what the policy reads, and the tokens of a whole answer."""
TWO_TURNS = ("echo", "two_turns")
CONTROL = "shuffled"
"""GRPO with rewards that belong to other replies: it must gain nothing."""


@dataclass
class MethodRun:
    """One method on one seed."""

    before: float
    after: float
    seconds: float
    mismatch: list[float] = field(default_factory=list)
    """Mean |log-probability difference| between generator and trainer in each iteration, nats per token."""
    dropped: list[float] = field(default_factory=list)
    """Share of tokens without a gradient, or with a cut one: by loss and importance weights."""


def problems(count: int, draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(10) for _ in range(4)] for _ in range(count)]


def fresh(seed: int, head: bool) -> HeadedLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)
    return HeadedLM(LlamaForCausalLM(config), scalar_head=head)


def of_sft(seed: int) -> dict[str, Tensor]:
    """Weights that give the right answer about half of the time."""
    draw, module = random.Random(seed), fresh(seed, head=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    for _ in range(SFT_STEPS):
        rows = [[*p, max(p) if draw.random() < 0.5 else draw.randrange(10), END] for p in problems(128, draw)]
        ids = torch.tensor(rows)
        logits = module.lm(input_ids=ids[:, :-1]).logits[:, 3:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return copy.deepcopy(module.lm.state_dict())


def of_turns(seed: int) -> dict[str, Tensor]:
    """As `of_sft`, of episodes of two turns."""
    draw, module = random.Random(seed), fresh(seed, head=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)

    def answer(prompt: list[int]) -> list[int]:
        return [max(prompt) if draw.random() < 0.5 else draw.randrange(10), END]

    for _ in range(SFT_STEPS):
        ids = torch.tensor([[*p, *answer(p), *observation(p), *answer(p)] for p in problems(128, draw)])
        logits, said = module.lm(input_ids=ids[:, :-1]).logits, [3, 4, 8, 9]
        loss = torch.nn.functional.cross_entropy(logits[:, said].flatten(0, 1), ids[:, 1:][:, said].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return copy.deepcopy(module.lm.state_dict())


def observation(prompt: Sequence[int]) -> list[int]:
    return [HINT, max(prompt[:2]), END]


def play(lm: LlamaForCausalLM, prompts: Sequence[Sequence[int]], random: torch.Generator) -> Rollout:
    """Episodes of two turns; one whose first turn is no whole answer ends there."""
    first = sample(lm, prompts, random)
    replies, logprobs = [list(row) for row in first.response_ids], [list(row) for row in first.rollout_logprobs]
    masks, ended = [[True] * len(reply) for reply in replies], first.ended.copy()
    goes_on = [row for row, reply in enumerate(replies) if len(reply) == TURN and ended[row]]
    begun = [[*prompts[row], *replies[row], *observation(prompts[row])] for row in goes_on]
    second = sample(lm, begun, random)
    for row, ids, values, whole in zip(
        goes_on, second.response_ids, second.rollout_logprobs, second.ended, strict=True
    ):
        replies[row] += [*observation(prompts[row]), *ids]
        logprobs[row] += [0.0, 0.0, 0.0, *values]
        masks[row] += [False] * 3 + [True] * len(ids)
        ended[row] = whole
    return first.with_columns(
        response_ids=Ragged.of(replies),
        rollout_logprobs=Ragged.of(logprobs, np.float32),
        response_mask=Ragged.of(masks, np.bool_),
        turn_rewards=Ragged.of(([0.0] * len(ids) for ids in replies), np.float32),
        prompt_ids=Ragged.of(prompts),
        ended=ended,
    )


@torch.no_grad()
def sample(lm: LlamaForCausalLM, prompts: Sequence[Sequence[int]], random: torch.Generator) -> Rollout:
    """Replies at temperature 1, up to END."""
    ids = torch.tensor(prompts)
    logprobs: list[Tensor] = []
    for _ in range(MAX_NEW_TOKENS):
        scores = lm(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=random)
        ids, logprobs = torch.cat([ids, chosen], 1), [*logprobs, scores.gather(1, chosen)]
    replies, found = ids[:, len(prompts[0]) :].tolist(), torch.cat(logprobs, 1).tolist()
    ends = [reply.index(END) + 1 if END in reply else MAX_NEW_TOKENS for reply in replies]
    zeros = np.zeros(len(prompts), np.int64)
    return Rollout(
        response_ids=Ragged.of([reply[:end] for reply, end in zip(replies, ends, strict=True)]),
        rollout_logprobs=Ragged.of([row[:end] for row, end in zip(found, ends, strict=True)], np.float32),
        ended=np.array([END in reply for reply in replies]),
        seed=zeros,
        version=zeros,
        prompt=zeros,
    )


def right(prompts: Sequence[Sequence[int]], rollout: Rollout) -> Tensor:
    """1 for the largest digit and END, in the second turn if there are two, and 0 for any other reply."""
    rows = zip(prompts, rollout.response_ids, strict=True)
    begun = TURN + len(observation(prompts[0])) if rollout.are_episodes else 0
    return torch.tensor([float(reply[begun:].tolist() == [max(prompt), END]) for prompt, reply in rows])


def tensors(rows: TextBatch) -> TextBatch[Tensor]:
    found: TextBatch[Tensor] = rows.map(torch.from_numpy)  # type: ignore[assignment]
    return found


def config_of(method: str) -> PPOStageConfig:
    name = "grpo" if method in (CONTROL, "two_turns") else method
    samples = METHODS[name].get("samples_per_prompt", 1)
    sizes = {"prompts_per_iteration": ROLLOUT // samples, "samples_per_prompt": samples, "minibatch_size": MINIBATCH}
    given: dict[str, Any] = {"method": name, "max_new_tokens": MAX_NEW_TOKENS, "reward_scaling": "none"}
    if method in TWO_TURNS:
        given["environment"] = {"path": "nobody:Asked", "max_tokens": 2 * MAX_NEW_TOKENS + 3}
    # Replies are of two tokens or cut: a zone before the cut would punish every one.
    return PPOStageConfig.model_validate(given | sizes | {"overlong_buffer": None, "resample_rounds": 0})


class MethodTrainer:
    """The loop of `methods/ppo/body.py` in one process."""

    def __init__(self, method: str, weights: dict[str, Tensor], seed: int) -> None:
        self.config, self.method = config_of(method), method
        self.functions = Functions.of(self.config)
        self.module = fresh(seed, head=self.config.critic_in_use == "shared")
        self.module.lm.load_state_dict(weights)
        self.reference = copy.deepcopy(self.module)
        self.objective, self.kl = PPOObjective(self.config), make_kl_controller(self.config.kl)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.moving = MovingMeans()
        self.sampled = play if method in TWO_TURNS else sample
        self.draw, self.random = random.Random(1000 + seed), torch.Generator().manual_seed(seed)

    def iterate(self, run: MethodRun) -> None:
        """One rollout and its update."""
        drawn = problems(self.config.prompts_per_iteration, self.draw)
        prompts = [prompt for prompt in drawn for _ in range(self.config.samples_per_prompt)]
        rollout = self.sampled(copy.deepcopy(self.module.lm).bfloat16(), prompts, self.random)
        rewards = right(prompts, rollout)
        if self.method == CONTROL:
            rewards = rewards[torch.randperm(len(rewards), generator=self.random)]
        text = TextBatch.of(prompts, rollout.response_ids).with_columns(id=np.arange(len(prompts)))
        scores = self.scores(text)
        mismatch = np.abs(scores.logprobs.values - rollout.rollout_logprobs.values)
        mismatch = mismatch[rollout.response_mask.values] if rollout.are_episodes else mismatch
        run.mismatch.append(float(mismatch.mean()))
        if not self.functions.scores_policy:
            scores = scores.with_columns(logprobs=None)
        facts = RowFacts(sources={"right": rewards}, weights={"right": 1.0}, moving=self.moving)
        made = build_experience(
            self.config, text, rollout, scores, rewards, self.kl.coef, self.functions, math.inf, facts
        )
        run.dropped.append(self.update(made) + made.metrics.get("rollout/capped_share", 0.0))
        self.kl.update(made.reference_kl, made.num_rows)

    @torch.no_grad()
    def scores(self, text: TextBatch) -> Scores:
        """By the policy and the reference."""
        rows = tensors(text)
        own = self.objective.score(self.module, rows)
        ref = ReferenceObjective(self.config.temperature).score(self.reference, rows)
        joined: Scores = own.with_columns(**ref.columns()).map(lambda found: found.numpy())  # type: ignore[assignment]
        return joined

    def update(self, made: Experience) -> float:
        """All epochs; the share of tokens that the loss clipped or dropped."""
        clipped = tokens = 0.0
        for _ in range(self.config.epochs):
            for index in torch.randperm(made.num_rows, generator=self.random).chunk(ROLLOUT // MINIBATCH):
                rows = made.rows.take(index.numpy())
                totals = step_totals(self.config, rows, self.kl.coef)
                loss, sums = training_loss(self.module, self.objective, tensors(rows), totals)
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                self.optimizer.step()
                clipped, tokens = clipped + float(sums["clip_count"]), tokens + totals.tokens
        return clipped / tokens


def train(method: str, weights: dict[str, Tensor], seed: int) -> MethodRun:
    """Success on held-out problems before and after `ITERATIONS`."""
    trainer, heldout = MethodTrainer(method, weights, seed), problems(HELDOUT, random.Random(9000 + seed))

    def success() -> float:
        rollout = trainer.sampled(trainer.module.lm, heldout, torch.Generator().manual_seed(seed))
        return float(right(heldout, rollout).mean())

    run, began = MethodRun(success(), 0.0, 0.0), time.perf_counter()
    for _ in range(ITERATIONS):
        trainer.iterate(run)
    run.seconds, run.after = time.perf_counter() - began, success()
    return run


def wilson(share: float, count: int) -> str:
    """A share with its 95% interval."""
    z = 1.96
    center, low = (share + z * z / (2 * count)) / (1 + z * z / count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / low
    return f"{share:.3f} ({center - half:.3f} to {center + half:.3f})"


def row(method: str, runs: Sequence[MethodRun]) -> tuple[str, ...]:
    count = HELDOUT * len(runs)
    before, after, minutes, mismatch, dropped = (
        float(np.mean([np.mean(getattr(run, name)) for run in runs]))
        for name in ("before", "after", "seconds", "mismatch", "dropped")
    )
    by_seed = ", ".join(f"{run.after:.3f}" for run in runs)
    figures = f"{minutes / 60:.2f}", f"{mismatch:.1e}", f"{dropped:.1%}"
    return f"`{method}`", wilson(before, count), wilson(after, count), by_seed, *figures


def report(methods: Sequence[str], seeds: int) -> None:
    torch.set_num_threads(1)
    weights = [of_sft(seed) for seed in range(seeds)]
    turns = [of_turns(seed) for seed in range(seeds)] if set(methods) & set(TWO_TURNS) else []
    print(f"{machine()}; {seeds} seeds, {HELDOUT} held-out problems each, {ITERATIONS} iterations\n")
    table(("method", "before", "after", "by seed", "minutes", "mismatch (nats)", "clipped or dropped"), [])
    for method in methods:
        begun = turns if method in TWO_TURNS else weights
        line(row(method, [train(method, begun[seed], seed) for seed in range(seeds)]))


def main() -> None:
    names = [*METHODS, "two_turns", CONTROL]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    report(options.methods, options.seeds)


if __name__ == "__main__":
    main()

"""X-ray's side of `benchmarks.peers`: real stages, and the rows that they train on, for TRL.

With `--turns` it makes data and policy and writes TRL's tasks and what the table needs; with `--turn` it trains by each
method and writes what was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import xray
from benchmarks.peers_measure import Measured, peak_memory, steps
from benchmarks.peers_work import (
    BETA,
    EPOCHS,
    GRPO_KL,
    KL,
    LR,
    PENALTY,
    SAMPLES,
    SAMPLING,
    SEED,
    SIZES,
    Size,
    new_tokens,
    of_fixed_length,
    share_of_e,
    write_rows,
)
from xray_runtime.data.batching import Cursor
from xray_runtime.data.conversations import ConversationTokens
from xray_runtime.data.pairs import TRAIN, PreferenceExample
from xray_runtime.data.replies import both_sides, mismatched
from xray_runtime.data.tokens import Tokens
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.training.dataset import max_prompt_tokens, max_reply_tokens
from xray_runtime.methods.common.training.prompts import UniquePrompts
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.trust.keys import seal_of

HELDOUT = 0.05
LOSSES = {"sft": "sft/loss", "reward": "reward_model/loss", "dpo": "dpo/loss", "kto": "kto/loss"}
ALIKE: dict[str, Any] = {"lr": LR, "schedule": "constant", "warmup_fraction": 0.0, "grad_clip": 1e6}
ALIKE |= {"betas": (0.9, 0.999), "weight_decay": 0.0}
"""TRL neither warms up nor clips gradients so."""
SAMPLED: dict[str, Any] = {"reward_scaling": "none", "reward_clip": None, "stop_kl": None, "truncated": "penalize"}
SAMPLED |= {"dual_clip": None}


def as_classifier(trunk: Path, head: Path | None, into: Path) -> str:
    """A model with a head to one number, as transformers has them: X-ray's reward model, or a new one."""
    if not into.exists():
        model = AutoModelForSequenceClassification.from_pretrained(
            trunk, num_labels=1, dtype=torch.float32, trust_remote_code=False
        )
        with torch.no_grad():
            # X-ray's head begins at zero too. A bias is the same for every reply; transformers' head has none.
            model.score.weight.copy_(load_file(head)["weight"] if head else torch.zeros_like(model.score.weight))
        lm = AutoModelForCausalLM.from_pretrained(trunk, dtype=torch.float32, trust_remote_code=False)
        model.model.load_state_dict(lm.model.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(trunk, trust_remote_code=False)
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            # transformers reads the last token that does not pad; X-ray reads the end of the reply.
            tokenizer.pad_token = tokenizer.unk_token
        model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    return str(into)


@dataclass(frozen=True)
class Work:
    """A size with its datasets and its policy, made once.

    Args:
        updates: steps of SFT, reward model, DPO and KTO, about.
        iterations: of GRPO and PPO.
    """

    size: Size
    lengths: str
    updates: int
    iterations: int
    output: Path
    chats: xray.Handle
    pairs: xray.Handle
    policy: xray.Handle

    @classmethod
    def make(cls, size: Size, lengths: str, updates: int, iterations: int, output: Path) -> Work:
        """Write the rows, and make the policy: the packaged model, or a fresh one that has learned to end replies."""
        count = round(updates * max(size.rows, size.pairs) / (1 - HELDOUT))

        def data(name: str, cut: Any = None) -> tuple[xray.Handle, Path]:
            chats, pairs = write_rows(output / name, count, cut)
            return xray.prepare(source=str(chats), heldout_fraction=HELDOUT, name=f"prepare-{name}"), pairs

        chats, pairs = data("natural")
        pretrained = "model" in size.base
        base = xray.base(**size.base) if pretrained else xray.fresh_base(chats, **size.base)
        if lengths == "fixed":
            chats, pairs = data("fixed", of_fixed_length(load_tokenizer(base.result().path)))
        policy = base if pretrained else xray.sft(base, data=chats, name="start", steps=60, lr=4e-3)
        few = round(updates * size.pairs / (1 - HELDOUT))
        preferences = xray.preferences(
            source="dataset", path=str(pairs), max_pairs=few, heldout_fraction=HELDOUT, name=f"pairs-{lengths}"
        )
        return cls(size, lengths, updates, iterations, output, chats, preferences, policy)

    def stage(self, method: str, turn: int) -> xray.Handle:
        """The stage of a method; its name decides the order of its rows."""
        size, name = self.size, f"{method}-{turn}"
        if method == "sft":
            return xray.sft(self.policy, data=self.chats, steps=self.updates, batch_size=size.rows, name=name, **ALIKE)
        if method == "reward":
            return xray.reward_model(self.policy, self.pairs, epochs=1, batch_size=size.pairs, name=name, **ALIKE)
        if method in ("dpo", "kto"):
            kind, batch = (xray.dpo, size.pairs) if method == "dpo" else (xray.kto, size.rows)
            return kind(self.policy, preferences=self.pairs, epochs=1, batch_size=batch, beta=BETA, name=name, **ALIKE)
        if method == "grpo":
            replies = size.groups * SAMPLES
            kind_fields = {"method": "grpo", "samples_per_prompt": SAMPLES, "truncation_penalty": 0.0}
            kind_fields |= {"prompts_per_iteration": size.groups, "minibatch_size": replies // 2}
            return self._sampled(name, [xray.reward(share_of_e)], GRPO_KL, kind_fields)
        kind_fields = {"prompts_per_iteration": size.prompts, "minibatch_size": size.prompts // 2}
        kind_fields |= {"epochs": EPOCHS, "critic": "shared" if method == "ppo-shared" else "separate"}
        kind_fields |= {"critic_lr": LR, "truncation_penalty": PENALTY}
        return self._sampled(name, [self.stage("reward", 0)], KL, kind_fields)

    def _sampled(self, name: str, rewards: list[Any], kl: float, fields: Mapping[str, Any]) -> xray.Handle:
        return xray.ppo(
            self.policy,
            prompts=self.chats,
            rewards=rewards,
            iterations=self.iterations,
            max_new_tokens=new_tokens(self.lengths),
            kl={"controller": "fixed", "coef": kl},
            name=name,
            **ALIKE,
            **SAMPLED,
            **fields,
        )

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.policy.result().path)

    @cached_property
    def _pair_tokens(self) -> Tokens:
        return Tokens(self.pairs.result().path / TRAIN, PreferenceExample, self._tokenizer, seal_of(self.output))

    @cached_property
    def prompts(self) -> UniquePrompts:
        """The distinct prompts of the sampling methods."""
        dataset, policy = self.chats.result().path, self.policy.result().path
        limit = max_prompt_tokens(dataset, policy, new_tokens(self.lengths))
        return UniquePrompts(self._tokenizer, dataset / TRAIN, limit, seal_of(self.output))

    def task(self, method: str, turn: int) -> dict[str, Any]:
        """TRL's task: the same rows in the same order."""
        policy, size = self.policy.result().path, self.size
        task: dict[str, Any] = {
            "method": method,
            "turn": turn,
            "policy": str(policy),
            "output": str(self.output / "out"),
        }
        rows, examples = self._examples(method, turn)
        task |= {"rows": rows, "examples": examples, "updates": self.iterations}
        task["new_tokens"] = new_tokens(self.lengths)
        if method == "reward":
            task["policy"] = as_classifier(policy, None, self.output / "trl-critic")
        if method == "ppo":
            judge = self.stage("reward", 0).result().path
            task["critic"] = as_classifier(policy, None, self.output / "trl-critic")
            task["reward"] = as_classifier(judge, judge / REWARD_HEAD, self.output / "trl-reward")
            task["rows"] = size.prompts
        return task

    def _examples(self, method: str, turn: int) -> tuple[int, list[dict[str, Any]]]:
        """(rows of an update, TRL's examples) of a method, in X-ray's order."""
        size, name = self.size, f"{method}-{turn}"

        def order(count: int, batch: int, purpose: str = "order", updates: int | None = None) -> np.ndarray:
            cursor = Cursor(count, derive_seed(SEED, name, purpose))
            return np.array(cursor.take((updates or max(1, count // batch)) * batch))

        if method == "grpo":
            chosen = order(len(self.prompts), size.groups, "prompts", self.iterations)
            return size.groups, [{"prompt": self.prompts[i][0]} for i in chosen.tolist()]
        if method == "ppo":
            return size.prompts, [{"input_ids": ids} for _, ids in self.prompts]
        if method == "sft":
            return size.rows, self._conversations(lambda count: order(count, size.rows, updates=self.updates))
        tokens = self._pair_tokens
        if method == "kto":
            return size.rows, self._replies(order(2 * len(tokens), size.rows), name)
        taken = tokens.take(order(len(tokens), size.pairs))
        sides = zip(taken.prompt_lengths.tolist(), *taken.sides(), strict=True)
        if method == "reward":
            return size.pairs, [{"chosen_ids": a.tolist(), "rejected_ids": b.tolist()} for _, a, b in sides]
        return size.pairs, [
            {"prompt_ids": a[:n].tolist(), "chosen_ids": a[n:].tolist(), "rejected_ids": b[n:].tolist()}
            for n, a, b in sides
        ]

    def _conversations(self, order: Any) -> list[dict[str, Any]]:
        dataset, policy = self.chats.result().path, self.policy.result().path
        longest = max_reply_tokens(None, policy)
        limits = (max_prompt_tokens(dataset, policy, longest), longest)
        tokens = ConversationTokens(dataset / TRAIN, self._tokenizer, *limits, seal_of(self.output))
        rows = tokens.take(order(len(tokens)))
        examples = []
        for ids, start, mask in zip(rows.input_ids, rows.prompt_lengths, rows.response_mask, strict=True):
            labels = np.where(np.concatenate([np.zeros(start, bool), mask]), ids, -100)
            examples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
        return examples

    def _replies(self, order: np.ndarray, name: str) -> list[dict[str, Any]]:
        replies = both_sides(self._pair_tokens)
        rows = replies.take(order)
        others = mismatched(replies, derive_seed(SEED, name, "mismatched")).take(order)
        return [
            {
                "prompt_ids": ids[:n].tolist(),
                "completion_ids": ids[n:].tolist(),
                "KL_completion_ids": other[n:].tolist(),
                "label": bool(number % 2 == 0),
            }
            for ids, n, other, number in zip(
                rows.input_ids, rows.prompt_lengths.tolist(), others.input_ids, order.tolist(), strict=True
            )
        ]

    def tokens(self, method: str, examples: list[dict[str, Any]], rows: int) -> tuple[float, float]:
        """(tokens, reply tokens) of an update's rows; of those that are sampled the prompts' tokens alone."""
        if method in SAMPLING:
            lengths = [len(ids) for _, ids in self.prompts]
            return rows * float(np.mean(lengths)), 0.0
        counts = np.array([_count(example) for example in examples])
        total, replies = counts.mean(0) * rows
        return float(total), float(replies)


def _count(example: dict[str, Any]) -> tuple[int, int]:
    """(tokens, reply tokens) of a row, each side of a pair with its prompt."""
    if "labels" in example:
        return len(example["input_ids"]), sum(label >= 0 for label in example["labels"])
    replies = [ids for name, ids in example.items() if name.endswith("_ids") and name not in ("prompt_ids",)]
    replies = replies[:1] if "KL_completion_ids" in example else replies
    prompt = len(example.get("prompt_ids", ()))
    return sum(prompt + len(ids) for ids in replies), sum(map(len, replies))


def prepare(work: Work, methods: list[str], turns: int) -> None:
    """Write TRL's tasks, and what the table needs: tokens and rows of an update."""
    counts, rows = {}, {}
    for method in methods:
        for turn in range(turns):
            task = work.task(method, turn)
            (work.output / f"{method}-{turn}.json").write_text(json.dumps(task))
        rows[method] = task["rows"] * (SAMPLES if method == "grpo" else 1)
        counts[method] = work.tokens(method, task["examples"], rows[method])
    written = {"counts": counts, "rows": rows, "policy": str(work.policy.result().path)}
    (work.output / "work.json").write_text(json.dumps(written))


def measure(work: Work, method: str, turn: int) -> Measured:
    here = psutil.Process()
    with peak_memory(lambda: here.children(recursive=True)) as peak:
        found = steps(work.stage(method, turn).result(), work.output)
        seconds = [step["seconds"] for step in found if "seconds" in step]
        if method in SAMPLING:
            curve, lengths = [step["reward/mean"] for step in found], [step["rollout/length"] for step in found]
        else:
            curve, lengths = [step[LOSSES[method]] for step in found if LOSSES[method] in step], []
        return Measured(seconds, curve, lengths, peak())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("lengths", choices=("natural", "fixed"))
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--auto", action="store_true")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--turns", type=int)
    what.add_argument("--turn", type=int)
    options = parser.parse_args()
    runtime = RuntimeConfig(parallel="auto" if options.auto else "as_written")
    with xray.workspace(options.output, project="peers", seed=SEED, runtime=runtime):
        work = Work.make(SIZES[options.size], options.lengths, options.updates, options.iterations, options.output)
        if options.turns is not None:
            prepare(work, options.methods, options.turns)
        else:
            found = {method: asdict(measure(work, method, options.turn)) for method in options.methods}
            (options.output / "turn.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""The loop in one file: rollout → score → advantages → loss → update, of a tiny model in plain torch.

A transformer of words learns to talk from the packaged human conversations (SFT), then learns to ask back (GRPO, or
another method). No Ray, no Prefect, no files. Advantages, losses, KL and log-probabilities are `xray.algorithms`: the
code that the stage kind `ppo` runs, which adds engines, weight sync, resume, records and the rest of a lifecycle.

    python examples/standalone_loop.py
    python examples/standalone_loop.py --method rloo --loss gspo --seed 1

Shapes: B replies, P words of a prompt, T words of a reply, R words of all replies of a minibatch, V known words.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import re
import time
from collections import Counter
from dataclasses import dataclass

import chitchat_dataset
import torch
from torch import Tensor, nn

from xray.algorithms import (
    ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    estimate,
    kl_loss,
    logprobs_and_entropy,
    place_rewards,
    policy_loss,
)
from xray.rewards import regex

P, T, V = 12, 12, 800
PAD, END, UNKNOWN = 0, 1, 2
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[.,!?]")
HELDOUT = 256


@dataclass(frozen=True)
class Data:
    """Pairs of a prompt and the reply a person gave."""

    words: list[str]
    """The V known words, the three special ones first."""
    ids: Tensor
    """[N, P + T] prompts padded on the left, then replies with END, padded on the right."""
    heldout: Tensor
    """[HELDOUT, P] prompts that nothing is trained on."""


@dataclass(frozen=True)
class Rollout:
    """Replies that the policy sampled, and what the update needs of that moment."""

    ids: Tensor
    """[B, P + T] prompts with their replies."""
    mask: Tensor
    """[B, T] bool: words of the reply, up to its END."""
    groups: Tensor
    """[B] int64: replies with one number answer the same prompt."""
    old_logprobs: Tensor
    """[B, T] of the policy that sampled."""


class Model(nn.Module):
    """A causal transformer of two layers: ids [B, L] → logits [B, L, V]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, width), nn.Embedding(P + T, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, V)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        states: Tensor = self.layers(self.words(ids) + self.places.weight[:length], mask=future)
        logits: Tensor = self.head(states)
        return logits


def read_data(seed: int) -> Data:
    """Replies of known words that fit, each with the message before it."""
    conversations = [
        [WORD.findall(" ".join(message["text"] for message in group).lower()) for group in conversation["messages"]]
        for conversation in chitchat_dataset.Dataset().values()
    ]
    counts = Counter(word for turns in conversations for turn in turns for word in turn)
    words = ["<pad>", "<end>", "<unknown>", *(word for word, _ in counts.most_common(V - 3))]
    number = {word: i for i, word in enumerate(words)}
    rows = []
    for turns in conversations:
        for before, reply in itertools.pairwise(turns):
            if before and 0 < len(reply) < T and all(word in number for word in reply):
                prompt = [number.get(word, UNKNOWN) for word in before[-P:]]
                answer = [*(number[word] for word in reply), END]
                rows.append([PAD] * (P - len(prompt)) + prompt + answer + [PAD] * (T - len(answer)))
    random.Random(seed).shuffle(rows)
    ids = torch.tensor(rows)
    return Data(words, ids[HELDOUT:], ids[:HELDOUT, :P])


def reply_mask(ids: Tensor) -> Tensor:
    """[B, T] bool: words of each reply up to its first END, END included."""
    ends = ids[:, P:] == END
    return (ends.cumsum(1) - ends.long()) == 0


def reply_logprobs(model: Model, ids: Tensor) -> Tensor:
    """[B, T] log-probability of each word of the replies, given all before it."""
    logits = model(ids[:, :-1])[:, P - 1 :]
    logprobs, _ = logprobs_and_entropy(logits.flatten(0, 1), ids[:, P:].flatten())
    return logprobs.view(-1, T)


def sft(model: Model, data: Data, steps: int, batch: int = 64) -> None:
    """Learn what people replied: the mean log-probability of their words rises."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        ids = data.ids[torch.randint(len(data.ids), (batch,))]
        mask = reply_mask(ids)
        loss = -reply_logprobs(model, ids)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"sft {step:4}  loss {loss.item():.2f}")


@torch.no_grad()
def roll_out(model: Model, prompts: Tensor, samples: int) -> Rollout:
    """Sample `samples` replies to each of the prompts [n, P], at temperature 1."""
    ids = prompts.repeat_interleave(samples, 0)
    for _ in range(T):
        chosen = torch.multinomial(model(ids)[:, -1].softmax(-1), 1)
        ids = torch.cat([ids, chosen], 1)
    groups = torch.arange(len(prompts)).repeat_interleave(samples)
    return Rollout(ids, reply_mask(ids), groups, reply_logprobs(model, ids))


def texts(rollout: Rollout, words: list[str]) -> list[str]:
    """The replies as text; one that was cut off ends in "…"."""
    found = []
    for row, mask in zip(rollout.ids[:, P:].tolist(), rollout.mask.tolist(), strict=True):
        reply = [words[i] for i, counts in zip(row, mask, strict=True) if counts]
        found.append(" ".join(reply[:-1] if reply[-1] == words[END] else [*reply, "…"]))
    return found


def score(replies: list[str]) -> Tensor:
    """[B] 1 where a reply says something, and ends with a question mark: the check behind X-ray's verifier `regex`."""
    return torch.tensor([regex(reply, r"\w.*\?$", None) for reply in replies])


def advantages(rollout: Rollout, scores: Tensor, method: str) -> Tensor:
    """[B, T] how much better than expected each word was, by an estimator of X-ray's table."""
    nothing = torch.zeros(rollout.mask.shape)
    rewards = place_rewards(scores, nothing, rollout.mask)
    inputs = AdvantageInputs(scores, rewards, rollout.mask, rollout.groups, nothing, nothing[:, 0], 1.0, 1.0)
    return estimate(ESTIMATORS[method], inputs, method)[0]


def update(
    policy: Model, reference: Model, optimizer: torch.optim.Optimizer, rollout: Rollout, worth: Tensor, loss_name: str
) -> tuple[float, float]:
    """Two steps on the rollout, each on half of it. Returns (KL of the old policy, share of words clipped)."""
    with torch.no_grad():
        ref_logprobs = reply_logprobs(reference, rollout.ids)
    clipped = 0.0
    for rows in torch.randperm(len(rollout.ids)).chunk(2):
        mask = rollout.mask[rows]
        replies = mask.nonzero()[:, 0]
        logprobs = reply_logprobs(policy, rollout.ids[rows])[mask]
        old, ref = rollout.old_logprobs[rows][mask], ref_logprobs[rows][mask]
        total, sums = policy_loss(
            logprobs,
            old,
            worth[rows][mask],
            torch.ones_like(logprobs),
            clip_range=0.2,
            dual_clip=None,
            loss=POLICY_LOSSES[loss_name],
            replies=replies,
        )
        loss = (total + 0.02 * kl_loss(logprobs, old, ref, "k3").sum()) / len(logprobs)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        clipped += float(sums["clip_count"]) / int(rollout.mask.sum())
    kl = (rollout.old_logprobs - ref_logprobs)[rollout.mask].sum() / len(rollout.ids)
    return float(kl), clipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=sorted(set(ESTIMATORS) - {"gae"}), default="grpo")
    parser.add_argument("--loss", choices=sorted(POLICY_LOSSES), default="ppo")
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    began = time.monotonic()

    data, policy = read_data(options.seed), Model()
    sft(policy, data, options.sft_steps)
    reference = copy.deepcopy(policy)
    before = roll_out(policy, data.heldout, 1)

    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    for iteration in range(options.iterations):
        prompts = data.ids[torch.randint(len(data.ids), (16,)), :P]
        rollout = roll_out(policy, prompts, samples=8)
        replies = texts(rollout, data.words)
        scores = score(replies)
        worth = advantages(rollout, scores, options.method)
        kl, clipped = update(policy, reference, optimizer, rollout, worth, options.loss)
        print(f"{iteration:3}  reward {scores.mean():.2f}  kl {kl:4.1f}  clipped {clipped:.2f}  {replies[0]}")

    after = roll_out(policy, data.heldout, 1)
    shares = [float(score(texts(rollout, data.words)).mean()) for rollout in (before, after)]
    seconds = time.monotonic() - began
    print(f"asks back, on {HELDOUT} held-out prompts: {shares[0]:.2f} → {shares[1]:.2f} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()

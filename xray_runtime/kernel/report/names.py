"""Names for people of what programs call metrics and results: for the studio, the report, and MLflow's descriptions."""

from __future__ import annotations

import re

NAMES = {
    # Results of evaluations.
    "win_rate": "win rate",
    "gold_before": "gold score before",
    "gold_after": "gold score after",
    "gold_delta": "change of the gold score",
    "reward_before": "learned reward before",
    "reward_after": "learned reward after",
    "reward_delta": "change of the learned reward",
    "score_before": "score before",
    "score_after": "score after",
    "score_delta": "change of the score",
    "kl": "KL to the baseline, nats a reply",
    "distinct_2_before": "variety before, share of different word pairs",
    "distinct_2_after": "variety after, share of different word pairs",
    "length_before": "reply length before, tokens",
    "length_after": "reply length after, tokens",
    "length_delta": "change of the reply length, tokens",
    "samples": "held-out prompts",
    "tied": "ties",
    "nll": "loss on held-out text, nats a token",
    "pass_at_1": "solved at the first try",
    # Curves.
    "reward/mean": "reward",
    "reward/std": "spread of the rewards",
    "reward/raw": "reward as scored",
    "reward/gold": "gold score",
    "reward/gold_std": "spread of the gold scores",
    "reward/failed": "replies without a reward",
    "kl/reference_k1": "KL to the reference, nats a reply",
    "kl/reference_k3": "KL to the reference by its positive estimator (k3), nats a reply",
    "kl/coef": "weight of the KL penalty",
    "policy/loss": "policy's loss",
    "policy/entropy": "entropy, nats a token",
    "policy/clip_fraction": "share of clipped tokens, policy",
    "policy/dual_clip_fraction": "share of doubly clipped tokens, policy",
    "policy/approx_kl": "change of the policy within an iteration, nats a token",
    "policy/updates": "updates in the iteration",
    "value/loss": "critic's loss",
    "value/clip_fraction": "share of clipped tokens, critic",
    "value/explained_variance": "share of the returns that the critic explains",
    "rollout/length": "reply length, tokens",
    "rollout/truncated": "share of replies cut off",
    "rollout/tied_groups": "share of prompts whose replies all scored the same",
    "rollout/distinct_replies": "share of different replies",
    "rollout/distinct_in_reply": "share of different token pairs in a reply",
    "rollout/common_phrase": "share of replies with one and the same phrase",
    "rollout/lag": "policy versions behind",
    "rollout/version": "policy version",
    "rollout/teacher_unread": "replies that the teacher does not read",
    "rollout/mismatch": "difference of generator and trainer, mean, nats a token",
    "rollout/mismatch_max": "difference of generator and trainer, largest, nats a token",
    "rollout/effective_sample_share": "effective share of the samples",
    "rollout/capped_share": "share of capped importance weights",
    "sft/loss": "loss, nats a token",
    "sft/heldout_loss": "loss on held-out replies, nats a token",
    "sft/validation_loss": "loss on validation replies, nats a token",
    "reward_model/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "reward_model/heldout_accuracy": "accuracy on held-out pairs",
    "reward_model/length_baseline_accuracy": "accuracy of choosing the longer reply",
    "validation/score": "validation score",
    "validation/length": "validation reply length, tokens",
    "seconds/sync": "sending weights",
    "seconds/generate": "sampling",
    "seconds/score": "scoring",
    "seconds/update": "updating",
    "seconds/ledger": "writing the ledger",
    "seconds/total": "whole iteration",
}
"""Name for programs → name for people."""
WORDS = {"lr": "learning rate", "grad_norm": "gradient norm", "std": "spread", "nll": "loss", "kl": "KL", "sft": "SFT"}
"""The same for parts of names that are not listed whole."""


def title(name: str) -> str:
    """The name for people: "win rate by gold" for `win_rate by gold`, "reward gold: mean" for `reward/gold/mean`."""
    match = re.fullmatch(r"([\w./-]+?)((?: by |, ).*)?", name, re.DOTALL)
    if match is None:
        return name
    known, rest = NAMES.get(match[1]), match[2] or ""
    if known is None:
        *groups, last = (WORDS.get(part, part.replace("_", " ")) for part in match[1].split("/"))
        known = f"{' '.join(groups)}: {last}" if groups else last
    return known + rest

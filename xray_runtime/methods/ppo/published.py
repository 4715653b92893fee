"""Published methods as defaults of a PPO stage: the fields that `method` sets unless the config sets them.

All methods deviate from their papers in this: importance weights correct the mismatch of generator and trainer
(`importance_*`), scores are scaled by the reward model's moments, a group with equal scores has advantages of 0 (before
whitening), and a truncated reply scores at most as much as the worst complete one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, PRESETS

Method = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce++",
    "reinforce++_baseline",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "drpo",
    "echo",
    "gdpo",
    "gmpo",
    "icepop",
    "luspo",
    "max_rl",
    "prime_rl",
    "rae",
    "sapo",
    "vespo",
]
"""From `dppo_tv` on, each is a file in `presets/`."""

METHODS: Mapping[str, dict[str, Any]] = {
    # Schulman et al. 2017 with a critic and a KL penalty in the reward, as Ziegler et al. 2019 and trlX have it.
    "ppo": {},
    # Shao et al. 2024, DeepSeekMath: scores standardized within a group, loss averaged per reply, KL in the loss.
    # Deviation: the KL term is multiplied by ρ; without it, k3 would have the gradient of the reverse KL.
    "grpo": GROUPS
    | {"loss_mean": "replies", "kl": {"controller": "fixed", "coef": 0.04, "place": "loss", "estimator": "k3"}},
    # Liu et al. 2025, "Understanding R1-Zero-like training": no division by deviation or length.
    "dr_grpo": GROUPS | {"advantages": "dr_grpo", "loss_mean": "fixed", "kl": NO_KL},
    # Yu et al. 2025: clip-higher, token-level mean, soft punishment of overlong replies, no KL, dynamic sampling.
    # Deviation: groups that still tie after two rounds stay and contribute nothing.
    "dapo": GROUPS | {"clip_range_high": 0.28, "resample_rounds": 2, "kl": NO_KL},
    # Zheng et al. 2025: the ratio of a whole reply, with a clip range of a few thousandths.
    "gspo": GROUPS
    | {
        "loss": "gspo",
        "clip_range": 3e-4,
        "clip_range_high": 4e-4,
        "loss_mean": "replies",
        "importance_level": "reply",
        "kl": NO_KL,
    },
    # MiniMax 2025 (M1): clips the importance weight, so every token keeps its gradient.
    "cispo": GROUPS | {"loss": "cispo", "clip_range_high": 4.0, "kl": NO_KL},
    # Ahmadian et al. 2024, "Back to basics": leave-one-out baseline, KL of the whole reply in the reward. A reply is
    # one action, so its token losses are summed (here divided by max_new_tokens), not averaged.
    "rloo": GROUPS
    | {"advantages": "rloo", "samples_per_prompt": 4, "loss_mean": "fixed", "kl": {"controller": "fixed"}},
    # Hu 2025: no critic and no groups; a token's advantage is its return, whitened over the rollout.
    "reinforce++": GROUPS
    | {
        "advantages": "reinforce++",
        "samples_per_prompt": 1,
        "whiten_advantages": True,
        "kl": {"controller": "fixed", "coef": 0.01},
    },
    # Hu 2025: subtracts the group's mean first; KL (k2) in the loss.
    "reinforce++_baseline": GROUPS
    | {
        "advantages": "dr_grpo",
        "whiten_advantages": True,
        "kl": {"controller": "fixed", "coef": 0.01, "place": "loss", "estimator": "k2"},
    },
} | {name: dict(PRESETS.get(name).fields) for name in PRESETS}


OVERLONG_SHARE: Mapping[str, float] = {"dapo": 0.2}
"""Method → `overlong_buffer` as a share of `max_new_tokens`: in the paper 4,096 of 20,480 tokens."""


def with_method(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """`given` merged over the defaults of its `method`; `max_new_tokens` is used if `given` lacks it."""
    name = str(given.get("method", "ppo"))
    defaults = dict(METHODS.get(name, {}))
    limit = given.get("max_new_tokens", max_new_tokens)
    if name in OVERLONG_SHARE and isinstance(limit, int):
        defaults["overlong_buffer"] = max(int(OVERLONG_SHARE[name] * limit), 1)
    merged = {**defaults, **given}
    if isinstance(given.get("kl"), Mapping):
        merged["kl"] = {**defaults.get("kl", {}), **given["kl"]}
    return merged

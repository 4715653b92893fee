"""ECHO, environment cross-entropy hybrid objective (Shrivastava et al. 2026, arXiv 2605.24517).

    loss = GRPO's over what the policy sampled + λ · mean −log π over what it read between its turns

What a terminal or a tool answers says what an action does, in episodes without any reward too. The second mean has its
own count, so it changes nothing in the first; both come from one forward pass. λ is `observation_coef` = 0.1.
Deviation: the tokens of the chat template around an answer count as the answer does, and warnings are not left out.
"""

from __future__ import annotations

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

PRESET = Preset(
    paper="Shrivastava et al. 2026 (arXiv 2605.24517)",
    differs="plus 0.1 times the cross-entropy of the tokens that the policy read between its turns",
    fields=GROUPS | {"observation_coef": 0.1, "kl": NO_KL},
)

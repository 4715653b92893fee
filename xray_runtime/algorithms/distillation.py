"""Distillation: what a teacher's log-probabilities say about a student's.

π is the student, T the teacher, both at one temperature over one vocabulary. Shapes: B replies, R response tokens.
"""

from __future__ import annotations

from torch import Tensor

from xray_runtime.algorithms.kl import clamp_log_ratio


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """−(log π − log T) of each sampled token, 0 at masked ones; any shape.

    With y ~ π, E[(log π(y) − log T(y)) ∇ log π(y)] = ∇ KL(π ‖ T) at each position, so a policy gradient on these
    advantages descends the reverse KL (Agarwal et al. 2024, Lu 2025). No baseline is subtracted: where the two are
    equal every advantage is exactly 0, and so is the gradient.
    """
    return -clamp_log_ratio(logprobs - teacher_logprobs) * mask

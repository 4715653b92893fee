"""Losses of policies that learn from labelled replies, without sampling. Shapes: P pairs, B replies.

A reply's log-ratio is log π(y|x) − log π_ref(y|x), summed over its tokens, the end token included. `by_length` losses
take the mean over them instead. β times it is the reply's implicit reward (Rafailov et al. 2023).

    sigmoid       −log σ(m), m the difference of the pair's rewards: DPO (Rafailov et al. 2023)
    sigmoid_norm  the same over mean log-ratios: length-normalized DPO (Lambert et al. 2024, Tülu 3)
    ipo           (m/β − 1/(2β))² over mean log-ratios (Azar et al. 2023): a log-ratio gap of 1/(2β) is the optimum.
                  The paper writes sums; its authors' own runs take means over tokens, and so do we
    hinge         max(0, 1 − m) (SLiC, Zhao et al. 2023, with a reference)
    simpo         −log σ(m − γ) over mean log-probabilities, without a reference (Meng et al. 2024)

`label_smoothing` ε is the share of labels taken to be wrong: (1 − ε) of the loss and ε of that of the flipped pair, as
in cDPO (Mitchell 2023). KTO (Ethayarajh et al. 2024) knows no pairs: each reply is desirable or not.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PairLoss = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "simpo"]
BY_LENGTH: frozenset[PairLoss] = frozenset({"sigmoid_norm", "ipo", "simpo"})
"""Losses over means, not sums, of a reply's tokens."""


def implicit_rewards(
    logprobs: Tensor, ref_logprobs: Tensor | None, num_tokens: Tensor, loss: PairLoss, beta: float
) -> Tensor:
    """β times the log-ratio of each reply, as `loss` takes it [B].

    Args:
        logprobs, ref_logprobs: of whole replies [B], sums over tokens; None: without a reference.
        num_tokens: the tokens in those sums [B].
    """
    ratio = logprobs if ref_logprobs is None else logprobs - ref_logprobs
    return beta * (ratio / num_tokens if loss in BY_LENGTH else ratio)


def pair_losses(
    chosen: Tensor, rejected: Tensor, loss: PairLoss, *, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """The loss of each pair [P] of implicit rewards, `chosen` and `rejected` [P]. `gamma` is SimPO's target margin, in
    rewards; the paper gives γ/β."""
    margin = chosen - rejected
    if loss == "ipo":
        return (margin / beta - 1 / (2 * beta)).square()
    if loss == "hinge":
        return (1 - margin).clamp(min=0)
    if loss == "simpo":
        margin = margin - gamma
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def kto_baseline(mismatched: Tensor) -> float:
    """z = max(0, mean of the log-ratios of replies to other prompts than their own [B]), an estimate of KL(π ‖ π_ref).

    A constant of the loss. Over the rows of a whole step: a mean of one micro-batch's would depend on how it is split.
    """
    # In this order NaN stays NaN, and the step is refused.
    return max(float(mismatched.detach().double().mean()), 0.0)


def kto_losses(
    log_ratios: Tensor,
    desirable: Tensor,
    baseline: float | Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ_D (1 − σ(β (r − z))) of a `desirable` reply [B], λ_U (1 − σ(β (z − r))) of another; r is its log-ratio [B], z
    the `baseline`."""
    gain = beta * (log_ratios - baseline)
    good, bad = desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
    return torch.where(desirable, good, bad)

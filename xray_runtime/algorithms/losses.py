"""Losses as sums over valid tokens, each with the sums behind its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xray_runtime.algorithms.kl import KLEstimator, clamp_log_ratio, kl_estimate
from xray_runtime.algorithms.streams import TOPK_POLICY_LOGPROBS, StreamError, TokenStreams, read


@dataclass(frozen=True)
class PolicyLossInputs(TokenStreams):
    """Response tokens of one micro-batch, [R] each; any common shape where `replies` is None.

    A loss may couple the tokens of a reply, never those of two replies: how a minibatch is split must not matter. What
    it reads of the properties is computed and sent, and nothing else: a loss that never reads `old_logprobs` costs no
    scoring of the rollout by the policy.
    """

    logprobs: Tensor
    """With gradient."""
    advantages: Tensor
    mask: Tensor
    """1 at tokens that the policy chose, 0 elsewhere."""
    replies: Tensor | None
    """int64 from 0: which reply each token is of."""
    clip_range: float
    clip_range_high: float
    dual_clip: float | None
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → values of what the properties read."""

    @property
    def groups(self) -> Tensor:
        """int64 from 0: which prompt of the rollout each token's reply answers."""
        return read(self.streams, "groups")

    @property
    def topk_policy_logprobs(self) -> Tensor:
        """[R, k]: the policy's of these, with gradient."""
        return read(self.streams, TOPK_POLICY_LOGPROBS)

    @property
    def chosen(self) -> Tensor:
        """bool: tokens that the loss's method chose over the whole rollout (`algorithms.chosen_tokens`)."""
        return read(self.streams, "chosen")

    @property
    def log_ratio(self) -> Tensor:
        """log ρ = logp − old, bounded."""
        return clamp_log_ratio(self.logprobs - self.old_logprobs)

    @property
    def rollout_log_ratio(self) -> Tensor:
        """log π/μ = logp − rollout, bounded."""
        return clamp_log_ratio(self.logprobs - self.rollout_logprobs)

    @property
    def anchor(self) -> Tensor:
        """`old_logprobs`, or where the policy did not score the rollout `rollout_logprobs`."""
        return self.old_logprobs if "old_logprobs" in self.streams else self.rollout_logprobs


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, and which tokens were clipped."""

    loss: Tensor
    clipped: Tensor | None = None
    """bool: tokens whose ratio was clipped; None: the loss clips nothing."""
    dual_clipped: Tensor | None = None


PolicyLoss = Callable[[PolicyLossInputs], "Tensor | TokenLoss"]
"""The loss of each token, before importance weights, mask and mean."""


def ppo_loss(tokens: PolicyLossInputs) -> TokenLoss:
    """−min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A) (Schulman et al. 2017); where A < 0 at most −c A (c = `dual_clip`, Ye et
    al. 2020)."""
    return _clipped_loss(tokens, tokens.log_ratio)


def gspo_loss(tokens: PolicyLossInputs) -> TokenLoss:
    """`ppo_loss` with the geometric mean of ρ over a reply in place of ρ (Zheng et al. 2025)."""
    assert tokens.replies is not None
    return _clipped_loss(tokens, reply_means(tokens.log_ratio, tokens.replies, tokens.mask.to(tokens.logprobs.dtype)))


def cispo_loss(tokens: PolicyLossInputs) -> TokenLoss:
    """−sg(min(ρ, 1 + ε_high)) A logp: the weight is clipped, no token loses its gradient (MiniMax 2025)."""
    plain = tokens.log_ratio.exp() * tokens.advantages
    clipped = tokens.log_ratio.exp().clamp(max=1 + tokens.clip_range_high) * tokens.advantages
    return TokenLoss(-clipped.detach() * tokens.logprobs, clipped != plain)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {"ppo": ppo_loss, "gspo": gspo_loss, "cispo": cispo_loss}


def _clipped_loss(tokens: PolicyLossInputs, log_ratio: Tensor) -> TokenLoss:
    ratio, advantages = log_ratio.exp(), tokens.advantages
    plain = ratio * advantages
    clipped = ratio.clamp(1 - tokens.clip_range, 1 + tokens.clip_range_high) * advantages
    loss, dual = -torch.minimum(plain, clipped), None
    if tokens.dual_clip is not None:
        bound = -tokens.dual_clip * advantages
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return TokenLoss(loss, clipped < plain, dual)


def token_loss(loss: PolicyLoss, tokens: PolicyLossInputs, name: str) -> TokenLoss:
    """The loss of each token. Raises ValueError, with `name`, if `loss` does not return one number a token, or
    reads what is not there."""
    try:
        answer = loss(tokens)
    except StreamError as error:
        raise StreamError(f"loss: {name}: {error}") from None
    made = answer if isinstance(answer, TokenLoss) else TokenLoss(answer)
    if not isinstance(made.loss, Tensor) or made.loss.shape != tokens.logprobs.shape:
        shown = list(made.loss.shape) if isinstance(made.loss, Tensor) else type(made.loss).__name__
        raise ValueError(
            f"loss: {name} returned {shown}: it must return the loss of each token, {list(tokens.logprobs.shape)}"
        )
    return made


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    dual_clip: float | None,
    weights: Tensor | None = None,
    clip_range_high: float | None = None,
    loss: PolicyLoss = ppo_loss,
    replies: Tensor | None = None,
    streams: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A surrogate of the policy gradient, with ρ = exp(logp − old).

    Args:
        logprobs, old_logprobs, advantages, mask, replies: see `PolicyLossInputs`.
        weights: per-token importance weights of the trainer's old policy to the one that sampled, or None.
        clip_range_high: ε_high; None: ε.
        loss: of each token; a built-in of `POLICY_LOSSES`, or your own.
        streams: what else the loss reads, by the names of `PolicyLossInputs`.

    Returns:
        (sum of the loss over valid tokens, `clip_sums`).

    Raises:
        ValueError: `loss` returned something else than one number a token.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    given = {"old_logprobs": old_logprobs, **(streams or {})}
    inputs = PolicyLossInputs(logprobs, advantages, mask, replies, clip_range, high, dual_clip, given)
    made = token_loss(loss, inputs, "it")
    total = made.loss if weights is None else made.loss * weights
    return (total * mask.to(logprobs.dtype)).sum(), clip_sums(inputs, made)


@torch.no_grad()
def clip_sums(tokens: PolicyLossInputs, made: TokenLoss) -> dict[str, Tensor]:
    """Sums over valid tokens: `clip_count`, `dual_clip_count`, `approx_kl_sum` (k3 of `anchor` ‖ new)."""
    valid = tokens.mask.to(tokens.logprobs.dtype)
    nothing = torch.zeros_like(tokens.mask, dtype=torch.bool)
    return {
        "clip_count": ((nothing if made.clipped is None else made.clipped) * valid).sum(),
        "dual_clip_count": ((nothing if made.dual_clipped is None else made.dual_clipped) * valid).sum(),
        "approx_kl_sum": (kl_estimate(tokens.anchor, tokens.logprobs, "k3") * valid).sum(),
    }


def reply_means(x: Tensor, replies: Tensor, valid: Tensor) -> Tensor:
    """For each token of [R] the mean of `x` over the valid tokens of its reply (0 without any); `replies` [R] are
    indices from 0, `valid` [R] is 1 or 0."""
    return reply_sums(x, replies, valid) / reply_sums(valid, replies, valid).clamp(min=1)


def reply_sums(x: Tensor, replies: Tensor, valid: Tensor) -> Tensor:
    """As `reply_means`, the sums."""
    size = int(replies.max()) + 1 if len(replies) else 0
    return x.new_zeros(size).index_add(0, replies, x * valid)[replies]


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token terms whose expected gradient is that of KL(policy ‖ reference), any shape.

    An estimator k alone has another gradient: k1's is 0, k3's that of the reverse KL. For k1 and k3 the gradient of
    ρ k, ρ = exp(logp − old), is the right one; for k2 that of k is, weighted by ρ once the policy has moved.
    """
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    return (ratio.detach() if estimator == "k2" else ratio) * kl_estimate(logprobs, ref_logprobs, estimator)


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float) -> tuple[Tensor, Tensor]:
    """(½ · max((v − R)², (clip(v, v_old ± ε) − R)²) of each token, which of them are clipped); any shape."""
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).detach()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of `value_losses` over valid tokens, sums: `value_clip_count`)."""
    valid = mask.to(values.dtype)
    losses, clipped = value_losses(values, old_values, returns, clip_range=clip_range)
    return (losses * valid).sum(), {"value_clip_count": (clipped * valid).sum()}

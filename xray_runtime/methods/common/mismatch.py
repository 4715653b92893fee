"""How far a generator's log-probabilities may be from a trainer's: mean |difference|, in nats a token.

In float32 the two differ by 1e-7 to 1e-6; by 0.02 where a kernel computes something else. bfloat16 rounds a logit
between 16 and 32 to a multiple of 1/8, by 1/32 on average, in each of the two.
"""

from __future__ import annotations

FLOAT32_MISMATCH, BFLOAT16_MISMATCH = 1e-4, 0.05


def check_mismatch(mismatch: float, limit: float) -> None:
    """Raises RuntimeError if generator and trainer differ by more than `limit` nats per token at one policy version.

    Checksums prove that the weights arrived; this proves that the generator computes the policy with them.
    """
    if not mismatch <= limit:  # NaN too
        raise RuntimeError(
            f"generator and trainer differ by {mismatch:.3g} nats per token at the same policy version (max_mismatch = "
            f"{limit:g}): the generator does not compute the policy; base.generator tries one before training"
        )

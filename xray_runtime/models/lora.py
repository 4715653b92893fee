"""The fields of low-rank adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.kernel.config.section import Positive, Section

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama, without its output layer."""


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2021): W + alpha / rank · B·A, where only A and B are trained. There is no dropout,
    because rollout and update must compute log-probabilities with the same function."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Scale of B·A, divided by `rank`."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the linear layers with adapters, such as `[q_proj, v_proj]`; None: all but the output layer and
    a mixture's experts."""

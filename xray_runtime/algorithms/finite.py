"""Whether tensors hold numbers: NaN and infinities compare false, and pass where a bound is only exceeded."""

from __future__ import annotations

from torch import Tensor


def all_finite(x: Tensor) -> bool:
    """Whether no element of `x`, any shape, is NaN or infinite; of integers always. One pass, without a copy."""
    if not x.numel() or not x.is_floating_point():
        return True
    # Eight-bit floats have no order of their own.
    low, high = (x.float() if x.element_size() == 1 else x).aminmax()
    return bool(low.isfinite() & high.isfinite())

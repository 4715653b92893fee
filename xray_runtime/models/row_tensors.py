"""Rows as tensors."""

from __future__ import annotations

import numpy as np
import torch

from xray_runtime.data.rows import Ragged, Rows


def as_tensors(rows: Rows, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Rows as objectives read them."""
    columns = {name: column.values if isinstance(column, Ragged) else column for name, column in rows.items()}
    columns["lengths"] = rows["input_ids"].lengths
    if "rejected_ids" in rows:
        columns["rejected_lengths"] = rows["rejected_ids"].lengths
    tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
    # uint16 is bfloat16, see `workers.learner.Learner.trunk`.
    bits = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items() if tensor.dtype == torch.uint16}
    return {name: tensor.to(device) for name, tensor in (tensors | bits).items()}

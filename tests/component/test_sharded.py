"""A plain step under the decorator, on two ranks: the same losses and weights as a loop in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.component.models import text
from xray_runtime.config.engines import EngineConfig, TrainingConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.models.causal_lm import load_model
from xray_runtime.workers.sharded import sharded

NUM_STEPS, LR = 4, 1e-2


@sharded
def step(model: Any, rows: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of each row's tokens [B]."""
    ids = rows["input_ids"]
    nll = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].mT, ids[:, 1:], reduction="none")
    mask = torch.arange(1, ids.shape[1], device=ids.device) < rows["lengths"][:, None]
    return (nll * mask).sum(-1) / mask.sum(-1)


def plain(directory: Path) -> tuple[list[float], dict[str, Tensor]]:
    model = load_model(directory).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for number in range(NUM_STEPS):
        loss = step(model, {name: torch.from_numpy(column) for name, column in padded(number % 2).items()}).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


def padded(seed: int) -> dict[str, np.ndarray]:
    """Rows as a step reads them."""
    ids = text(seed=seed)["input_ids"]
    return {"input_ids": ids.dense(), "lengths": ids.lengths}


def test_the_sharded_step_is_the_plain_one(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    expected, weights = plain(tiny_model)
    training = TrainingConfig(lr=LR, schedule="constant", engine=EngineConfig(micro_batch_tokens=64))
    sizes = {"batch_size": 9, "sequence_tokens": 16}
    runtime = RuntimeConfig(threads=1, device="cpu")
    with step.on(tiny_model, training, **sizes, runtime=runtime, log_dir=tmp_path / "logs") as train:
        # Nine rows of 16 tokens are three micro-batches of 64; there are two cores.
        assert train.engine == EngineConfig(num_workhorses=2, zero_stage=0, micro_batch_tokens=64)
        losses = [train(padded(number % 2)) for number in range(NUM_STEPS)]
        train.save(tmp_path / "trained")
    # float32 sums in another order; Adam's division can enlarge that where gradients are near zero.
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert losses[2] < losses[0]
    for name, tensor in load_file(tmp_path / "trained" / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name].detach(), rtol=1e-3, atol=2e-4)

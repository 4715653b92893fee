"""Ranks that share the tokens of rows, against one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.layouts import make_model, spec_of
from benchmarks.ranks import run_ranks
from tests.unit.models.exact import OBJECTIVES, headed, outcome, rows_of
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.config import FreshBase, PretrainedBase
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.likelihood_objective import LikelihoodObjective
from xray_runtime.models.objectives import Objective, SFTObjective, training_loss
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.models.sequence_parallel import SequenceRanks
from xray_runtime.ops.planner.memory import Layout, activation_bytes

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3_moe": EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.7},
}
"""Tiny models with four heads, two of them for keys and values by default. The mixture adds a load-balancing loss."""
BASE = FreshBase(
    vocab_size=320, hidden_size=128, num_layers=1, num_heads=4, num_kv_heads=4, intermediate_size=48, max_positions=64
)
TRAINED: dict[str, Callable[[], Objective]] = OBJECTIVES | {"sft": SFTObjective}
MICRO_BATCHES = [[0, 2, 6], [4, 1, 5], [3]]
"""Of 21, 14 and 3 tokens; with shared prompts 13, 11 and 3."""


def computed(name: str, ranks: SequenceRanks | None = None) -> dict[str, Any]:
    """Losses, gradients and scores of a model by objective, with rows apart and with shared prompts."""
    module = headed(name, MODELS[name])
    module.sequence_ranks = ranks
    found: dict[str, Any] = {}
    for objective_name, make in TRAINED.items():
        objective = make()
        rows = rows_of(objective)
        for shared in (False, True):
            loss, gradients = outcome(module, objective, rows, MICRO_BATCHES, shared)
            found[f"loss of {objective_name}, {shared=}"] = [loss, *(g.numpy().copy() for g in gradients)]
        found[f"{objective_name} scores"] = scores(module, objective, rows)
    found["likelihoods"] = scores(module, LikelihoodObjective(), rows_of(SFTObjective()))
    return found


@torch.no_grad()
def scores(module: HeadedLM, objective: Objective, rows: TextBatch) -> list[np.ndarray]:
    columns = objective.score(module, as_tensors(rows)).columns().values()
    return [(column.values if isinstance(column, Ragged) else column).numpy() for column in columns]


def shared_by_ranks(learner: Learner, deal: Any, name: str) -> dict[str, Any]:
    """`computed` on one rank, whose learner has a model of its own."""
    return computed(name, learner.module.sequence_ranks)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("llama", 4),
        ("qwen3", 2),
        pytest.param("qwen2", 2, marks=pytest.mark.long),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.long),
        pytest.param("qwen2", 4, marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_tokens_compute_what_one_process_does(tmp_path: Path, name: str, num_ranks: int) -> None:
    """All have the same losses and scores, and their gradients add up."""
    layout = {"library": "fsdp2", "sequence_parallel": num_ranks, "num_workhorses": num_ranks}
    ranks = run_ranks(spec_of(make_model(tmp_path / "model", BASE), layout), tmp_path, shared_by_ranks, name)
    for case, expected in computed(name).items():
        each = [rank[case] for rank in ranks]
        if case.startswith("loss"):
            [loss, *gradients], found = expected, [run[0] for run in each]
            np.testing.assert_allclose(found, loss, rtol=1e-12)
            for number, gradient in enumerate(gradients, 1):
                total = sum(run[number] for run in each)
                np.testing.assert_allclose(total, gradient, rtol=0, atol=1e-12 * np.abs(gradient).max() + 1e-15)
        else:
            for run in each:
                for ours, theirs in zip(run, expected, strict=True):
                    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def kept_bytes(model: Path, num_tokens: int, ranks: SequenceRanks | None = None) -> int:
    """Bytes that a training pass over one row keeps for its backward pass, weights apart."""
    module = HeadedLM(load_model(model)).eval()
    module.sequence_ranks = ranks
    ids = np.random.default_rng(0).integers(5, 280, size=num_tokens).tolist()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rows = as_tensors(TextBatch.of([ids[:1]], [ids[1:]]))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = training_loss(module, SFTObjective(), rows, StepTotals(tokens=num_tokens))
    assert made.loss.isfinite()
    for parameter in module.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def kept_by_rank(learner: Learner, deal: Any, num_tokens: int) -> int:
    return kept_bytes(learner.spec.directory, num_tokens, learner.module.sequence_ranks)


@pytest.mark.parametrize("num_tokens", [2**11, pytest.param(2**15, marks=pytest.mark.long)])
def test_two_ranks_hold_half_of_a_row_each(tmp_path: Path, num_tokens: int) -> None:
    """Measured, and as planned."""
    sizes = BASE.model_copy(update={"num_layers": 2, "max_positions": 2**15})
    model = make_model(tmp_path / "model", sizes)
    spec = spec_of(model, {"library": "fsdp2", "sequence_parallel": 2, "num_workhorses": 2})
    held, shape = run_ranks(spec, tmp_path, kept_by_rank, num_tokens), from_pretrained(PretrainedBase(model=str(model)))
    whole = kept_bytes(model, num_tokens)
    # Beside the layers' activations: the final states, and of each token the log-softmax, which the planner books with
    # the logits.
    beside = 4 * num_tokens * (shape.hidden_size + shape.vocab_size)
    for sp, measured in ((1, whole), (2, max(held))):
        planned = activation_bytes(shape, num_tokens, 4, Layout(sp=sp)) + beside // sp
        assert measured == pytest.approx(planned, rel=0.05)
    assert max(held) == pytest.approx(whole / 2, rel=0.02)

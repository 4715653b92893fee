"""Routes forced upon mixtures: their own change nothing, others are what a dense computation of our own says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.models.exact import TOTALS, headed, outcome, rows_of
from tests.unit.models.families import EXPERTS
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
from xray_runtime.models.family import FAMILIES, family_of
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import last_hidden
from xray_runtime.models.routing import recorded_routes, routers_of

ROUTED = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
SIZES = EXPERTS | {"shared_expert_intermediate_size": 16}
OBJECTIVE = PPOObjective(PPOStageConfig(entropy_coef=0.1, kl={"place": "loss"}))
UNKNOWN = 255


def routed(kind: str) -> HeadedLM:
    return headed(kind, SIZES)


def own_routes(module: HeadedLM, rows: TextBatch) -> np.ndarray:
    """The ids [N, L, K] that the model chooses for each token, one row at a time by its own forward."""
    found = []
    with recorded_routes(module.lm, family_of(module.lm.config.model_type)) as recorded, torch.no_grad():
        for ids in rows.input_ids:
            module.lm(input_ids=torch.from_numpy(ids)[None])
            found.append(recorded.rows(1).ids[0])
    return np.concatenate(found)


def with_routes(rows: TextBatch, ids: np.ndarray) -> TextBatch:
    """The rows with routes, of which each row's last is unknown."""
    known = ids.copy()
    known[rows.input_ids.offsets[1:] - 1] = UNKNOWN
    return rows.with_columns(route_ids=Ragged(known, rows.input_ids.offsets))


def others(rows: TextBatch, ids: np.ndarray) -> np.ndarray:
    """Two different experts of four for each token, the same ones where the prompt is the same."""
    shifts = np.concatenate([(np.cumsum(row) % 3 + 1) for row in rows.input_ids])
    return ((ids.astype(np.int64) + shifts[:, None, None]) % 4).astype(np.uint8)


def test_families_that_replay_are_those_tested() -> None:
    families = [FAMILIES.get(name) for name in FAMILIES]
    assert sorted(kind for each in families if each.routing for kind in each.model_types) == ROUTED


@pytest.mark.parametrize("kind", ROUTED)
@pytest.mark.parametrize("shared", [True, False])
def test_a_models_own_routes_change_nothing(kind: str, shared: bool) -> None:
    module, rows = routed(kind), rows_of(OBJECTIVE)
    batches = [[0, 2, 5], [1, 3, 4, 6]]
    free = outcome(module, OBJECTIVE, rows, batches, shared)
    ids = own_routes(module, rows)
    assert ids.dtype == np.uint8
    forced = outcome(module, OBJECTIVE, with_routes(rows, ids), batches, shared)
    assert forced[0] == free[0]
    for ours, theirs in zip(forced[1], free[1], strict=True):
        assert torch.equal(ours, theirs)


class Dense(torch.nn.Module):
    """A block of experts by its definition: each token's experts one by one, in a loop over tokens, a row at a time."""

    def __init__(self, block: Any, norm: bool) -> None:
        super().__init__()
        self.block, self.norm, self.ids = block, norm, torch.zeros(0)

    def forward(self, states: Tensor) -> Tensor:
        flat, rows = states.reshape(-1, states.shape[-1]), []
        router, experts = self.block.gate, self.block.experts
        taken, self.ids = self.ids[: len(flat)], self.ids[len(flat) :]
        for state, ids in zip(flat, taken, strict=True):
            scores = torch.exp((router.weight @ state).float())
            chosen = scores[ids] / (scores[ids].sum() if self.norm else scores.sum())
            total = torch.zeros_like(state)
            for weight, expert in zip(chosen.to(state.dtype), ids.tolist(), strict=True):
                gate, up = (experts.gate_up_proj[expert] @ state).chunk(2)
                total = total + weight * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            rows.append(total)
        out = torch.stack(rows)
        if hasattr(self.block, "shared_expert"):
            out = out + torch.sigmoid(self.block.shared_expert_gate(flat)) * self.block.shared_expert(flat)
        return out.view_as(states)


def dense(module: HeadedLM, ids: Tensor) -> Iterator[Dense]:
    """Replace the blocks of experts of a model by dense ones that take these experts [N, L, K]."""
    for number, layer in enumerate(module.layers):
        layer.mlp = Dense(layer.mlp, bool(getattr(layer.mlp.gate, "norm_topk_prob", True)))
        layer.mlp.ids = ids[:, number]
        yield layer.mlp


@pytest.mark.parametrize("kind", ROUTED)
def test_other_routes_have_the_loss_and_gradients_of_a_dense_computation(kind: str) -> None:
    module, rows = routed(kind), rows_of(OBJECTIVE)
    batch = list(range(len(rows)))
    free = own_routes(module, rows)
    ids = others(rows, free)
    before, _ = outcome(module, OBJECTIVE, rows, [batch], shared=True)
    found = outcome(module, OBJECTIVE, with_columns(rows, ids), [batch], shared=True)
    assert abs(found[0] - before) > 1e-3
    assert all(router.weight.grad.abs().max() > 0 for router in routers_of(module.lm, family_of(kind)))
    plain = routed(kind)
    plain.noted = None  # its routers are never called
    assert len([*dense(plain, torch.from_numpy(ids.astype(np.int64)))]) == module.routed_layers == 2
    expected = outcome(plain, OBJECTIVE, rows, [[row] for row in batch], shared=False)
    # Routers round to float32, as transformers' do.
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    by_name = dict(zip((n for n, p in plain.named_parameters() if p.grad is not None), expected[1], strict=True))
    for name, parameter in module.named_parameters():
        theirs = by_name[name.replace(".mlp.", ".mlp.block.")]
        assert parameter.grad is not None
        largest = float(theirs.abs().max())
        torch.testing.assert_close(parameter.grad, theirs, rtol=0, atol=2e-6 * largest + 1e-12, msg=name)


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_layers_computed_again_take_the_same_routes(kind: str) -> None:
    rows = rows_of(OBJECTIVE)
    plain, again = routed(kind), routed(kind)
    given = with_routes(rows, others(rows, own_routes(plain, rows)))
    again.checkpoint_activations()
    batches = [[0, 2, 5], [1, 3, 4, 6]]
    expected, found = (outcome(each, OBJECTIVE, given, batches, shared=True) for each in (plain, again))
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)


def test_padded_rows_take_the_routes_of_packed_ones() -> None:
    rows = rows_of(OBJECTIVE)
    packed, padded = routed("mixtral"), routed("mixtral")
    padded.packs = False
    given = with_routes(rows, others(rows, own_routes(packed, rows)))
    expected, found = (outcome(each, OBJECTIVE, given, [[0, 1, 3]], shared=False) for each in (packed, padded))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)


def test_each_token_takes_its_own_routes() -> None:
    """Routes of one token change what that token and later ones give, and nothing before."""
    module, rows = routed("qwen3_moe"), TextBatch.of([[5, 9, 7]], [[11, 6, 80]])
    free = own_routes(module, rows)
    for place in range(6):
        ids = free.copy()
        ids[place] = others(rows, free)[place]
        tensors = [given.map(torch.from_numpy) for given in (rows, with_columns(rows, ids))]
        with torch.no_grad():
            before, after = (last_hidden(module, each) for each in tensors)
        changed = ((before - after).abs() > 1e-9).any(-1).nonzero()[:, 0].tolist()
        assert changed == list(range(place, 6))


def with_columns(rows: TextBatch, ids: np.ndarray) -> TextBatch:
    return rows.with_columns(route_ids=Ragged(ids, rows.input_ids.offsets))


def test_scores_are_with_the_routes_and_beside_them_without() -> None:
    module, rows = routed("qwen3_moe"), rows_of(OBJECTIVE)
    ids = own_routes(module, rows)
    with torch.no_grad():
        free = OBJECTIVE.score(module, rows.map(torch.from_numpy))
        forced = OBJECTIVE.score(module, with_routes(rows, others(rows, ids)).map(torch.from_numpy))
        critic = [CriticObjective(PPOStageConfig()).score(module, r.map(torch.from_numpy)) for r in (rows, rows)]
    assert "own_route_logprobs" not in free
    assert torch.equal(forced.own_route_logprobs.values, free.logprobs.values)
    assert (forced.logprobs.values - free.logprobs.values).abs().max() > 1e-3
    assert torch.equal(critic[0].values.values, critic[1].values.values)


def test_a_critic_of_its_own_chooses_its_own_experts() -> None:
    objective = CriticObjective(PPOStageConfig())
    module, rows = routed("qwen3_moe"), rows_of(objective)
    given = with_routes(rows, others(rows, own_routes(module, rows)))
    assert (
        outcome(module, objective, given, [[0, 1]], shared=False)[0]
        == (outcome(module, objective, rows, [[0, 1]], shared=False)[0])
    )


def test_prompts_with_other_routes_are_not_shared() -> None:
    rows = TextBatch.of([[5, 9]] * 3, [[1], [2], [3]])
    ids = np.zeros((9, 2, 2), np.uint8)
    given = with_columns(rows, ids)
    assert given.alike_prompts().tolist() == [0, 0, 0]
    ids[3, 1] = 1
    assert given.alike_prompts().tolist() == [0, 1, 0]
    # A reply's routes do not matter for that.
    ids[8] = 3
    assert given.alike_prompts().tolist() == [0, 1, 0]


def test_routes_that_do_not_fit_the_model_are_refused() -> None:
    ids, lengths = torch.tensor([5, 9, 7]), torch.tensor([3])
    for module in (headed(), routed("mixtral")):
        with pytest.raises(ValueError, match=r"routes of 3 layers cannot be replayed by a \w+ForCausalLM"):
            module.hidden(ids, lengths, routes=torch.zeros(3, 3, 2, dtype=torch.int64))
    with (
        pytest.raises(ValueError, match="the routes of a LlamaForCausalLM cannot be read"),
        recorded_routes(headed().lm, family_of("llama")),
    ):
        pass
    assert TOTALS.rows == 7

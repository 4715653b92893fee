"""The auxiliary loss of mixtures of experts, against transformers' own loss and closed forms, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.models.families import EXPERTS, model
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.trainer import build_engine
from xray_runtime.methods.common.training.steps import router_metrics
from xray_runtime.models.families._mixture import load_balancing, router_statistics
from xray_runtime.models.family import FAMILIES
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import SFTObjective, num_computed_tokens, training_loss

ON = EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.7}
MIXTURES = ["granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
IDS, LENGTHS = torch.tensor([5, 9, 7, 42, 11, 6, 8, 8, 100, 3]), torch.tensor([6, 4])


def mixture(kind: str, **options: Any) -> Any:
    lm = model(kind, **options)
    lm.set_experts_implementation("eager")  # the others have no float64
    return lm


def rows(lengths: torch.Tensor = LENGTHS) -> TextBatch[torch.Tensor]:
    """Each row but its first token is a response."""
    ids = Ragged(IDS[: int(lengths.sum())], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    return TextBatch(input_ids=ids, prompt_lengths=torch.ones_like(lengths))


def cross_entropy(module: HeadedLM, part: TextBatch[torch.Tensor], tokens: float) -> torch.Tensor:
    """The loss without the model's own."""
    return SFTObjective().score(module, part).nll.sum() / tokens


def test_families_with_the_loss_are_those_tested() -> None:
    families = [FAMILIES.get(name) for name in FAMILIES]
    assert sorted(kind for f in families if f.auxiliary for kind in f.model_types) == ["granite", *MIXTURES]


def test_routers_that_treat_experts_alike_pay_the_number_chosen() -> None:
    # Four experts, each token's two chosen in turn: f = (1/2, 1/2, 1/2, 1/2), P = 1/4 each: 4 · 4 · 1/8 = 2.
    even = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    config = SimpleNamespace(num_experts_per_tok=2)
    assert float(load_balancing((even, even), config)) == pytest.approx(2.0, abs=1e-12)
    # One expert takes all: f = (1, 0), P = (σ(20), σ(-20)) of two experts: 2 · σ(20).
    greedy = torch.tensor([[20.0, 0.0]] * 3, dtype=torch.float64)
    assert float(load_balancing((greedy,), SimpleNamespace(num_experts_per_tok=1))) == pytest.approx(2.0, abs=1e-8)


def test_statistics_of_routers_by_hand() -> None:
    # Four experts, two tokens of one: the first layer's tokens take experts 0 and 1, the second's both take 3.
    first = torch.tensor([[3.0, 0, 0, 0], [0, 3.0, 0, 0]])
    second = torch.tensor([[0.0, 0, 0, 9.0]] * 2)
    sums = router_statistics((first, second), SimpleNamespace(num_experts_per_tok=1))
    assert float(sums["router_tokens"]) == 2
    # Loads ½ and 1 over a mean of ¼; entropies log 2 and 0 over log 4; 2 and 3 of 4 are idle. Each times two tokens.
    assert float(sums["router_max_load"]) == pytest.approx(2 * (2 + 4) / 2)
    assert float(sums["router_entropy"]) == pytest.approx(2 * (0.5 + 0) / 2)
    assert float(sums["router_idle"]) == pytest.approx(2 * (0.5 + 0.75) / 2)
    assert router_metrics([{"router_tokens": 2.0, "router_max_load": 6.0}, {}])["router/max_load"] == 3.0
    assert router_metrics([{"nll": 1.0}]) == {}


@pytest.mark.parametrize("kind", MIXTURES)
def test_sft_of_a_mixture_has_transformers_loss(kind: str) -> None:
    lm = mixture(kind, **ON)
    ids = IDS[None, :6]
    expected = lm(input_ids=ids, labels=ids, use_cache=False)
    wanted = torch.autograd.grad(expected.loss, list(lm.parameters()))
    module, totals = HeadedLM(lm), StepTotals(tokens=5.0, rows=1.0)
    loss, stats = training_loss(module, SFTObjective(), rows(LENGTHS[:1]), totals)
    # transformers sums in float32.
    torch.testing.assert_close(loss.float(), expected.loss.float(), rtol=1e-6, atol=0)
    for gradient, other in zip(torch.autograd.grad(loss, list(lm.parameters())), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5 * float(other.abs().max()) + 1e-12)
    difference = float((loss - cross_entropy(module, rows(LENGTHS[:1]), 5.0)).detach())
    assert difference == pytest.approx(0.7 * float(expected.aux_loss), rel=1e-6)
    assert difference > 0.1
    assert stats.keys() == {"nll", "router_tokens", "router_max_load", "router_entropy", "router_idle"}
    assert stats["router_tokens"] == 6


@pytest.mark.parametrize("kind", MIXTURES)
def test_padding_does_not_count_and_micro_batches_count_by_their_rows(kind: str) -> None:
    lm = mixture(kind, **ON)
    mask = torch.arange(6) < LENGTHS[:, None]
    padded = torch.zeros(2, 6, dtype=torch.int64).masked_scatter(mask, IDS)
    expected = lm(input_ids=padded, attention_mask=mask.long(), use_cache=False).aux_loss
    module, totals = HeadedLM(lm), StepTotals(tokens=8.0, rows=2.0)

    def auxiliary(part: TextBatch[torch.Tensor]) -> float:
        loss, _ = training_loss(module, SFTObjective(), part, totals)
        return float((loss - cross_entropy(module, part, 8.0)).detach())

    assert auxiliary(rows()) == pytest.approx(0.7 * float(expected), rel=1e-5)
    first = lm(input_ids=IDS[None, :6], use_cache=False).aux_loss
    assert auxiliary(rows(LENGTHS[:1])) == pytest.approx(0.7 * float(first) / 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("trainable_layers", [None, 1])
def test_a_shared_prompt_counts_in_each_of_its_sequences(kind: str, trainable_layers: int | None) -> None:
    module = HeadedLM(mixture(kind, **ON), trainable_layers=trainable_layers)
    texts = TextBatch.of([[5, 9, 7, 42]] * 2, [[11, 6], [8, 100, 3]])
    separate = as_tensors(texts).with_columns(alike=None)
    shared = separate.with_columns(alike=torch.tensor([0, 0]))
    assert num_computed_tokens(module, shared) == num_computed_tokens(module, separate) - 4
    trained = [p for p in module.parameters() if p.requires_grad]
    losses = [
        training_loss(module, SFTObjective(), part, StepTotals(tokens=5.0, rows=2.0)) for part in (separate, shared)
    ]
    torch.testing.assert_close(losses[1].loss, losses[0].loss, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(each.loss, trained) for each in losses]
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()) + 1e-12)


def test_only_a_config_that_asks_has_the_loss_and_scoring_has_none() -> None:
    module = HeadedLM(mixture("mixtral", **EXPERTS))
    assert module.auxiliary is None
    loss, _ = training_loss(module, SFTObjective(), rows(), StepTotals(tokens=8.0))
    torch.testing.assert_close(loss, cross_entropy(module, rows(), 8.0), rtol=1e-12, atol=0)
    scoring = HeadedLM(mixture("mixtral", **ON))
    with torch.no_grad():
        assert float(SFTObjective().score(scoring, rows()).nll[0]) > 0


def test_a_cut_model_with_the_loss_is_refused(tmp_path: Any) -> None:
    from xray_runtime.methods.sft.config import SFTConfig

    engine = EngineConfig(num_workhorses=2, tensor_parallel=2, precision="float32")
    module = HeadedLM(mixture("mixtral", **ON))
    with pytest.raises(ValueError, match="set output_router_logits to false"):
        build_engine(module, SFTConfig(engine=engine), tmp_path, torch.device("cpu"))

"""FSDP2 as a training engine on gloo, and Muon. `test_layouts` has what every layout must do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.layouts import CONFIG, LayoutRun, collect, differences, global_batches, run_layout, spec_of
from benchmarks.ranks import run_ranks
from tests.component.layouts import NUM_UPDATES, in_float64, part, same, update
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.cluster.model_spec import BranchSpec, ModelSpec
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines import states
from xray_runtime.kernel.store.shards import Piece
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.causal_lm import load_model, load_tokenizer, save_model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.objectives import training_loss

FSDP2: dict[str, Any] = {"library": "fsdp2", "num_workhorses": 2}
MUON = FSDP2 | {"optimizer": "muon"}


@pytest.fixture(scope="module")
def batches(tiny_model: Path) -> list[TextBatch]:
    return global_batches(tiny_model, count=2, num_rows=9, group_size=3)


def test_it_is_as_near_to_float64_as_zero_3(tiny_model: Path, batches: list[TextBatch], tmp_path: Path) -> None:
    """Packed rows whose prompts are shared, with a value head beside the policy."""
    exact = in_float64(tiny_model, batches)

    def error(layout: dict[str, Any]) -> float:
        weights = run_layout(spec_of(tiny_model, layout, 32), batches, NUM_UPDATES, tmp_path).weights
        assert weights.keys() == exact.keys()
        return max(float(np.linalg.norm(weights[n] - w) / np.linalg.norm(w)) for n, w in exact.items())

    zero_3, fsdp2 = error({"zero_stage": 3, "num_workhorses": 2}), error(FSDP2)
    assert zero_3 < 2e-6
    assert fsdp2 < 2e-6


def above_a_trunk(spec: ModelSpec, other: Path) -> ModelSpec:
    """Its upper layer learns; the reference, above the same trunk, has another one."""
    weights = load_file(spec.directory / "model.safetensors")
    shutil.copytree(spec.directory, other, dirs_exist_ok=True)
    changed = {n: t * 1.5 for n, t in weights.items() if n.startswith(("model.layers.1.", "model.norm."))}
    save_file(weights | changed, other / "model.safetensors", {"format": "pt"})
    return replace(spec, trainable_layers=1, branches={"reference": BranchSpec(other)})


def scored(learner: Learner, deal: Callable[[TextBatch], TextBatch], batches: list[TextBatch], place: Path) -> Any:
    """Three updates, scores of what is learnt then, and a snapshot after two."""
    part(learner, deal, batches, range(2), None, place)
    done = part(learner, deal, batches, range(2, 3), None, None)
    rows = TextBatch.of_columns(batches[0].pick("input_ids", "prompt_lengths")).with_columns(id=np.arange(9))
    scores = learner.score(deal(rows))
    ragged = scores.pick("logprobs", "ref_logprobs", "values")
    return done | {"scores": {name: values.values for name, values in ragged.items() if isinstance(values, Ragged)}}


def test_upper_layers_learn_as_in_one_process(tiny_model: Path, batches: list[TextBatch], tmp_path: Path) -> None:
    """At level 2 weights are still gathered after the scores, and the next step must not use them."""
    runs = []
    for layout in ({}, FSDP2 | {"zero_stage": 2, "activation_checkpointing": True}):
        spec = above_a_trunk(spec_of(tiny_model, layout, 32), tmp_path / "other")
        place = tmp_path / str(len(runs))
        ranks = run_ranks(spec, tmp_path, scored, batches, place)
        runs.append((collect(spec, ranks), ranks))
        names = {name.partition("/")[2] for file in place.glob("*.safetensors") for name in load_file(file)}
        assert names
        assert all("layers.1." in n or n.startswith(("scalar.", "model.norm.")) for n in names)
    again = collect(spec, run_ranks(spec, tmp_path, part, batches, range(2, 3), place, None))
    assert all(np.array_equal(again.weights[name], whole) for name, whole in runs[-1][0].weights.items())
    (alone, [whole]), (run, ranks) = runs
    same(run, alone)
    assert len(whole["scores"]) == 3
    for name, values in whole["scores"].items():
        dealt = np.sort(np.concatenate([rank["scores"][name] for rank in ranks]))
        np.testing.assert_allclose(dealt, np.sort(values), atol=1e-5)


def test_bfloat16_passes_step_float32_weights(tiny_model: Path, batches: list[TextBatch], tmp_path: Path) -> None:
    """As those of ZeRO: gradients are summed in float32, and what is published are the weights that are stepped."""
    layouts = ({"zero_stage": 1, "num_workhorses": 2}, FSDP2)
    zero, fsdp2 = (
        run_layout(spec_of(tiny_model, layout | {"precision": "bfloat16"}, 32), batches, NUM_UPDATES, tmp_path)
        for layout in layouts
    )
    same(fsdp2, zero)
    exported = [torch.from_numpy(whole) for whole in fsdp2.weights.values() if whole.ndim > 1]
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in exported)


def mixture(directory: Path, tiny_model: Path, **options: Any) -> Path:
    """A mixture of experts with a loss of its own, an output layer of its own and uneven rows on two ranks."""
    options = {"num_experts": 3, "output_router_logits": True} | options
    config = transformers.Qwen3MoeConfig(
        vocab_size=321, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts_per_tok=2,
        max_position_embeddings=64, tie_word_embeddings=False, **options,
    )  # fmt: skip
    torch.manual_seed(5)
    save_model(transformers.Qwen3MoeForCausalLM(config), load_tokenizer(tiny_model), directory)
    return directory


def balanced(learner: Learner, deal: Callable[[TextBatch], TextBatch], batches: list[TextBatch]) -> Any:
    """Weights after steps on a rollout's loss and the model's auxiliary loss."""
    assert learner.engine is not None
    for rows in batches:
        learner.train(deal(rows), StepTotals.of(rows), CONFIG.lr)
    return {name: tensor.numpy().copy() for name, tensor in learner.engine.weights()}


def test_a_mixture_of_experts_learns_as_under_zero(tiny_model: Path, batches: list[TextBatch], tmp_path: Path) -> None:
    """With the same micro-batches, since each has its own auxiliary loss."""
    model = mixture(tmp_path / "mixture", tiny_model)
    layouts = ({"zero_stage": 2, "num_workhorses": 2}, FSDP2)
    [zero, _], [fsdp2, _] = (run_ranks(spec_of(model, each, 32), tmp_path, balanced, batches) for each in layouts)
    assert any("experts" in name for name in zero)
    for name, whole in zero.items():
        assert np.linalg.norm(fsdp2[name] - whole) < 5e-5 * np.linalg.norm(whole), name


def shared_experts(model: Path, ranks: int) -> ModelSpec:
    return spec_of(model, FSDP2 | {"num_workhorses": ranks, "expert_parallel": 2}, 32)


@pytest.mark.parametrize(("ranks", "collapsed"), [pytest.param(2, False, marks=pytest.mark.long), (4, True)])
def test_gradients_of_shared_experts_are_those_of_float64(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path, ranks: int, collapsed: bool
) -> None:
    """Also where all tokens take the experts of one peer, and the other computes none."""
    model, place = (
        mixture(tmp_path / "mixture", tiny_model, num_experts=4, output_router_logits=False),
        tmp_path / "now",
    )
    if collapsed:
        weights = load_file(model / "model.safetensors")
        zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items() if name.endswith("mlp.gate.weight")}
        save_file(weights | zeros, model / "model.safetensors", {"format": "pt"})
    run_ranks(shared_experts(model, ranks), tmp_path, part, batches, range(1), None, place)

    module = HeadedLM(load_model(model), scalar_head=True).double().eval()
    module.lm.set_experts_implementation("eager")
    rows = as_tensors(batches[0])
    training_loss(module, PPOObjective(CONFIG), rows, StepTotals.of(rows)).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CONFIG.grad_clip)
    assert norm > CONFIG.grad_clip
    gradients = {states.hugging_face_name(name): p.grad for name, p in module.named_parameters()}
    with states.Reader(place) as saved:
        for name, gradient in gradients.items():
            assert gradient is not None
            if name.endswith("experts.down_proj"):
                assert len(gradient.flatten(1).any(1).nonzero()) == (2 if collapsed else 4)
            # Adam's first moment after one step is (1 − β₁) of the clipped gradient.
            moment = saved.read("exp_avg", name, Piece.of(tuple(gradient.shape))).double() / (1 - CONFIG.betas[0])
            difference = torch.linalg.norm(moment - gradient.flatten())
            assert difference <= 1e-5 * torch.linalg.norm(gradient) + 1e-9, name


def test_ranks_that_share_experts_learn_as_one_process(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path
) -> None:
    """Another layout goes on from their snapshot."""
    model = mixture(tmp_path / "mixture", tiny_model, num_experts=4, output_router_logits=False)
    shared, whole, place = shared_experts(model, 4), spec_of(model, {}, 32), tmp_path / "snapshot"
    alone = run_layout(whole, batches, NUM_UPDATES, tmp_path)
    same(collect(shared, run_ranks(shared, tmp_path, part, batches, range(NUM_UPDATES), None, None)), alone)
    run_ranks(shared, tmp_path, part, batches, range(1), None, place)
    moved = collect(whole, run_ranks(whole, tmp_path, part, batches, range(1, NUM_UPDATES), place, None))
    assert differences(LayoutRun(alone.losses, alone.norms, moved.weights, [], 0.0), alone)[2] < 5e-5


@pytest.mark.long
def test_adapters_beside_shared_experts_learn_as_in_one_process(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path
) -> None:
    model = mixture(tmp_path / "mixture", tiny_model, num_experts=4, output_router_logits=False)

    def learned(spec: ModelSpec) -> LayoutRun:
        assert spec.training is not None
        training = spec.training.model_copy(update={"lora": LoRAConfig(rank=4)})
        adapted = replace(spec, training=training, adapter_seed=7)
        return collect(adapted, run_ranks(adapted, tmp_path, part, batches, range(NUM_UPDATES), None, None))

    alone = learned(spec_of(model, {}, 32))
    assert {name.rpartition(".weight")[0].rpartition(".")[2] for name in alone.weights} >= {"q_proj", "o_proj"}
    assert not any("experts" in name for name in alone.weights)
    same(learned(shared_experts(model, 2)), alone)


@pytest.mark.parametrize(
    ("experts", "message"),
    [(3, "engine.expert_parallel: 2 is not allowed: it must divide the model's 3 experts"), (0, "has no experts")],
)
def test_experts_that_cannot_be_shared_are_refused(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path, experts: int, message: str
) -> None:
    model = mixture(tmp_path / "mixture", tiny_model) if experts else tiny_model
    with pytest.raises(Exception, match=re.escape(message)):
        run_ranks(spec_of(model, FSDP2 | {"expert_parallel": 2}), tmp_path, part, batches, range(1), None, None)


@pytest.fixture(scope="module")
def muon_alone(tiny_model: Path, batches: list[TextBatch], tmp_path_factory: pytest.TempPathFactory) -> LayoutRun:
    return run_layout(
        spec_of(tiny_model, MUON | {"num_workhorses": 1}), batches, NUM_UPDATES, tmp_path_factory.mktemp("logs")
    )


@pytest.mark.long  # the snapshot below is taken up by as many ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_muon_steps_whole_matrices_however_they_are_sharded(
    muon_alone: LayoutRun, tiny_model: Path, batches: list[TextBatch], tmp_path: Path, ranks: int
) -> None:
    spec = spec_of(tiny_model, MUON | {"num_workhorses": ranks}, 32)
    same(run_layout(spec, batches, NUM_UPDATES, tmp_path), muon_alone)


def test_muon_is_torchs_and_steps_hidden_matrices_alone(
    muon_alone: LayoutRun, tiny_model: Path, batches: list[TextBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own, which is made to orthogonalize in float32 as well, beside torch's AdamW."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    module = HeadedLM(load_model(tiny_model), scalar_head=True).eval()
    named = dict(module.named_parameters())
    hidden = [p for name, p in named.items() if "layers." in name and p.dim() == 2]
    others = [p for p in named.values() if not any(p is matrix for matrix in hidden)]
    muon = torch.optim.Muon(hidden, lr=CONFIG.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=CONFIG.lr, betas=CONFIG.betas, weight_decay=0.0)
    update(module, [muon, adamw], batches)
    for name, parameter in named.items():
        expected, found = parameter.detach().numpy(), muon_alone.weights[name.removeprefix("lm.")]
        assert np.linalg.norm(found - expected) < 5e-5 * np.linalg.norm(expected), name


def test_muon_goes_on_on_other_ranks_and_to_the_bit_on_the_same(
    muon_alone: LayoutRun, tiny_model: Path, batches: list[TextBatch], tmp_path: Path
) -> None:
    spec, place = spec_of(tiny_model, MUON, 32), tmp_path / "snapshot"
    whole = collect(spec, run_ranks(spec, tmp_path, part, batches, range(NUM_UPDATES), None, None))
    run_ranks(spec, tmp_path, part, batches, range(2), None, place)
    resumed = collect(spec, run_ranks(spec, tmp_path, part, batches, range(2, NUM_UPDATES), place, None))
    assert all(np.array_equal(resumed.weights[name], tensor) for name, tensor in whole.weights.items())
    other = spec_of(tiny_model, MUON | {"num_workhorses": 3}, 32)
    moved = collect(other, run_ranks(other, tmp_path, part, batches, range(2, NUM_UPDATES), place, None))
    assert differences(LayoutRun(muon_alone.losses, muon_alone.norms, moved.weights, [], 0.0), muon_alone)[2] < 5e-5
    kinds = {name.partition("/")[0] for file in place.glob("*.safetensors") for name in load_file(file)}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    with pytest.raises(RuntimeError, match="the snapshot has no exp_avg/"):
        run_ranks(spec_of(tiny_model, FSDP2), tmp_path, part, batches, range(0), place, None)


def test_muon_is_refused_where_hidden_matrices_are_unknown(tiny_model: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=320, n_layer=1, n_embd=32, n_head=1, n_positions=64)
    save_model(transformers.GPT2LMHeadModel(config), load_tokenizer(tiny_model), tmp_path / "model")
    with pytest.raises(RuntimeError, match=r"engine\.optimizer: 'muon' is not allowed: a GPT2LMHeadModel"):
        run_ranks(spec_of(tmp_path / "model", MUON | {"num_workhorses": 1}), tmp_path, part, [], range(0), None, None)

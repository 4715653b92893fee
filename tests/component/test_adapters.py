"""Adapters under every layout that trains them: as in one process, as peft merges them, and off as the reference."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.layouts import LayoutRun, collect, global_batches, make_model, spec_of, updates
from benchmarks.ranks import run_ranks
from tests.component.layouts import part, same
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.shards import read_shards
from xray_runtime.models.adapter_files import write_adapter
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.config import FreshBase
from xray_runtime.models.expert_adapters import expert_matrices
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.nf4 import dequantize, quantize
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.models.weight_files import overwrite

LORA, DORA = LoRAConfig(rank=4, alpha=16.0), LoRAConfig(rank=4, alpha=8.0, rslora=True, dora=True)
ZERO_2, ZERO_3 = ({"zero_stage": stage, "num_workhorses": 2} for stage in (2, 3))
TP, PP = {"tensor_parallel": 2, "num_workhorses": 2}, {"pipeline_parallel": 2, "num_workhorses": 2}
SP = {"library": "fsdp2", "sequence_parallel": 2, "num_workhorses": 2}
FSDP2 = {"library": "fsdp2", "num_workhorses": 2, "zero_stage": 2, "activation_checkpointing": True}


@pytest.fixture(scope="module")
def batches(tiny_model: Path) -> list[TextBatch]:
    return global_batches(tiny_model, count=2, num_rows=9, group_size=3)


def adapted(model: Path, lora: LoRAConfig, layout: dict[str, Any]) -> ModelSpec:
    spec = spec_of(model, layout, 32)
    assert spec.training is not None
    training = spec.training.model_copy(update={"lora": lora})
    return replace(spec, training=training, adapter_seed=7, reference=ReferenceObjective(0.7))


def learned(
    learner: Learner, deal: Callable[[TextBatch], TextBatch], batches: list[TextBatch], snapshot: Path
) -> dict[str, Any]:
    """Three updates, with a snapshot after two; the adapters then, and the scores of the model without them."""
    updates(learner, deal, batches, 0, 2)
    learner.save_state(snapshot)
    done = updates(learner, deal, batches, 2, 3)
    assert learner.engine is not None
    own = learner.engine.weights(merged=False)
    adapters = {name: t.detach().numpy().copy() for name, t in own if not name.startswith("scalar.")}
    rows = TextBatch.of_columns(batches[0].pick("input_ids", "prompt_lengths"))
    scores = learner.reference(deal(rows))
    with_them = learner.score(deal(rows))
    assert not np.array_equal(with_them.logprobs.values, scores.ref_logprobs.values) if len(scores) else True
    return done | {"adapters": adapters, "reference": scores.ref_logprobs if len(scores) else None}


def run(spec: ModelSpec, batches: list[TextBatch], place: Path) -> tuple[LayoutRun, dict[str, torch.Tensor], list[Any]]:
    ranks = run_ranks(spec, place, learned, batches, place / "snapshot")
    adapters = {n: torch.from_numpy(a) for rank in ranks for n, a in rank["adapters"].items()}
    return collect(spec, ranks), adapters, [rank["reference"] for rank in ranks]


CONFIGS = {"LoRA": LORA, "DoRA": DORA}


Alone = tuple[LoRAConfig, LayoutRun, dict[str, torch.Tensor], Ragged]


@pytest.fixture(scope="module")
def learned_alone(tiny_model: Path, batches: list[TextBatch], tmp_path_factory: Any) -> Callable[[str], Alone]:
    """Kind of adapter → what one process learns, computed once."""

    @functools.cache
    def learn(kind: str) -> Alone:
        config = CONFIGS[kind]
        made, adapters, [reference] = run(adapted(tiny_model, config, {}), batches, tmp_path_factory.mktemp("alone"))
        return config, made, adapters, reference

    return learn


@pytest.fixture(params=CONFIGS)
def alone(request: pytest.FixtureRequest, learned_alone: Callable[[str], Alone]) -> Alone:
    return learned_alone(request.param)


def test_what_is_published_is_what_peft_merges(alone: Any, tiny_model: Path, tmp_path: Path) -> None:
    config, made, adapters, _ = alone
    write_adapter(tmp_path, config, adapters)
    peft = PeftModel.from_pretrained(load_model(tiny_model), str(tmp_path))
    before, expected = load_file(tiny_model / "model.safetensors"), peft.merge_and_unload().state_dict()
    assert made.weights.keys() == {n for n in before if n.endswith("_proj.weight")} | {"scalar.weight", "scalar.bias"}
    for name in before.keys() & made.weights.keys():
        torch.testing.assert_close(torch.from_numpy(made.weights[name]), expected[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(expected[name], before[name])


def test_off_it_is_the_reference(alone: Any, tiny_model: Path, batches: list[TextBatch]) -> None:
    """To the bit what a second whole model would score, in the same micro-batches."""
    from xray_runtime.cluster.types import RankInfo
    from xray_runtime.kernel.config.section import RuntimeConfig

    _, _, _, reference = alone
    frozen = Learner(RuntimeConfig(threads=1, device="cpu"))  # type: ignore[arg-type]
    frozen.build(ModelSpec(tiny_model, ReferenceObjective(0.7)), RankInfo("reference", 0, 0, 1, "127.0.0.1", 0, None))
    rows = TextBatch.of_columns(batches[0].pick("input_ids", "prompt_lengths"))
    assert np.array_equal(frozen.score(rows).ref_logprobs.values, reference.values)


LAYOUTS = {
    "ZeRO-2 × 2": ZERO_2,
    "ZeRO-3 × 2": ZERO_3,
    "FSDP2 × 2": FSDP2,
    "TP 2": TP,
    "PP 2": PP,
    "SP 2": SP,
    "Megatron TP 2": TP | {"library": "megatron"},
    "Megatron DP 2": {"library": "megatron", "num_workhorses": 2},
}
SHORT = {("LoRA", "FSDP2 × 2"), ("LoRA", "PP 2"), ("DoRA", "ZeRO-3 × 2"), ("DoRA", "TP 2")}
"""Every way to cut weights, each with one kind of adapter; `test_megatron` has Megatron's."""


@pytest.mark.parametrize(
    ("alone", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in SHORT else pytest.mark.long)
        for kind, layout in itertools.product(CONFIGS, LAYOUTS)
    ],
    indirect=["alone"],
)
def test_the_layout_does_not_show(
    alone: Any, tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: str
) -> None:
    config, made, adapters, reference = alone
    spec = adapted(tiny_model, config, LAYOUTS[layout])
    split, own, references = run(spec, batches, tmp_path)
    same(split, made)
    assert own.keys() == adapters.keys()
    for name, whole in adapters.items():
        torch.testing.assert_close(own[name], whole, rtol=1e-3, atol=1e-5)
    dealt = [scores.values for scores in references if scores is not None]
    found = np.sort(np.unique(np.round(np.concatenate(dealt), 4)))
    np.testing.assert_allclose(found, np.sort(np.unique(np.round(reference.values, 4))), atol=2e-4)
    goes_on_alike(spec, split, batches, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ZERO_2, id="ZeRO-2 × 2", marks=pytest.mark.long),
        pytest.param(FSDP2, id="FSDP2 × 2"),
        pytest.param(ZERO_3, id="ZeRO-3 × 2", marks=pytest.mark.long),
        pytest.param(PP, id="PP 2", marks=pytest.mark.long),
    ],
)
def test_adapters_on_four_bits(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: dict[str, Any]
) -> None:
    config = LORA.model_copy(update={"quantize": "nf4"})
    whole, adapters, [reference] = run(adapted(tiny_model, config, {}), batches, tmp_path / "1")
    spec = adapted(tiny_model, config, layout)
    split, own, references = run(spec, batches, tmp_path / "2")
    same(split, whole)
    for name, tensor in adapters.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-3, atol=1e-5)
    dealt = np.concatenate([scores.values for scores in references if scores is not None])
    np.testing.assert_allclose(
        np.sort(dealt)[:: len(dealt) - 1], np.sort(reference.values)[:: len(reference.values) - 1], atol=2e-4
    )
    before = load_file(tiny_model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    rounded = dequantize(*quantize(before[f"{name}.weight"]), before[f"{name}.weight"].shape)
    assert (rounded - before[f"{name}.weight"]).abs().max() > 1e-4
    merged = torch.from_numpy(whole.weights[f"{name}.weight"])
    torch.testing.assert_close(merged, rounded + config.scaling * (b @ a), rtol=1e-5, atol=1e-7)


EXPERTS = LoRAConfig(rank=4, target_modules=["q_proj", "experts"])


@pytest.fixture(scope="module")
def mixture(
    tmp_path_factory: Any, tiny_model: Path
) -> tuple[Path, list[TextBatch], LayoutRun, dict[str, torch.Tensor]]:
    base = FreshBase(
        **{"vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
        **{"intermediate_size": 64, "num_experts": 4, "max_positions": 64},
    )
    model = make_model(tmp_path_factory.mktemp("mixture") / "model", base)
    batches = global_batches(model, count=2, num_rows=9, group_size=3)
    made, adapters, _ = run(adapted(model, EXPERTS, {}), batches, tmp_path_factory.mktemp("mixture alone"))
    return model, batches, made, adapters


def test_adapted_experts_are_published_as_peft_merges_them(mixture: Any, tmp_path: Path) -> None:
    model, _, made, adapters = mixture
    plain: Any = load_model(model)
    write_adapter(tmp_path, EXPERTS, adapters, matrices=expert_matrices(plain))
    peft = PeftModel.from_pretrained(plain, str(tmp_path)).merge_and_unload()
    before, expected = load_file(model / "model.safetensors"), revert_weight_conversion(peft, peft.state_dict())
    trained = {name for name in before if ".experts." in name or "q_proj" in name}
    assert made.weights.keys() == trained | {"scalar.weight", "scalar.bias"}
    assert len(trained) == 2 * (1 + 3 * 4)
    for name in trained:
        torch.testing.assert_close(torch.from_numpy(made.weights[name]), expected[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(expected[name], before[name])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ZERO_3, id="ZeRO-3 × 2"),
        pytest.param(FSDP2, id="FSDP2 × 2", marks=pytest.mark.long),
        pytest.param({"library": "fsdp2", "num_workhorses": 2, "expert_parallel": 2}, id="EP 2"),
        pytest.param(TP, id="TP 2", marks=pytest.mark.long),
    ],
)
def test_the_layout_of_adapted_experts_does_not_show(mixture: Any, tmp_path: Path, layout: dict[str, Any]) -> None:
    model, batches, made, adapters = mixture
    spec = adapted(model, EXPERTS, layout)
    split, own, _ = run(spec, batches, tmp_path)
    same(split, made)
    assert own.keys() == adapters.keys()
    for name, whole in adapters.items():
        torch.testing.assert_close(own[name], whole, rtol=1e-3, atol=1e-5)
    goes_on_alike(spec, split, batches, tmp_path)


@pytest.mark.parametrize(
    "layout", [pytest.param(TP, id="TP 2"), pytest.param(FSDP2, id="FSDP2 × 2", marks=pytest.mark.long)]
)
def test_training_goes_on_from_an_adapter_under_a_layout(
    alone: Any, tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: dict[str, Any]
) -> None:
    config, made, adapters, _ = alone
    if config.dora:
        return  # starts anew
    merged = tmp_path / "merged"
    shutil.copytree(tiny_model, merged)
    trained = {n: torch.from_numpy(w) for n, w in made.weights.items() if not n.startswith("scalar.")}
    overwrite(merged, trained.items(), 0, 1)
    write_adapter(merged / ADAPTER, config, adapters)
    whole, own, _ = run(replace(adapted(merged, config, {}), continues=True), batches, tmp_path / "1")
    split, parts, _ = run(replace(adapted(merged, config, layout), continues=True), batches, tmp_path / "2")
    same(split, whole)
    for name, tensor in own.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-5)
    write_adapter(tmp_path / "last", config, own)
    expected = PeftModel.from_pretrained(load_model(tiny_model), str(tmp_path / "last")).merge_and_unload().state_dict()
    for name in trained:
        torch.testing.assert_close(torch.from_numpy(whole.weights[name]), expected[name], rtol=1e-4, atol=1e-6)


def goes_on_alike(spec: ModelSpec, made: LayoutRun, batches: list[TextBatch], place: Path) -> None:
    """A snapshot holds the adapters and the head alone, and going on from it gives the same bits."""
    keys = {key.partition("/")[2] for shard in read_shards(place / "snapshot") for key in shard.pieces}
    assert all("lora_" in key or key.endswith(".magnitude") or key.startswith("scalar.") for key in keys)
    again = collect(spec, run_ranks(spec, place, part, batches, range(2, 3), place / "snapshot", None))
    assert all(np.array_equal(again.weights[name], whole) for name, whole in made.weights.items())


def test_bfloat16_passes_step_float32_adapters(tiny_model: Path, batches: list[TextBatch], tmp_path: Path) -> None:
    """Adapters are merged in float32, from master weights that bfloat16 cannot represent."""
    spec = adapted(tiny_model, LORA, ZERO_3 | {"precision": "bfloat16"})
    made, adapters, _ = run(spec, batches, tmp_path)
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in adapters.values())
    for name, weight in load_file(tiny_model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            a, b = (adapters[f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight"] for side in "AB")
            assert torch.equal(torch.from_numpy(made.weights[name]), weight + (b @ a) * 4.0)  # alpha / rank
    goes_on_alike(spec, made, batches, tmp_path)

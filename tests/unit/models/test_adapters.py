"""LoRA adapters: the model as it was at first, alone in learning, merged as peft itself merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.message_texts import Messages
from tests.unit.conftest import TINY
from tests.unit.models.families import model
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import fresh_llama
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import LINEAR_LAYERS, LoRAConfig

TEXTS = torch.tensor([5, 9, 7, 42, 8, 3, 8, 100, 3, 11, 250, 7]), torch.tensor([6, 6])


@pytest.fixture
def lm(tiny_tokenizer: Any) -> Any:
    return fresh_llama(TINY, tiny_tokenizer, seed=1)


@pytest.fixture
def checkpoint(lm: Any, tmp_path: Path) -> Path:
    save_file({name: p.detach().clone() for name, p in lm.named_parameters()}, tmp_path / "model.safetensors")
    return tmp_path


def test_nothing_changes_until_an_adapter_learns(lm: Any, checkpoint: Path) -> None:
    before = HeadedLM(lm).hidden(*TEXTS).detach()
    module = HeadedLM(lm, scalar_head=True, adapters=Adapters(lm, LoRAConfig(rank=2), checkpoint, seed=3))
    hidden = module.hidden(*TEXTS)
    assert torch.equal(hidden, before)
    (hidden.pow(3).sum() + module.scalars(hidden).sum()).backward()
    learned = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    layers = [f"lm.model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")]
    places = [
        f"{layer}.{name}" for layer in layers for name in LINEAR_LAYERS if (name[0] in "qkvo") == ("attn" in layer)
    ]
    sides = {f"{place}.lora_{side}.default.weight" for place in places for side in "AB"}
    assert learned == sides | {"scalar.weight", "scalar.bias"}


def test_the_seed_is_all_that_chance_depends_on(tiny_tokenizer: Any, checkpoint: Path) -> None:
    def first(seed: int) -> dict[str, torch.Tensor]:
        torch.rand(seed + 1)
        lm = fresh_llama(TINY, tiny_tokenizer, seed=1)
        Adapters(lm, LoRAConfig(rank=2, target_modules=["q_proj"]), checkpoint, seed)
        return {name: p.detach() for name, p in lm.named_parameters() if "lora_A" in name}

    one, again, other = first(3), first(3), first(4)
    assert len(one) == 3
    assert all(torch.equal(again[name], value) for name, value in one.items())
    assert not any(torch.equal(other[name], value) for name, value in one.items())


def test_merged_as_peft_merges(tiny_tokenizer: Any, lm: Any, checkpoint: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapters = Adapters(lm, LoRAConfig(rank=2, alpha=6.0), checkpoint, seed=3)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    merged = dict(adapters.merged(lambda parameter: parameter.data))
    plain = fresh_llama(TINY, tiny_tokenizer, seed=1)
    peft = get_peft_model(plain, LoraConfig(r=2, lora_alpha=6.0, target_modules="all-linear"))
    peft.base_model.model.load_state_dict({n: p for n, p in lm.state_dict().items() if "lora_" in n}, strict=False)
    expected = peft.merge_and_unload().state_dict()
    before = load_file(checkpoint / "model.safetensors")
    assert len(merged) == 3 * len(LINEAR_LAYERS)
    for name, weight in merged.items():
        assert torch.equal(weight, expected[name])
        assert not torch.equal(weight, before[name])


@pytest.mark.parametrize("name", ["qkv", "lm_head", "embed_tokens"])
def test_layers_that_cannot_have_adapters(lm: Any, checkpoint: Path, name: str, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        Adapters(lm, LoRAConfig(target_modules=[name]), checkpoint, seed=0)


def mixture(family: str, **fields: Any) -> Any:
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return model(family, vocab_size=300, **(experts | fields)).float()


@pytest.mark.parametrize(
    ("family", "fields", "adapted"),
    [
        ("qwen3_moe", {}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mixtral", {}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 32},
         {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"}),
    ],
)  # fmt: skip
def test_a_mixture_is_adapted_outside_its_experts(
    tmp_path: Path, family: str, fields: dict[str, Any], adapted: set[str]
) -> None:
    lm = mixture(family, **fields)
    lm.save_pretrained(tmp_path)
    module = HeadedLM(lm, adapters=Adapters(lm, LoRAConfig(rank=2), tmp_path, seed=3))
    names = [name for name, _ in module.named_parameters() if "lora_A" in name]
    assert {name.split(".")[-4] for name in names} == adapted
    assert not [name for name in names if ".experts." in name]
    # Twice, which what peft makes of experts does not survive.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for _ in range(2):
        found = torch.autograd.grad(module.hidden(*TEXTS).pow(3).sum(), parameters, allow_unused=True)
        assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in found)
    assert len(dict(module.adapters.merged(lambda parameter: parameter.data))) == len(names)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["experts", "gate"])
def test_experts_and_routers_get_no_adapters(tmp_path: Path, name: str) -> None:
    lm = mixture("qwen3_moe")
    lm.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^lora\.target_modules: ") as caught:
        Adapters(lm, LoRAConfig(rank=2, target_modules=[name]), tmp_path, seed=0)
    assert "\n" not in str(caught.value)

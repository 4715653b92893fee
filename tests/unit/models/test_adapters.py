"""LoRA adapters: the model as it was at first, alone in learning, merged as peft itself merges."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.family_recipes import OMIT, RECIPES, SIZES
from tests.message_texts import Messages
from tests.unit.conftest import TINY
from tests.unit.models.families import model
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.models.adapter_files import keep_adapter, read_fields, with_adapter, write_adapter
from xray_runtime.models.adapters import Adapters, adapted_layers
from xray_runtime.models.causal_lm import fresh_llama, load_model, read_pretrained, save_model
from xray_runtime.models.config import PretrainedBase, named_base
from xray_runtime.models.continued import continues
from xray_runtime.models.expert_adapters import expert_matrices
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import LINEAR_LAYERS, LoRAConfig
from xray_runtime.models.weight_files import overwrite

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
    sides = {f"{place}.lora_{side}.weight" for place in places for side in "AB"}
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


@pytest.mark.parametrize(
    "fields",
    [{}, {"rslora": True}, {"dora": True}, {"dora": True, "rslora": True, "target_modules": ["q_proj", "down_proj"]}],
    ids=["LoRA", "rsLoRA", "DoRA", "DoRA of two layers"],
)
def test_computed_published_and_merged_as_by_peft(
    tiny_tokenizer: Any, lm: Any, checkpoint: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    from peft import PeftModel

    config = LoRAConfig(rank=2, alpha=6.0, **fields)
    adapters = Adapters(lm, config, checkpoint, seed=3)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=random)
            elif name.endswith("magnitude"):
                parameter.mul_(1.0 + 0.1 * torch.randn(parameter.shape, generator=random))
    merged = dict(adapters.merged(lambda name, parameter: parameter.data))
    write_adapter(tmp_path / "adapter", config, dict(adapters.unmerged(lambda name, parameter: parameter.data)), "base")
    ours = HeadedLM(lm, adapters=adapters)
    hidden = ours.hidden(*TEXTS)
    with adapters.off():
        frozen = ours.hidden(*TEXTS)
    assert torch.equal(frozen, HeadedLM(fresh_llama(TINY, tiny_tokenizer, seed=1)).hidden(*TEXTS))

    plain = fresh_llama(TINY, tiny_tokenizer, seed=1)
    peft = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"), is_trainable=True).eval()
    theirs = HeadedLM(peft.base_model.model).hidden(*TEXTS)
    torch.testing.assert_close(hidden, theirs, rtol=1e-5, atol=1e-6)
    assert (hidden - frozen).abs().max() > 1e-2
    # Gradients too: a norm of DoRA's is a constant there.
    hidden.pow(3).sum().backward()
    theirs.pow(3).sum().backward()
    found = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad}
    own = {f"base_model.model.{n.removeprefix('lm.')}": p for n, p in ours.named_parameters() if p.requires_grad}
    assert len(own) == len(found) > 0
    for name, parameter in own.items():
        part = name.removesuffix(".magnitude") + ".lora_magnitude_vector.default.weight"
        gradient = found[part if name.endswith("magnitude") else name.replace(".weight", ".default.weight")]
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    expected = peft.merge_and_unload().state_dict()
    before = load_file(checkpoint / "model.safetensors")
    assert len(merged) == 3 * len(config.target_modules or LINEAR_LAYERS)
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-7)
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
    assert {name.split(".")[-3] for name in names} == adapted
    assert not [name for name in names if ".experts." in name]
    # Twice, which what peft makes of experts does not survive.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for _ in range(2):
        found = torch.autograd.grad(module.hidden(*TEXTS).pow(3).sum(), parameters, allow_unused=True)
        assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in found)
    assert len(dict(module.adapters.merged(lambda name, parameter: parameter.data))) == len(names)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_adapted_as_by_peft(tmp_path: Path, family: str) -> None:
    from peft import PeftModel

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    mixture(family, sliding_window=8).save_pretrained(base)
    lm: Any = load_model(base)
    frozen = HeadedLM(load_model(base)).hidden(*TEXTS)
    config = LoRAConfig(rank=2, alpha=6.0, target_modules=["q_proj", "experts"])
    adapters = Adapters(lm, config, base, seed=3)
    ours = HeadedLM(lm, adapters=adapters)
    assert torch.equal(ours.hidden(*TEXTS), frozen)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=random)
    hidden = ours.hidden(*TEXTS)
    assert (hidden - frozen).abs().max() > 1e-2
    with adapters.off():
        assert torch.equal(ours.hidden(*TEXTS), frozen)
    own = {n: t.clone() for n, t in adapters.unmerged(lambda name, parameter: parameter.data)}
    write_adapter(adapter, config, own, "base", matrices=expert_matrices(lm))
    assert read_fields(adapter).lora == config

    peft = PeftModel.from_pretrained(load_model(base), str(adapter), is_trainable=True).eval()
    theirs = HeadedLM(peft.base_model.model).hidden(*TEXTS)
    torch.testing.assert_close(hidden, theirs, rtol=1e-5, atol=1e-6)
    hidden.pow(3).sum().backward()
    theirs.pow(3).sum().backward()
    expected = {n.replace(".default.", "."): p.grad for n, p in peft.named_parameters() if p.requires_grad}
    found = dict(adapters.unmerged(lambda name, parameter: parameter.grad))
    assert found.keys() == expected.keys() == own.keys()
    for name, gradient in found.items():
        size = expected[name].abs().max()
        torch.testing.assert_close(gradient / size, expected[name] / size, rtol=0, atol=1e-5)
    # As files hold them, and back from peft's form.
    merge_into(base, adapters)
    torch.testing.assert_close(HeadedLM(load_model(base)).hidden(*TEXTS), hidden, rtol=1e-5, atol=1e-6)
    adapters.load({name: 2.0 * tensor for name, tensor in own.items()})
    assert all(torch.equal(t, 2.0 * own[n]) for n, t in adapters.unmerged(lambda name, parameter: parameter.data))


def merge_into(directory: Path, adapters: Adapters) -> None:
    overwrite(directory, adapters.merged(lambda name, parameter: parameter.detach()), 0, 1)


def test_matrices_are_merged_under_their_names_in_files(tmp_path: Path) -> None:
    """Files of Nemotron-H say `backbone` where transformers says `model`."""
    model("nemotron_h", vocab_size=320).float().save_pretrained(tmp_path)
    lm: Any = load_model(tmp_path)
    frozen = HeadedLM(lm).hidden(*TEXTS)
    adapters = Adapters(lm, LoRAConfig(rank=2), tmp_path, seed=0)
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    hidden = HeadedLM(lm, adapters=adapters).hidden(*TEXTS)
    assert (hidden - frozen).abs().max() > 1e-2
    merge_into(tmp_path, adapters)
    torch.testing.assert_close(HeadedLM(load_model(tmp_path)).hidden(*TEXTS), hidden, rtol=1e-5, atol=1e-5)


def test_a_matrix_that_no_file_has_is_refused(lm: Any, checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "q_proj" not in n}, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=r"^lora is not supported for model.layers.0.self_attn.q_proj of a Llama"):
        Adapters(lm, LoRAConfig(rank=2), checkpoint, seed=0)


@pytest.mark.parametrize(
    ("name", "fields"), [("gate", {}), ("experts", {"dora": True})], ids=["router", "DoRA of experts"]
)
def test_what_of_a_mixture_gets_no_adapters(
    tmp_path: Path, name: str, fields: dict[str, Any], message_texts: Messages
) -> None:
    lm = mixture("qwen3_moe")
    lm.save_pretrained(tmp_path)
    with message_texts.raises(ValueError):
        Adapters(lm, LoRAConfig(rank=2, target_modules=[name], **fields), tmp_path, seed=0)


def test_an_adapter_of_others_is_merged_into_its_base(tmp_path: Path, tiny_tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    save_model(fresh_llama(TINY, tiny_tokenizer, seed=1), tiny_tokenizer, tmp_path / "base")
    plain = load_model(tmp_path / "base")
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"o_proj": 3.0}}
    targets = ["q_proj", "o_proj"]
    peft = get_peft_model(plain, LoraConfig(r=2, lora_alpha=6, target_modules=targets, **patterns))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    peft.save_pretrained(tmp_path / "adapter")
    found = read_pretrained(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
    expected = peft.merge_and_unload().state_dict()
    assert not found.files
    for name, tensor in found.lm.state_dict().items():
        assert torch.equal(tensor, expected[name])
    # As a base it stands for the model that it names, our own also for the checkpoint beside its own.
    fields = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(fields.read_text())
    shutil.copytree(fields.parent, tmp_path / "policy" / "adapter")
    for adapter, named in ((fields.parent, str(tmp_path / "base")), (tmp_path / "policy" / "adapter", "base")):
        (adapter / fields.name).write_text(json.dumps(content | {"base_model_name_or_path": named}))
        base = PretrainedBase(model=str(adapter))
        assert (base.model, base.adapter) == (str(tmp_path / "base"), str(adapter))


def test_an_adapter_that_cannot_be_merged_is_refused(
    tmp_path: Path, tiny_tokenizer: Any, message_texts: Messages
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_model(fresh_llama(TINY, tiny_tokenizer, seed=1), tiny_tokenizer, base)
    lora = LoRAConfig(rank=2, target_modules=["q_proj"])

    def refused() -> None:
        with message_texts.raises(ValueError):
            read_pretrained(str(base), adapter=str(adapter))

    adapter.mkdir()
    refused()
    strange = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    write_adapter(adapter, lora, {strange: torch.ones(2, 32), strange.replace("_A", "_B"): torch.ones(32, 2)})
    refused()
    narrow = strange.replace(".9.", ".0.")
    write_adapter(adapter, lora, {narrow: torch.ones(2, 16), narrow.replace("_A", "_B"): torch.ones(32, 2)})
    refused()
    (adapter / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    refused()
    (base / "manifest.json").write_text("{}")
    write_adapter(adapter, lora, {}, "base", sha256="ab" * 32)
    refused()
    write_adapter(adapter, lora, {}, "base")
    with pytest.raises(ValueError, match="adapter must be left out where model"):
        PretrainedBase(model=str(adapter), adapter="other")
    write_adapter(adapter, lora, {})
    with pytest.raises(ValueError, match=r"model = '.*' is not allowed: its adapter_config\.json names no base model"):
        PretrainedBase(model=str(adapter))


def test_what_is_no_path_is_no_adapter() -> None:
    assert named_base(Path("a" * 5000)) is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_goes_on_from_an_adapter(tmp_path: Path, family: str) -> None:
    """From the merged model, to the bit; published are A and B of the model below, and their sum."""
    from peft import PeftModel

    base, merged, adapter = (tmp_path / name for name in ("base", "merged", "adapter"))
    fields = {"n_embd": 32, "n_layer": 2, "n_head": 2} if family == "gpt2" else {}
    model(family, vocab_size=300, **fields).float().save_pretrained(base)
    config = LoRAConfig(rank=2, alpha=6.0)

    def trained(lm: Any, adapters: Adapters) -> None:
        with torch.no_grad():
            for number, (name, parameter) in enumerate(lm.named_parameters()):
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 10)

    lm: Any = load_model(base)
    adapters = Adapters(lm, config, base, seed=3)
    trained(lm, adapters)
    first = {n: t.clone() for n, t in adapters.unmerged(lambda name, parameter: parameter.data)}
    write_adapter(merged / ADAPTER, config, first, "base")
    shutil.copytree(base, merged, dirs_exist_ok=True)
    merge_into(merged, adapters)

    given = HeadedLM(load_model(merged)).hidden(*TEXTS)
    lm = load_model(merged)
    adapters = Adapters(lm, config, merged, seed=4)
    adapters.go_on(first)
    module = HeadedLM(lm, adapters=adapters)
    assert torch.equal(module.hidden(*TEXTS), given)
    trained(lm, adapters)
    hidden = module.hidden(*TEXTS)
    assert (hidden - given).abs().max() > 1e-2
    with adapters.off():
        assert torch.equal(module.hidden(*TEXTS), given)
    last = dict(adapters.unmerged(lambda name, parameter: parameter.data))
    assert all(not torch.equal(tensor, first[name]) for name, tensor in last.items())
    write_adapter(adapter, config, last, "base")
    peft = PeftModel.from_pretrained(load_model(base), str(adapter)).merge_and_unload()
    torch.testing.assert_close(HeadedLM(peft).hidden(*TEXTS), hidden, rtol=1e-4, atol=1e-5)
    merge_into(merged, adapters)
    torch.testing.assert_close(HeadedLM(load_model(merged)).hidden(*TEXTS), hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": ["o_proj", "q_proj"]}, "sft: continues the adapter of merged"),
        ({"target_modules": ["q_proj"]}, "lora.target_modules names other layers"),
        ({}, "lora.target_modules names other layers"),
        ({"rank": 4, "rslora": True}, "lora.rank is 4, not 2; lora.rslora is True, not False"),
        ({"publish": "adapter"}, "lora.publish is 'adapter'"),
    ],
    ids=["the same", "fewer layers", "all layers", "other sizes", "published alone"],
)
def test_it_goes_on_where_the_fields_are_the_same(
    tmp_path: Path, fields: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import LoraConfig, get_peft_model

    place = tmp_path / "merged"
    model("llama", vocab_size=300).save_pretrained(place)
    peft = get_peft_model(load_model(place), LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "o_proj"]))
    peft.save_pretrained(tmp_path / "others")
    keep_adapter(tmp_path / "others", place / ADAPTER, "org/name")
    assert read_fields(place / ADAPTER).base == "org/name"
    with caplog.at_level("INFO"):
        found = continues(place, LoRAConfig(**({"rank": 2, "alpha": 6.0} | fields)), "sft")
    assert found is (said in "sft: continues the adapter of merged")
    assert said in caplog.text


@pytest.mark.parametrize("fields", [{"rank_pattern": {"q_proj": 4}}, {"r": 1025}, {"lora_alpha": 0}])
def test_an_adapter_that_training_does_not_have_is_not_kept(tmp_path: Path, fields: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    given: dict[str, Any] = {"r": 2} | fields
    peft = get_peft_model(model("llama"), LoraConfig(target_modules=["q_proj", "o_proj"], **given))
    peft.save_pretrained(tmp_path / "others")
    keep_adapter(tmp_path / "others", tmp_path / "kept", "base")
    assert not (tmp_path / "kept").exists()
    assert not continues(tmp_path, LoRAConfig(), "sft")


def test_an_adapter_without_its_base_is_refused(tmp_path: Path) -> None:
    """A checkpoint that was published as an adapter alone, and the adapter in it."""
    checkpoint = tmp_path / "ppo-1"
    write_adapter(checkpoint / ADAPTER, LoRAConfig(rank=2), {}, "sft-1", sha256="ab" * 32)
    for given in (checkpoint, checkpoint / ADAPTER):
        with pytest.raises(ValueError, match=r"it is an adapter of the checkpoint sft-1, which is not in .*: copy it"):
            PretrainedBase(model=str(given))
    (tmp_path / "sft-1").mkdir()
    assert PretrainedBase(model=str(checkpoint)) == PretrainedBase(model=str(checkpoint / ADAPTER))
    assert PretrainedBase(model=str(checkpoint)).model == str(tmp_path / "sft-1")


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1", "hunyuan_v1_moe"])
def test_layers_whose_weights_a_model_reads_itself_get_none(tmp_path: Path, family: str, tiny_tokenizer: Any) -> None:
    """What is adapted learns, and of Mamba peft reads it: neither routers nor what Mamba's scan reads."""
    fields = {name: value for name, value in (SIZES | RECIPES[family]).items() if value is not OMIT}
    config = transformers.AutoConfig.for_model(family, vocab_size=320, **fields)
    save_model(transformers.AutoModelForCausalLM.from_config(config), tiny_tokenizer, tmp_path / "base")
    lm: Any = load_model(tmp_path / "base")
    lora = LoRAConfig(rank=2)
    adapters = Adapters(lm, lora, tmp_path / "base", seed=0)
    names = {name.rpartition(".")[2] for name in adapters.layers}
    assert not names & {"out_proj", "dt_proj", "x_proj", "wg"}
    module = HeadedLM(lm, adapters=adapters)
    module.hidden(*TEXTS).pow(3).sum().backward()
    assert all(layer.lora_B.weight.grad.abs().sum() > 0 for layer in adapters.layers.values())
    if family != "hunyuan_v1_moe":  # beside experts peft takes the shared expert's layers for theirs
        write_adapter(tmp_path / "adapter", lora, dict(adapters.unmerged(lambda name, parameter: parameter.data)))
        with_adapter(load_model(tmp_path / "base"), tmp_path / "adapter", "adapter", tmp_path / "base")
        with pytest.raises(ValueError, match="is read by the state-space layer"):
            adapted_layers(load_model(tmp_path / "base"), LoRAConfig(target_modules=["out_proj"]))

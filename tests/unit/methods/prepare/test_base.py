"""Pretrained models at the stage `base`: what X-ray computes and publishes as it is, and refusals of all else in one
line, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.engines.shard_loading import skeleton_of
from xray_runtime.methods.base.body import LEFT_OUT, run
from xray_runtime.methods.base.config import HubBase
from xray_runtime.methods.common.findings import base_findings
from xray_runtime.models.causal_lm import load_model

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 32, "bos_token_id": None},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
Saved = Callable[..., Path]
Weights = dict[str, torch.Tensor]


@pytest.fixture
def saved(tmp_path: Path, tiny_tokenizer: Any) -> Saved:
    """(family, fields of its config) → the directory of a random model and its tokenizer."""

    def make(family: str = "llama", kind: str = "CausalLM", **fields: Any) -> Path:
        ends = {"pad_token_id": tiny_tokenizer.pad_token_id, "eos_token_id": tiny_tokenizer.eos_token_id}
        config = transformers.AutoConfig.for_model(
            family, **(SIZES | ends | {"vocab_size": len(tiny_tokenizer)} | fields)
        )
        torch.manual_seed(3)
        auto = getattr(transformers, f"AutoModelFor{kind}")
        auto.from_config(config).save_pretrained(tmp_path / "source")
        tiny_tokenizer.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return make


def base(source: Path, out: Path) -> FakeRecorder:
    """Run the stage."""
    out.mkdir(exist_ok=True)
    recorder = FakeRecorder(out)
    stage: Any = SimpleNamespace(name="base", config=HubBase(model=str(source)))
    assert run(stage, out, recorder) == 0  # type: ignore[arg-type]
    return recorder


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change(source: Path, task: Callable[[Weights], None]) -> None:
    """Change the tensors of a model's file."""
    weights = load_file(source / "model.safetensors")
    task(weights)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})


def logits(directory: Path) -> torch.Tensor:
    """By plain transformers, with the attention of the model's authors."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        found: torch.Tensor = lm.eval()(input_ids=torch.tensor([[5, 9, 42, 7, 30, 11]])).logits
    return found


# `tests/unit/models` has the families; here are those whose config says something that a loader could leave out.
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        *[
            pytest.param(family, {}, marks=pytest.mark.long)
            for family in ("mistral", "qwen2", "qwen3", "gemma", "olmo2", "apertus", "granite")
        ],
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("mistral", {"sliding_window": 4}),
        ("gemma3_text", {"sliding_window": 4}),
        ("granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.2, "attention_multiplier": 0.1}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("gemma2", {"attn_logit_softcapping": 5.0, "sliding_window": 4}),
        ("gpt_oss", EXPERTS),
        ("llama4_text", EXPERTS),
        ("mamba2", {"num_heads": 4, "head_dim": 32, "n_groups": 1, "expand": 2, "chunk_size": 8}),
        (
            "falcon_h1",
            {
                "lm_head_multiplier": 0.25,
                "mamba_d_ssm": 64,
                "mamba_n_heads": 2,
                "mamba_d_head": 32,
                "mamba_chunk_size": 8,
            },
        ),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        *[(family, EXPERTS) for family in ("mixtral", "qwen3_moe")],
    ],
)
def test_models_with_equal_logits_are_published(
    saved: Saved, tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    source = saved(family, **fields)
    base(source, tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0, atol=0)
    skeleton_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("minicpm3", {"dim_model_base": 16}, "changes its last hidden states"),
    ],
)  # fmt: skip
def test_models_with_other_logits_are_refused(
    saved: Saved, tmp_path: Path, family: str, fields: dict[str, Any], reason: str
) -> None:
    check_refused(saved(family, **fields), tmp_path / "out", reason)


def check_refused(source: Path, out: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^base\.model: ") as caught:
        base(source, out)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def own_head(source: Path) -> None:
    edit(source / "config.json", tie_word_embeddings=True)


def test_a_separate_output_layer_is_kept_and_reported(saved: Saved, tmp_path: Path) -> None:
    """Trainers took the config's word and trained it tied; readers took the file's and had the old layer."""
    source, out = saved("llama", tie_word_embeddings=False), tmp_path / "out"
    expected = logits(source)
    own_head(source)
    base(source, out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(logits(out), expected, rtol=0, atol=0)
    lm: Any = skeleton_of(out)
    assert lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight


def test_an_output_layer_that_is_the_embedding_stays_tied(saved: Saved, tmp_path: Path) -> None:
    source, out = saved("llama", tie_word_embeddings=True), tmp_path / "out"
    change(source, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    base(source, out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(out / "model.safetensors")


def test_a_checkpoint_with_a_tensor_that_no_trainer_has_is_not_trained(saved: Saved, tmp_path: Path) -> None:
    source = saved("llama", tie_word_embeddings=False)
    own_head(source)
    with pytest.raises(ValueError, match=r"holds lm_head\.weight, which no LlamaForCausalLM like this one has"):
        skeleton_of(source)


def add(name: str, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    return lambda source: change(source, lambda weights: weights.update({name: torch.ones(3).to(dtype)}))


def quantized(method: str) -> Callable[[Path], None]:
    return lambda source: edit(source / "config.json", quantization_config={"quant_method": method})


def saved_as(kind: str) -> Callable[[Path], None]:
    return lambda source: edit(source / "config.json", architectures=[kind])


def in_float8(source: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(source, lambda weights: weights.update({name: weights[name].to(torch.float8_e4m3fn)}))


def more_tokens(source: Path) -> None:
    """As a padding token that was added without a row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"pad_token": "<|new pad|>"})
    tokenizer.save_pretrained(source)


def fewer_rows(source: Path) -> None:
    edit(source / "config.json", vocab_size=100, pad_token_id=0)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    change(source, lambda weights: weights.update({name: weights[name][:100].clone() for name in names}))


def a_layer_less(source: Path) -> None:
    edit(source / "config.json", num_hidden_layers=1)


def a_layer_more(source: Path) -> None:
    edit(source / "config.json", num_hidden_layers=3)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (add("model.visual.patch_embed.weight"), "has 1 tensors that a LlamaForCausalLM does not have (model.visual"),
        (add("model.layers.0.mlp.up_proj.weight_scale"), "does not have (model.layers.0.mlp.up_proj.weight_scale)"),
        (add("mtp.fc.weight"), "does not have (mtp.fc.weight)"),
        (add("score.weight"), "does not have (score.weight)"),
        (a_layer_less, "has 9 tensors that a LlamaForCausalLM does not have (model.layers.1.input_layernorm.weight"),
        (a_layer_more, "has no weights for model.layers.2"),
        (in_float8, "is quantized (model.layers.0.mlp.up_proj.weight is stored as F8_E4M3)"),
        *[(quantized(method), f"is quantized ({method}): convert it to bfloat16 first")
          for method in ("compressed-tensors", "gptq", "awq", "bitsandbytes", "fp8")],
        (saved_as("LlamaForSequenceClassification"), "a reward model is given to reward_base"),
        (saved_as("LlamaModel"), "is a LlamaModel, which transformers reads as a LlamaForCausalLM"),
        (lambda d: edit(d / "config.json", auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"}), "code of its own"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), "an adapter: name the model"),
        (lambda d: save_file({"a": torch.ones(1)}, d / "adapter_model.safetensors"), "an adapter: name the model"),
        (more_tokens, "rows, and its tokenizer 1 tokens above (<|new pad|>)"),
        (fewer_rows, "has an embedding of 100 rows"),
    ],
)  # fmt: skip
def test_files_that_hold_something_else_are_refused(
    saved: Saved, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    source = saved("llama", tie_word_embeddings=False)
    damage(source)
    check_refused(source, tmp_path / "out", reason)


def test_a_reward_model_is_no_base(saved: Saved, tmp_path: Path) -> None:
    source = saved("llama", kind="SequenceClassification", num_labels=1, tie_word_embeddings=True)
    check_refused(source, tmp_path / "out", "is a LlamaForSequenceClassification")


def test_a_model_with_a_vision_tower_is_refused(saved: Saved, tmp_path: Path) -> None:
    """As Gemma 3 of 4B and Qwen3.5 are published; transformers would read the language model alone."""
    source = saved("gemma3_text")
    text = json.loads((source / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (source / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 32}}))
    check_refused(
        source, tmp_path / "out", "is a 'gemma3' model of several parts (vision_config), of which X-ray would"
    )


def test_unneeded_tensors_are_listed_and_counted(saved: Saved, tmp_path: Path) -> None:
    """Frequencies that old Llamas hold, and heads that predict further tokens, which transformers ignores too."""
    source, out = saved("llama"), tmp_path / "out"
    names = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2)]
    change(source, lambda weights: weights.update({name: torch.ones(16) for name in names}))
    found = base(source, out)
    assert json.loads((out / LEFT_OUT).read_text()) == names
    assert found.values["base/left_out"] == 2
    [finding] = base_findings({name: [(0, value)] for name, value in found.values.items()})
    assert finding.startswith("left out 2 tensors or tokens")
    assert not set(load_file(out / "model.safetensors")) & set(names)


def test_an_added_token_that_nothing_writes_needs_no_row(saved: Saved, tmp_path: Path) -> None:
    """As Gemma 3 of 1B has, whose tokenizer knows pictures."""
    source, out = saved("llama"), tmp_path / "out"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.save_pretrained(source)
    assert base(source, out).values["base/left_out"] == 1
    assert json.loads((out / LEFT_OUT).read_text()) == ["<image_soft_token>"]


def test_weights_that_change_when_they_are_saved_are_not_published(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("mixtral", **EXPERTS)
    change(source, lambda weights: weights.update({n: t.bfloat16() for n, t in weights.items()}))
    monkeypatch.setattr("xray_runtime.models.causal_lm.has_plain", lambda *_: False)
    monkeypatch.setattr("xray_runtime.methods.base.body.load_model", lambda out: _shifted(load_model(out)))
    check_refused(
        source, tmp_path / "out", "is not what transformers reads again after it was saved (model.norm.weight"
    )


def _shifted(lm: Any) -> Any:
    lm.model.norm.weight.data += 1e-6
    return lm

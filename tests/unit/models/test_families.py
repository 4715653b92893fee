"""Model families: each is found by its model types, and logits equal those of transformers in float64."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.unit.models.families import model
from xray_runtime.algorithms import logprobs
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.models.family import FAMILIES, UNLISTED, Family, Logits, family_of
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.likelihood_objective import LikelihoodObjective
from xray_runtime.models.trial import OtherModelError, check_computed

SOURCES = Path(__file__).parents[3] / "xray_runtime"
CONTRIBUTING = SOURCES.parent / "CONTRIBUTING.md"
TYPES = {kind: name for name in FAMILIES for kind in FAMILIES.get(name).model_types}
QUOTED = re.compile(r'"(\w+)"')
MAY_NAME_TYPES = {SOURCES / "models" / "shapes.py"}
"""Configs of well-known models, for plans without a network."""
LENGTHS = torch.tensor([6, 4])
IDS = torch.tensor([5, 9, 7, 42, 11, 6, 8, 8, 100, 3])


def test_every_type_has_one_family_and_transformers_knows_it() -> None:
    kinds = [kind for name in FAMILIES for kind in FAMILIES.get(name).model_types]
    assert len(kinds) == len(set(kinds)) >= 29
    assert all(isinstance(FAMILIES.get(name), Family) for name in FAMILIES)
    assert all(family_of(kind) is FAMILIES.get(name) for kind, name in TYPES.items())
    assert set(kinds) <= set(transformers.CONFIG_MAPPING.keys())
    assert family_of("gpt2") is family_of(None) is UNLISTED
    assert not UNLISTED.packs
    assert UNLISTED.tried == ()


def test_no_other_file_lists_types() -> None:
    """A family is added by its file alone only while no other file asks for a model type by name."""
    naming = {
        path
        for path in SOURCES.rglob("*.py")
        if path.parent.name != "families" and TYPES.keys() & set(QUOTED.findall(path.read_text(encoding="utf-8")))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in TYPES
    }
    assert naming == MAY_NAME_TYPES


def test_logits_are_scaled_then_divided_then_capped() -> None:
    # 10 · 0.5 / 4 = 1.25, and 2 · tanh(1.25 / 2) = 1.109198; tanh(0.625) = 0.554600.
    found = Logits(scale=0.5, divisor=4.0, cap=2.0)(torch.tensor([10.0, 0.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([1.1091994, 0.0], abs=1e-6)
    plain = torch.tensor([3.0])
    assert Logits()(plain) is plain


SCALED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 3},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "sliding_window": 3},
    "gemma3n_text": {
        **{"final_logit_softcapping": 2.0, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2},
        **{"vocab_size_per_layer_input": 120, "sliding_window": 3, "activation_sparsity_pattern": [0.0] * 2},
    },
    "granitemoehybrid": {
        "logits_scaling": 8.0,
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
    },
    "nanochat": {"final_logit_softcapping": 2.0},
    "recurrent_gemma": {
        "logits_soft_cap": 2.0,
        "sliding_window": 3,
        "lru_width": 32,
        "block_types": ["recurrent", "attention"],
    },
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_and_capped_logits_are_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities, entropies and gradients; also from parts of the logits that are computed again."""
    lm = model(kind, **SCALED[kind])
    rows = [lm(input_ids=row[None], use_cache=False).logits[0] for row in IDS.split(LENGTHS.tolist())]
    expected = torch.log_softmax(torch.cat([logits[:-1] for logits in rows]), -1)
    targets, before = torch.cat([IDS[1:6], IDS[7:]]), torch.tensor([0, 1, 2, 3, 4, 6, 7, 8])
    chosen, entropy = expected.gather(1, targets[:, None])[:, 0], -(expected.exp() * expected).sum(-1)
    wanted = torch.autograd.grad((chosen + 0.1 * entropy).sum(), list(lm.parameters()))
    module = HeadedLM(lm)
    for limit in (2**24, 2 * 120):
        monkeypatch.setattr(logprobs, "MAX_LOGITS", limit)
        found, found_entropy = module.logprobs(module.hidden(IDS, LENGTHS)[before], targets, 1.0)
        torch.testing.assert_close(found, chosen, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found_entropy, entropy, rtol=1e-10, atol=1e-10)
        gradients = torch.autograd.grad((found + 0.1 * found_entropy).sum(), list(lm.parameters()))
        for gradient, other in zip(gradients, wanted, strict=True):
            # Some families' own norms sum their weights' gradients in float32.
            torch.testing.assert_close(gradient, other, rtol=0, atol=1e-6 * float(other.abs().max()))
    # The rule matters: without it the numbers differ.
    module._logits = Logits()
    del lm.get_output_embeddings().forward
    other_logprobs, _ = module.logprobs(module.hidden(IDS, LENGTHS)[before], targets, 1.0)
    assert (other_logprobs - chosen).abs().max() > 0.01


def test_the_file_in_contributing_is_all_that_a_family_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    text, name = CONTRIBUTING.read_text(encoding="utf-8"), "xray_runtime/models/families/cohere.py"
    diff = text.partition(f"+++ {name}\n")[2].partition("+++ ")[0]
    shown = "".join(line.removeprefix("+") for line in diff.splitlines(keepends=True))
    assert shown == (SOURCES.parent / name).read_text(encoding="utf-8")
    added: dict[str, Any] = {}
    exec(shown, added)
    known: dict[str, Family] = {}
    for module in ("heads", "trial"):
        monkeypatch.setattr(f"xray_runtime.models.{module}.family_of", lambda kind: known.get(kind, UNLISTED))
    with pytest.raises(OtherModelError, match=r"^changes its logits by a scale"):
        check_computed(model("cohere", **SCALED["cohere"]).float())
    known["cohere"] = added["FAMILY"]
    check_computed(model("cohere", **SCALED["cohere"]).float())


def test_attention_without_a_cap_is_not_taken_for_the_model() -> None:
    """Weights as small as a new model's would hide it."""
    lm = model("gemma2", **SCALED["gemma2"]).float()
    check_computed(lm)
    lm.set_attn_implementation("sdpa")
    with pytest.raises(OtherModelError, match=r"^changes attention by softcap, which X-ray does not compute$"):
        check_computed(lm)


@pytest.mark.parametrize("kind", SCALED)
def test_likelihoods_and_plain_forwards_are_not_scaled_twice(kind: str) -> None:
    lm = model(kind, **SCALED[kind]).float().requires_grad_(False)
    expected = lm(input_ids=IDS[None, :6], use_cache=False).logits
    ids = Ragged(IDS, torch.tensor([0, 6, 10]))
    rows = TextBatch(input_ids=ids, prompt_lengths=torch.tensor([3, 1]))
    scores = LikelihoodObjective().score(HeadedLM(lm), rows)
    each = torch.log_softmax(expected[0], -1)
    assert float(scores.loglikelihood[0]) == pytest.approx(float(sum(each[n - 1, IDS[n]] for n in (3, 4, 5))), 1e-4)
    # Afterwards the library's own forward is what it was.
    torch.testing.assert_close(lm(input_ids=IDS[None, :6], use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_hidden_matrices_are_those_between_states() -> None:
    """The parameters that Muon would step: no router of a mixture, and no experts stacked in one tensor."""
    lm = model("qwen3", tie_word_embeddings=False)
    family = family_of("qwen3")
    names = {n for n, p in lm.named_parameters() if family.is_hidden_matrix(n, p.dim())}
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in names} == set(linears)
    assert len(names) == 2 * len(linears)
    mixture = family_of("qwen3_moe")
    assert not mixture.is_hidden_matrix("model.layers.0.mlp.gate.weight", 2)
    assert not mixture.is_hidden_matrix("model.layers.0.mlp.experts.gate_up_proj", 3)
    assert mixture.is_hidden_matrix("model.layers.0.self_attn.q_proj.weight", 2)
    assert family_of("gpt_neox").is_hidden_matrix("gpt_neox.layers.1.mlp.dense_4h_to_h.weight", 2)
    assert not family_of("gpt_neox").is_hidden_matrix("gpt_neox.embed_in.weight", 2)

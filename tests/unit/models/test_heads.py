"""A model run in parts is the model: trunk, branch and reference branch against the library's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.unit.models.families import model
from xray_runtime.models.heads import Branch, HeadedLM
from xray_runtime.models.padding import unpad

MakeLM = Callable[[int], Any]
TEXTS = torch.tensor([[5, 9, 7, 42, 11, 6], [8, 8, 100, 3, 0, 0]])
LENGTHS = torch.tensor([6, 4])
IDS = unpad(TEXTS, LENGTHS)


def last_hidden(lm: Any) -> Tensor:
    """The library's last hidden states [N, H]."""
    with torch.no_grad():
        return unpad(lm.model(input_ids=TEXTS).last_hidden_state, LENGTHS)


def with_other_top(lm: Any, num_layers: int) -> Any:
    """A copy of `lm` whose upper `num_layers` layers and norm are others."""
    other = copy.deepcopy(lm)
    with torch.no_grad():
        for module in (*other.model.layers[-num_layers:], other.model.norm):
            for parameter in module.parameters():
                parameter *= 1.3
    return other


def test_a_family_with_names_of_its_own_is_cut_too() -> None:
    """GPT-NeoX: in a trunk and a branch, and in two stages of a pipeline."""
    lm = model("gpt_neox")
    expected = HeadedLM(copy.deepcopy(lm)).hidden(IDS, LENGTHS)
    module = HeadedLM(copy.deepcopy(lm), trainable_layers=1)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name.removeprefix("lm.gpt_neox.").rpartition("layers.1.")[1] or "norm" for name in trained} == {
        "layers.1.",
        "norm",
    }
    torch.testing.assert_close(module.hidden(IDS, LENGTHS), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(module.hidden(IDS, LENGTHS, module.trunk(IDS, LENGTHS)), expected, rtol=0, atol=1e-12)
    first, last = HeadedLM(copy.deepcopy(lm)), HeadedLM(copy.deepcopy(lm))
    first.keep_stage(range(1))
    last.keep_stage(range(1, 2))
    states = first.stage_states(LENGTHS, input_ids=IDS)
    torch.testing.assert_close(last.hidden(IDS, LENGTHS, states), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("trainable", [1, 2, 3])
def test_trunk_and_branch_are_the_whole(make_lm: MakeLM, trainable: int) -> None:
    lm = make_lm(1)
    expected = last_hidden(lm)
    module = HeadedLM(lm, trainable_layers=trainable)
    torch.testing.assert_close(module.hidden(IDS, LENGTHS), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(module.hidden(IDS, LENGTHS, module.trunk(IDS, LENGTHS)), expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        logits = unpad(lm(input_ids=TEXTS).logits, LENGTHS)
        torch.testing.assert_close(lm.lm_head(module.hidden(IDS, LENGTHS)), logits, rtol=0, atol=1e-12)
    # Running it in parts has not taken the model apart.
    assert len(lm.model.layers) == lm.config.num_hidden_layers == 3
    torch.testing.assert_close(last_hidden(lm), expected, rtol=0, atol=0)


def test_the_parts_keep_to_each_layers_own_mask() -> None:
    """Qwen2 with a window of two tokens in its upper layers alone: a branch's first layer is not the model's first."""
    config = transformers.Qwen2Config(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=1,
        num_key_value_heads=1, use_sliding_window=True, sliding_window=2, max_window_layers=2,
    )  # fmt: skip
    assert config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    torch.manual_seed(0)
    lm = transformers.Qwen2ForCausalLM(config).double()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= 10.0 if parameter.dim() > 1 else 1.0
    expected = last_hidden(lm)
    reference = with_other_top(lm, 3)
    for trainable in (1, 2, 3):
        module = HeadedLM(copy.deepcopy(lm), trainable_layers=trainable)
        torch.testing.assert_close(module.hidden(IDS, LENGTHS), expected, rtol=0, atol=1e-12)
    module = HeadedLM(lm, trainable_layers=3, branches=[Branch("reference", reference)])
    ours = module.branch_hidden(module.branches[0], module.trunk(IDS, LENGTHS), LENGTHS)
    torch.testing.assert_close(ours, last_hidden(reference), rtol=0, atol=1e-12)


@pytest.mark.parametrize("trainable", [1, 2, 3])
def test_the_reference_branch_is_the_reference(make_lm: MakeLM, trainable: int) -> None:
    lm = make_lm(1)
    reference = with_other_top(lm, trainable)
    expected = last_hidden(reference)
    module = HeadedLM(lm, trainable_layers=trainable, branches=[Branch("reference", reference)])
    trunk = module.trunk(IDS, LENGTHS)
    torch.testing.assert_close(module.branch_hidden(module.branches[0], trunk, LENGTHS), expected, rtol=0, atol=1e-12)
    assert (module.hidden(IDS, LENGTHS, trunk) - expected).abs().max() > 1e-3
    # However the policy moves, the reference stays where it was.
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    module.hidden(IDS, LENGTHS).square().sum().backward()
    optimizer.step()
    again = module.branch_hidden(module.branches[0], module.trunk(IDS, LENGTHS), LENGTHS)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize("trainable", [1, 2, 3])
def test_only_the_top_learns(make_lm: MakeLM, trainable: int) -> None:
    lm = make_lm(1)
    reference = with_other_top(lm, trainable)
    branches = [Branch("reference", reference)]
    module = HeadedLM(lm, scalar_head=True, trainable_layers=trainable, branches=branches).double()
    assert module.scalar is not None
    torch.nn.init.ones_(module.scalar.weight)
    module.scalars(module.hidden(IDS, LENGTHS)).square().sum().backward()
    learned = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    places = (*(f"lm.model.layers.{i}." for i in range(3 - trainable, 3)), "lm.model.norm.", "scalar.")
    assert learned == {name for name, _ in module.named_parameters() if name.startswith(places)}
    assert learned == {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_the_gradient_of_the_branch_is_that_of_the_whole(make_lm: MakeLM) -> None:
    """A cached trunk has no history; the layers above it must not notice."""
    lm = make_lm(1)
    whole, parts = HeadedLM(copy.deepcopy(lm)), HeadedLM(lm, trainable_layers=2)
    whole.hidden(IDS, LENGTHS).pow(3).sum().backward()
    parts.hidden(IDS, LENGTHS, parts.trunk(IDS, LENGTHS)).pow(3).sum().backward()
    gradients = dict(whole.named_parameters())
    for name, parameter in parts.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("trainable", [None, 2])
def test_no_state_depends_on_another_text_or_on_what_follows(make_lm: MakeLM, trainable: int | None) -> None:
    module = HeadedLM(make_lm(1), trainable_layers=trainable)
    changed = IDS.clone()
    changed[5], changed[8:] = 99, 17
    hidden, other = module.hidden(IDS, LENGTHS), module.hidden(changed, LENGTHS)
    same = [0, 1, 2, 3, 4, 6, 7]
    torch.testing.assert_close(other[same], hidden[same], rtol=0, atol=1e-12)
    assert (other[[5, 8, 9]] - hidden[[5, 8, 9]]).abs().amax(-1).min() > 1e-3


def test_a_fresh_head_says_zero(make_lm: MakeLM) -> None:
    module = HeadedLM(make_lm(1), scalar_head=True).double()
    values = module.scalars(module.hidden(IDS, LENGTHS))
    assert values.shape == (10,)
    assert not values.any()


def test_every_use_is_one_forward(make_lm: MakeLM) -> None:
    module = HeadedLM(make_lm(1), trainable_layers=1)
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append("forward"))
    torch.testing.assert_close(module(HeadedLM.trunk, IDS, LENGTHS), module.trunk(IDS, LENGTHS), rtol=0, atol=0)
    assert seen == ["forward"]


@pytest.mark.parametrize("trainable", [None, 2], ids=["whole", "above a frozen trunk"])
def test_activations_computed_again_give_the_same_gradients(make_lm: MakeLM, trainable: int | None) -> None:
    def gradients(again: bool) -> tuple[dict[str, Tensor | None], int]:
        module = HeadedLM(make_lm(1), trainable_layers=trainable).eval()
        if again:
            module.checkpoint_activations()
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        trunk = None if trainable is None else module.trunk(IDS, LENGTHS)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = module.hidden(IDS, LENGTHS, trunk).pow(3).sum()
        loss.backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}, sum(kept.values())

    (plain, kept), (again, kept_again) = gradients(False), gradients(True)
    learned = [name for name, gradient in plain.items() if gradient is not None]
    assert learned
    assert all(torch.equal(plain[name], again[name]) for name in learned)  # type: ignore[arg-type]
    assert kept_again < kept / 2


def test_a_head_is_float32_in_a_bfloat16_model(make_lm: MakeLM) -> None:
    module = HeadedLM(make_lm(1), scalar_head=True).bfloat16()
    hidden = module.hidden(IDS, LENGTHS)
    assert hidden.dtype == torch.bfloat16
    assert module.scalars(hidden).dtype == torch.float32


def test_refusals(make_lm: MakeLM) -> None:
    with pytest.raises(ValueError, match=r"trainable_layers: 4 is more than the model's 3 layers"):
        HeadedLM(make_lm(1), trainable_layers=4)
    with pytest.raises(ValueError, match="does not share the policy's frozen trunk"):
        HeadedLM(make_lm(1), trainable_layers=1, branches=[Branch("reference", make_lm(2))])
    with pytest.raises(ValueError, match="does not share the policy's frozen trunk"):
        HeadedLM(make_lm(1), branches=[Branch("reference", make_lm(1))])
    # One layer of the trunk is another than in the policy.
    lm = make_lm(1)
    with pytest.raises(ValueError, match="does not share the policy's frozen trunk"):
        HeadedLM(lm, trainable_layers=1, branches=[Branch("reference", with_other_top(lm, 2))])


@pytest.mark.parametrize(("family", "multiplier"), [("llama", None), ("granite", 1.0), ("granite", 12.0)])
def test_a_backbone_that_scales_its_embeddings_cannot_be_taken_apart(family: str, multiplier: float | None) -> None:
    fields = {} if multiplier is None else {"embedding_multiplier": multiplier}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, **fields,
    )  # fmt: skip
    lm = transformers.AutoModelForCausalLM.from_config(config)
    if multiplier == 12.0:
        with pytest.raises(ValueError, match=r"^base\.trainable_layers: 1 is not allowed: a GraniteForCausalLM scales"):
            HeadedLM(lm, trainable_layers=1)
        return
    attention = HeadedLM(lm).lm.model.config._attn_implementation
    before = config.to_dict()
    module = HeadedLM(lm, trainable_layers=1)
    # The check builds another model from the same config.
    assert (module.lm.model.config._attn_implementation, module.lm.config.to_dict()) == (attention, before)

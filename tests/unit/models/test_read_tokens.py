"""The last layer's MLP at what is read, against a pass that computes all, in every family that is packed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.families import MIXTURES, PACKED, model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.packing import Prompts, Trees
from xray_runtime.models.read_tokens import Reads

IDS = torch.tensor([5, 9, 7, 42, 11, 6, 80, 5, 9, 7, 3, 100, 3, 8])
LENGTHS, PROMPTS = torch.tensor([7, 4, 3]), Prompts(torch.tensor([0, 0, 2]), torch.tensor([3, 3, 2]))
"""Three texts; the first two share a prompt of three tokens."""
READ: dict[Reads, list[int]] = {"replies": [2, 3, 4, 5, 6, 9, 10, 12, 13], "ends": [6, 10, 13]}
"""Among all tokens: from the prompt's last on, or the last of each text."""
DENSE = [family for family in PACKED if family not in MIXTURES]


def states_and_gradients(module: HeadedLM, reads: Reads, places: list[int]) -> list[Tensor]:
    """The states at `places`, and the gradients of a function of them."""
    states = module.hidden(IDS, LENGTHS, None, PROMPTS, None, reads)
    assert isinstance(states, Tensor)
    found = states[places]
    return [found, *torch.autograd.grad(found.pow(3).sum(), list(module.lm.model.parameters()))]


def tokens_of_mlp(lm: Any, number: int) -> list[int]:
    """How many tokens each later pass gives the MLP of layer `number`."""
    seen: list[int] = []
    lm.model.layers[number].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return seen


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("reads", READ)
def test_what_is_read_is_as_in_a_whole_pass(family: str, reads: Reads) -> None:
    module = HeadedLM(model(family))
    expected = states_and_gradients(module, "all", READ[reads])
    for found, wanted in zip(states_and_gradients(module, reads, READ[reads]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_only_the_last_layer_leaves_tokens_out() -> None:
    lm = model("llama")
    module, first, last = HeadedLM(lm), tokens_of_mlp(lm, 0), tokens_of_mlp(lm, 1)
    for reads in ("all", "replies", "ends"):
        module.hidden(IDS, LENGTHS, None, PROMPTS, None, reads)  # type: ignore[arg-type]
    # Fourteen tokens, of which the second text's prompt is not computed; two texts read one prompt's last token.
    assert first == [11, 11, 11]
    assert last == [11, 8, 3]


def test_nearly_all_tokens_are_not_gathered() -> None:
    lengths, one = torch.tensor([8]), torch.tensor([0])
    assert Trees.of(lengths, Prompts(one, torch.tensor([1])), "replies").read is None
    assert Trees.of(lengths, Prompts(one, torch.tensor([2])), "replies").read is None
    read = Trees.of(lengths, Prompts(one, torch.tensor([3])), "replies").read
    assert read is not None
    assert read.tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("family", [family for family in PACKED if family in MIXTURES])
def test_experts_see_all_tokens(family: str) -> None:
    """Their routes are columns of a batch, and their loads are losses."""
    module = HeadedLM(model(family))
    all_places = list(range(len(IDS)))
    whole, read = (states_and_gradients(module, reads, all_places)[0] for reads in ("all", "replies"))  # type: ignore[arg-type]
    assert torch.equal(whole, read)


def test_a_backward_pass_that_computes_layers_again_computes_all() -> None:
    lm = model("llama")
    module = HeadedLM(lm)
    expected = states_and_gradients(module, "replies", READ["replies"])
    module.checkpoint_activations()
    seen = tokens_of_mlp(lm, 1)
    for found, wanted in zip(states_and_gradients(module, "replies", READ["replies"]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert seen == [11, 11]


def test_states_that_are_not_read_are_not_the_models() -> None:
    """So the tests above would see a place that is left out by mistake."""
    module = HeadedLM(model("llama"))
    hidden = functools.partial(module.hidden, IDS, LENGTHS, None, PROMPTS, None)
    whole, read = hidden("all"), hidden("replies")
    assert isinstance(whole, Tensor)
    differs = (whole - read).abs().amax(-1) > 1e-3
    assert differs.nonzero().squeeze(-1).tolist() == [0, 1, 7, 8, 11]

"""Sequences in one row against the library's own forward of each by itself, in every family that is packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.unit.models.families import PACKED, model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.packing import Trees, can_pack

TEXTS = [[5, 9, 7, 42, 11, 6, 80], [8], [100, 3], [7, 7, 7, 9, 12]]
IDS = torch.tensor([token for text in TEXTS for token in text])
LENGTHS = torch.tensor([len(text) for text in TEXTS])


def alone(lm: Any) -> Tensor:
    """Last hidden states [N, H], each text by itself through the library's model."""
    return torch.cat([lm.model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in TEXTS])


def test_without_shared_prompts_every_text_is_a_stem() -> None:
    trees = Trees.of(torch.tensor([3, 1, 2, 1]))
    # The shortest first, so that equal lengths are neighbours: texts 1 and 3, then 2, then 0.
    assert trees.prefixes.tolist() == [1, 1, 2, 3]
    assert trees.suffixes.tolist() == []
    assert trees.computed.tolist() == [3, 6, 4, 5, 0, 1, 2]
    assert trees.given.tolist() == [4, 5, 6, 0, 2, 3, 1]
    assert trees.positions.tolist() == [0, 0, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("family", PACKED)
def test_texts_in_one_row_are_each_by_itself(family: str) -> None:
    lm = model(family)
    expected = alone(lm)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((weights * expected).sum(), list(lm.model.parameters()))
    module = HeadedLM(lm)
    assert module.packs
    found = module.hidden(IDS, LENGTHS)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad((weights * found).sum(), list(lm.model.parameters()))
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)
    # Neighbours do not show, and the order of texts is the order of states.
    swapped = module.hidden(torch.cat([IDS[8:], IDS[:8]]), LENGTHS[[2, 3, 0, 1]])
    torch.testing.assert_close(torch.cat([swapped[7:], swapped[:7]]), expected, rtol=1e-10, atol=1e-10)


def test_windows_and_unknown_families_stay_padded() -> None:
    assert can_pack(model("llama"))
    assert not can_pack(model("mistral", sliding_window=4))
    assert not can_pack(model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1))
    assert not can_pack(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1)))
    windowed = model("mistral", sliding_window=2)
    expected = alone(windowed)
    module = HeadedLM(windowed)
    assert not module.packs
    torch.testing.assert_close(module.hidden(IDS, LENGTHS), expected, rtol=1e-10, atol=1e-10)


def test_the_library_still_gets_its_own_attention() -> None:
    """A plain forward of the same model, with a mask, with packed positions and without either."""
    lm, ids = model("llama"), torch.tensor([[0, 0, 5, 9, 7], [3, 8, 6, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    calls: list[dict[str, Tensor]] = [
        {},
        {"attention_mask": mask, "position_ids": torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])},
    ]
    # As in training; with a cache transformers takes positions for no sign of packing.
    lm.config.use_cache = False
    before = [lm(input_ids=ids, **options).logits for options in calls]
    assert HeadedLM(lm).packs
    for options, expected in zip(calls, before, strict=True):
        assert torch.equal(lm(input_ids=ids, **options).logits, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's kernel for different lengths needs CUDA")
def test_on_cuda_one_kernel_takes_all_texts() -> None:
    """In bfloat16, against float32: 8 bits of a mantissa are 0.4%."""
    sizes = {"hidden_size": 64, "head_dim": 16}
    exact = HeadedLM(model("llama", **sizes).float().cuda())
    half = HeadedLM(model("llama", **sizes).bfloat16().cuda())
    found, expected = (module.hidden(IDS.cuda(), LENGTHS.cuda()) for module in (half, exact))
    assert torch.nn.functional.cosine_similarity(found.float(), expected).min() > 0.99
    for module, states in ((half, found), (exact, expected)):
        states.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.lm.model.parameters())

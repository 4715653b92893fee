"""A few tokens through a model as its authors wrote it and as X-ray computes it: what differs is refused before it is
trained.

The reference is transformers' own forward with its `eager` attention, a row at a time; ours is `HeadedLM`, whose
attention is `sdpa` or packed, and which applies the output layer itself. Weights as small as a new model's hide a soft
cap, so three things are compared to the bit or by what is asked for: what leaves the backbone enters the output layer,
what leaves that layer are the logits, and attention gets no option that ours does not compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from xray_runtime.models.family import family_of
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.packing import COMPUTED_OPTIONS, Prompts
from xray_runtime.models.parts import backbone_of

LENGTHS, SHARED = (8, 6), 3
"""Tokens of two rows, and of the prompt that both begin with."""
RELATIVE, ABSOLUTE = 1e-4, 1e-3
"""How far log-probabilities may differ, in float32."""
STATES = 1e-3
"""How far last hidden states may differ, as a share of the largest."""


class OtherModelError(ValueError):
    """X-ray computes another model; the text goes on after "it"."""


def tried_rows(vocabulary: int) -> tuple[Tensor, Tensor]:
    """(ids [N], lengths [2]) of two rows with the same first tokens."""
    one = (torch.arange(LENGTHS[0]) * 7919 + 11) % vocabulary
    other = torch.cat([one[:SHARED], (torch.arange(LENGTHS[1] - SHARED) * 104_729 + 5) % vocabulary])
    return torch.cat([one, other]), torch.tensor(LENGTHS)


@torch.no_grad()
def own_logprobs(lm: Any, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each token but a row's first, last hidden states [N, H]) under the model's own attention.

    Raises:
        OtherModelError: its logits are not what its output layer, and its family, make of its last hidden states.
    """
    lm.set_attn_implementation("eager")
    rule = family_of(lm.config.model_type).logits(lm.config)
    found, states = [], []
    for row in ids.split(lengths.tolist()):
        hidden = getattr(backbone_of(lm)(input_ids=row[None], use_cache=False), "last_hidden_state", None)
        if hidden is None:
            raise OtherModelError(f"has a backbone ({type(backbone_of(lm)).__name__}) without last hidden states")
        with _watched(lm.get_output_embeddings()) as layer:
            logits = lm(input_ids=row[None], use_cache=False).logits
        _check_same(hidden, layer.get("entering"), "last hidden states")
        leaving = layer.get("leaving")
        _check_same(None if leaving is None else rule(leaving), logits, "logits")
        states.append(hidden[0])
        found.append(torch.log_softmax(logits[0, :-1].float(), -1).gather(1, row[1:, None])[:, 0])
    return torch.cat(found), torch.cat(states)


def check_computed(lm: Any) -> None:
    """Check that `HeadedLM` computes what `lm` computes by itself; leaves `lm` as a `HeadedLM` has it.

    Args:
        lm: a causal LM in float32 with its weights; tried on two rows of eight and six tokens.

    Raises:
        OtherModelError: it does not, or either fails.
    """
    ids, lengths = tried_rows(lm.get_input_embeddings().weight.shape[0])
    attention = lm.config._attn_implementation
    try:
        expected, their_states = own_logprobs(lm, ids, lengths)
        lm.set_attn_implementation(attention)
        with torch.no_grad(), only_computed_options():
            lm(input_ids=ids[None, : LENGTHS[0]], use_cache=False)
        states, found = _ours(HeadedLM(lm), ids, lengths)
    except OtherModelError:
        raise
    except Exception as error:
        raise OtherModelError(f"fails in a forward pass of a few tokens ({type(error).__name__}: {error})") from error
    off = float((states - their_states).abs().max() / their_states.abs().max().clamp(min=1e-30))
    if not off <= STATES or not torch.allclose(found, expected, rtol=RELATIVE, atol=ABSOLUTE):
        nats = float((found - expected).abs().max())
        raise OtherModelError(
            f"is computed otherwise by X-ray than by transformers with the attention of its authors: log-probabilities "
            f"differ by up to {nats:.2g} nats, last hidden states by {off:.1%}"
        )


@torch.no_grad()
def _ours(module: HeadedLM, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    prompts = Prompts(torch.zeros(len(lengths), dtype=torch.int64), torch.full_like(lengths, SHARED))
    states = module.eval().hidden(ids, lengths, prompts=prompts)
    assert isinstance(states, Tensor)
    last = lengths.cumsum(0)
    targets = torch.cat(
        [torch.arange(int(end - length) + 1, int(end)) for end, length in zip(last, lengths, strict=True)]
    )
    return states, module.logprobs(states[targets - 1], ids[targets], 1.0)[0]


@contextlib.contextmanager
def _watched(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inputs and outputs of a layer in its last pass."""
    seen: dict[str, Tensor] = {}
    handle = layer.register_forward_hook(lambda _, args, out: seen.update(entering=args[0], leaving=out))
    try:
        yield seen
    finally:
        handle.remove()


def _check_same(before: Tensor | None, after: Tensor | None, what: str) -> None:
    if before is None or after is None or before.shape != after.shape or not torch.equal(before, after):
        raise OtherModelError(f"changes its {what} by a scale, a cap or a layer that X-ray does not compute")


@contextlib.contextmanager
def only_computed_options() -> Iterator[None]:
    """Attention refuses options that `sdpa` and ours ignore."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def strict(*args: Any, **options: Any) -> Any:
        given = {
            name for name, value in options.items() if value is not None and not name.startswith(("output_", "use_"))
        }
        unknown = sorted(given.difference(COMPUTED_OPTIONS))
        if unknown:
            raise OtherModelError(f"changes attention by {unknown[0]}, which X-ray does not compute")
        return plain(*args, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = strict
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain

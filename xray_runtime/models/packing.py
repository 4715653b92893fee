"""Sequences of different lengths through a backbone in one row: nothing is padded, a shared prompt is computed once.

The row holds trees of depth one. A stem is a prompt that several sequences begin with, or a whole sequence; a branch is
what comes after a shared prompt, at the positions behind it, and sees the prompt and itself. transformers tells packed
sequences by their positions, but then makes a mask [M, M] of them, which costs more than the padding it saves. Here
attention runs stem by stem and branch by branch (on CUDA, in half precision, in one kernel for all of either);
everything else of a layer looks at one token at a time and does not notice.

Shapes: B sequences of N tokens, of which M are computed, a heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "xray_packed"
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Model types of which tests show that tokens meet in attention alone, and there by causality alone."""
VARLEN_HEAD_SIZES = range(8, 257, 8)
"""Head sizes of torch's kernel for sequences of different lengths."""


class Prompts(NamedTuple):
    """Which sequences begin with the same prompt."""

    first: Tensor
    """For each sequence, the first one with the same prompt [B]."""
    lengths: Tensor
    """Tokens of each sequence's prompt [B]."""


@dataclass(frozen=True)
class Run:
    """Neighbours in the row that are equally long."""

    count: int
    length: int
    stem: int = 0
    """Place of the stem of branches among all stems."""


@dataclass(frozen=True)
class Trees:
    """The places of sequences in a row: first all stems, then all branches, each in runs."""

    stems: list[Run]
    branches: list[Run]
    computed: Tensor
    """The token at each place of the row, among those of all sequences [M]."""
    given: Tensor
    """The place of each token of all sequences in the row [N]."""
    positions: Tensor
    """Position in its sequence of the token at each place [M]."""

    @classmethod
    def of(cls, lengths: Tensor, prompts: Prompts | None = None) -> Trees:
        """The trees of sequences of `lengths` [B]; without `prompts` none shares its own."""
        device, lengths = lengths.device, lengths.cpu()
        rows = torch.arange(len(lengths))
        first, shared = rows, torch.zeros_like(rows)
        if prompts is not None:
            is_shared = (prompts.first.cpu().bincount(minlength=len(rows)) > 1)[prompts.first.cpu()]
            shared = prompts.lengths.cpu() * is_shared
            first = torch.where(shared > 0, prompts.first.cpu(), rows)
        own, begins = lengths - shared, lengths.cumsum(0) - lengths
        stems = (first == rows).nonzero().squeeze(-1)
        stem_lengths = torch.where(shared > 0, shared, lengths)
        stems = stems[stem_lengths[stems].argsort(stable=True)]
        stem_of = torch.empty_like(rows)
        stem_of[stems] = torch.arange(len(stems))
        stem_of = stem_of[first]
        branches = ((shared > 0) & (own > 0)).nonzero().squeeze(-1)
        branches = branches[(stem_of * (lengths.max() + 1) + own)[branches].argsort(stable=True)]

        counts = torch.cat([stem_lengths[stems], own[branches]])
        skipped = torch.cat([torch.zeros_like(stems), shared[branches]])
        computed = _ranges(begins[torch.cat([stems, branches])] + skipped, counts)
        place = torch.empty(int(lengths.sum()), dtype=torch.int64)
        place[computed] = torch.arange(len(computed))
        # A token of a shared prompt is the first sequence's.
        in_row = _ranges(torch.zeros_like(lengths), lengths)
        source = torch.where(
            in_row < shared.repeat_interleave(lengths),
            begins[first].repeat_interleave(lengths),
            begins.repeat_interleave(lengths),
        )
        runs = [Run(len(list(same)), length) for length, same in groupby(stem_lengths[stems].tolist())]
        pairs = zip(stem_of[branches].tolist(), own[branches].tolist(), strict=True)
        return cls(
            runs,
            [Run(len(list(same)), length, stem) for (stem, length), same in groupby(pairs)],
            computed.to(device),
            place[source + in_row].to(device),
            _ranges(skipped, counts).to(device),
        )

    @cached_property
    def keys(self) -> Tensor:
        """Places of the keys of all branches, one branch after the other: those of its stem and its own."""
        lengths = torch.tensor(_lengths(self.stems))
        of_branch = torch.tensor([run.stem for run in self.branches for _ in range(run.count)])
        own = torch.tensor(_lengths(self.branches))
        begins = torch.stack(
            [lengths.cumsum(0)[of_branch] - lengths[of_branch], lengths.sum() + own.cumsum(0) - own], 1
        )
        counts = torch.stack([lengths[of_branch], own], 1)
        return _ranges(begins.flatten(), counts.flatten()).to(self.computed.device)


def _ranges(begins: Tensor, counts: Tensor) -> Tensor:
    """The numbers from each of `begins` on, as many as `counts` says, one range after the other."""
    shifts = begins - (counts.cumsum(0) - counts)
    return shifts.repeat_interleave(counts) + torch.arange(int(counts.sum()))


def _lengths(runs: list[Run]) -> list[int]:
    return [run.length for run in runs for _ in range(run.count)]


def can_pack(lm: Any) -> bool:
    """Whether the model's attention can be ours: a known family without sliding windows."""
    config = lm.config
    windows = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or [])
    return config.model_type in FAMILIES and not windows and getattr(config, "sliding_window", None) is None


def use_packed_attention(lm: Any) -> None:
    """Have `lm` attend as `packed_states` needs it. Called in any other way it computes what it did before."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    # A trunk that was taken from another model has a config of its own.
    for part in lm.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = ATTENTION


def packed_states(backbone: Any, lengths: Tensor, prompts: Prompts | None, **entering: Tensor) -> Tensor:
    """Last hidden states [N, H] of a backbone, of `input_ids` [N] or `inputs_embeds` [N, H]."""
    trees = Trees.of(lengths, prompts)
    # A mask of four dimensions is handed on as it is, so none is made; our attention does not look at it.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=lengths.device)
    row = {name: flat[trees.computed][None] for name, flat in entering.items()}
    out = backbone(**row, position_ids=trees.positions[None], attention_mask=no_mask, trees=trees)
    states: Tensor = out.last_hidden_state[0][trees.given]
    return states


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    trees: Trees | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The output of attention [1, M, a, d], for query [1, a, M, d], key and value (which may have fewer heads)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if trees is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and half and query.shape[-1] in VARLEN_HEAD_SIZES:
        return _in_two_kernels(query, key, value, trees, scaling)[None], None
    grouped = query.shape[1] != key.shape[1]
    num_stems = len(trees.stems)
    q, k, v = (_by_run(x, [*trees.stems, *trees.branches]) for x in (query, key, value))
    outs = [
        scaled_dot_product_attention(*stem, is_causal=True, scale=scaling, enable_gqa=grouped)
        for stem in zip(q[:num_stems], k[:num_stems], v[:num_stems], strict=True)
    ]
    stem_keys, stem_values = ([stem for run in x[:num_stems] for stem in run.unbind()] for x in (k, v))
    for run, *branch in zip(trees.branches, q[num_stems:], k[num_stems:], v[num_stems:], strict=True):
        keys, values = (
            torch.cat([stems[run.stem].expand(run.count, -1, -1, -1), own], dim=2)
            for stems, own in ((stem_keys, branch[1]), (stem_values, branch[2]))
        )
        seen = torch.ones(run.length, keys.shape[2], dtype=torch.bool, device=query.device)
        mask = seen.tril(keys.shape[2] - run.length)
        outs.append(
            scaled_dot_product_attention(branch[0], keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        )
    return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])[None], None


def _by_run(row: Tensor, runs: list[Run]) -> list[Tensor]:
    """A row [1, a, M, d] as a batch [count, a, length, d] for each run."""
    parts = row[0].split([run.count * run.length for run in runs], dim=1)
    return [part.unflatten(1, (run.count, run.length)).transpose(0, 1) for part, run in zip(parts, runs, strict=True)]


def _in_two_kernels(query: Tensor, key: Tensor, value: Tensor, trees: Trees, scaling: float | None) -> Tensor:
    """The output of attention [M, a, d] by torch's kernel for sequences of different lengths."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], num_keys: list[int]) -> Tensor:
        # With more keys than queries, the last query sees all keys.
        offsets, key_offsets = (
            torch.nn.functional.pad(torch.tensor(of).cumsum(0), (1, 0)).int().to(q.device) for of in (lengths, num_keys)
        )
        grouped = q.shape[1] != k.shape[1]
        bounds = offsets, key_offsets, max(lengths), max(num_keys)
        out = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    stems, branches = _lengths(trees.stems), _lengths(trees.branches)
    end = sum(stems)
    out = attend(q[:end], k[:end], v[:end], stems, stems)
    if not branches:
        return out
    stem_of = [run.stem for run in trees.branches for _ in range(run.count)]
    num_keys = [stems[stem] + own for stem, own in zip(stem_of, branches, strict=True)]
    return torch.cat([out, attend(q[end:], k[trees.keys], v[trees.keys], branches, num_keys)])

"""Sequences of different lengths through a backbone in one row without padding: a shared prompt is computed once.

The row holds trees of depth one. A prefix is a prompt that several sequences begin with, or a whole sequence; a suffix
is what comes after a shared prompt, at the positions behind it, and sees the prompt and itself. transformers tells
packed sequences by their positions, but then makes a mask [M, M] of them, which costs more than the padding it saves.
Here prefixes and suffixes of similar lengths attend together, padded in attention alone (on CUDA, in half precision,
one kernel takes all of either unpadded); everything else of a layer looks at one token at a time and does not notice.

Shapes: B sequences of N tokens, of which M are computed, a heads, d head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from xray_runtime.models.cached import cached_property
from xray_runtime.models.family import family_of
from xray_runtime.models.sequence_parallel import SequenceRanks, States, shared_states

ATTENTION = "xray_packed"
COMPUTED_OPTIONS = (
    "scaling",
    "dropout",
    "is_causal",
    "sliding_window",
    "position_bias",
    "position_ids",
    "cache_position",
)
"""Options of transformers' attention functions that `sdpa` computes (a window by its mask), or that change nothing; so
are those that only ask for more output."""
VARLEN_HEAD_SIZES = range(8, 257, 8)
"""Head sizes of torch's kernel for sequences of different lengths."""
CALL_SCORES = 4096
"""Attention scores that take about as long as one more call of attention."""


Bounds = tuple[Tensor, Tensor, int, int]
"""Sequences that attend in one kernel: offsets of their queries and of their keys, most queries, most keys."""


class Prompts(NamedTuple):
    """Which sequences begin with the same prompt."""

    first: Tensor
    """For each sequence, the first one with the same prompt [B]."""
    lengths: Tensor
    """Tokens of each sequence's prompt [B]."""


@dataclass(frozen=True)
class Block:
    """Prefixes, or suffixes with their prefixes, that attend in one call: C sequences, padded to L tokens."""

    index: Tensor
    """Place in the row of each token [C, L]; what pads a sequence is its last token."""
    back: Tensor
    """Among the C · L tokens, the places of those that do not pad, sequence by sequence."""
    prefix_index: Tensor | None = None
    """As `index`, of the D prefixes that suffixes see [D, S]."""
    prefix_of: Tensor | None = None
    """The prefix of each suffix among these [C]."""
    visible: Tensor | None = None
    """Which keys, of the prefix and its own, each token of a suffix sees [C, 1, L, S + L]."""


@dataclass(frozen=True)
class Trees:
    """The places of sequences in a row: first all prefixes, then all suffixes, each from short to long."""

    prefixes: Tensor
    """Lengths of all prefixes."""
    suffixes: Tensor
    """Lengths of all suffixes, without their prefixes."""
    prefix_of: Tensor
    """The prefix of each suffix."""
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
        prefixes = (first == rows).nonzero().squeeze(-1)
        prefix_lengths = torch.where(shared > 0, shared, lengths)
        prefixes = prefixes[prefix_lengths[prefixes].argsort(stable=True)]
        prefix_of = torch.empty_like(rows)
        prefix_of[prefixes] = torch.arange(len(prefixes))
        prefix_of = prefix_of[first]
        suffixes = ((shared > 0) & (own > 0)).nonzero().squeeze(-1)
        suffixes = suffixes[(own * (lengths.max() + 1) + shared)[suffixes].argsort(stable=True)]

        counts = torch.cat([prefix_lengths[prefixes], own[suffixes]])
        skipped = torch.cat([torch.zeros_like(prefixes), shared[suffixes]])
        computed = _ranges(begins[torch.cat([prefixes, suffixes])] + skipped, counts)
        place = torch.empty(int(lengths.sum()), dtype=torch.int64)
        place[computed] = torch.arange(len(computed))
        # A token of a shared prompt is the first sequence's.
        in_row = _ranges(torch.zeros_like(lengths), lengths)
        source = torch.where(
            in_row < shared.repeat_interleave(lengths),
            begins[first].repeat_interleave(lengths),
            begins.repeat_interleave(lengths),
        )
        return cls(
            prefix_lengths[prefixes],
            own[suffixes],
            prefix_of[suffixes],
            computed.to(device),
            place[source + in_row].to(device),
            _ranges(skipped, counts).to(device),
        )

    @cached_property
    def blocks(self) -> list[Block]:
        """All prefixes, then all suffixes."""
        device = self.computed.device
        ends = torch.cat([self.prefixes, self.suffixes]).cumsum(0)
        found, num_prefixes = [], len(self.prefixes)
        for begin, end in _similar(self.prefixes, self.prefixes):
            index, back = _padded(ends[begin:end], self.prefixes[begin:end])
            found.append(Block(index.to(device), back.to(device)))
        for begin, end in _similar(self.suffixes, self.suffixes + self.prefixes[self.prefix_of]):
            own, prefix_of = self.suffixes[begin:end], self.prefix_of[begin:end]
            index, back = _padded(ends[num_prefixes + begin : num_prefixes + end], own)
            prefixes, prefix_of = prefix_of.unique(return_inverse=True)
            prefix_index, _ = _padded(ends[prefixes], self.prefixes[prefixes])
            seen = torch.arange(prefix_index.shape[1]) < self.prefixes[prefixes][prefix_of, None]
            causal = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool).tril()
            sides = seen[:, None].expand(-1, len(causal), -1), causal.expand(len(own), -1, -1)
            visible = torch.cat(sides, 2)[:, None]
            found.append(Block(*(x.to(device) for x in (index, back, prefix_index, prefix_of, visible))))
        return found

    @cached_property
    def keys(self) -> Tensor:
        """Places of the keys of all suffixes, one suffix after the other: those of its prefix and its own."""
        prefixes, own = self.prefixes[self.prefix_of], self.suffixes
        begins = torch.stack(
            [self.prefixes.cumsum(0)[self.prefix_of] - prefixes, self.prefixes.sum() + own.cumsum(0) - own], 1
        )
        counts = torch.stack([prefixes, own], 1)
        return _ranges(begins.flatten(), counts.flatten()).to(self.computed.device)

    @cached_property
    def bounds(self) -> tuple[int, Bounds, Bounds | None]:
        """(end of the prefixes, their bounds, bounds of the suffixes if there are any), made once for all layers: a
        copy to a GPU waits for what it computes."""

        def of(lengths: Tensor, num_keys: Tensor) -> Bounds:
            # With more keys than queries, the last query sees all keys.
            offsets, key_offsets = (
                pad(each.cumsum(0), (1, 0)).int().to(self.computed.device) for each in (lengths, num_keys)
            )
            return offsets, key_offsets, int(lengths.max()), int(num_keys.max())

        suffixes = self.suffixes
        of_suffixes = of(suffixes, self.prefixes[self.prefix_of] + suffixes) if len(suffixes) else None
        return int(self.prefixes.sum()), of(self.prefixes, self.prefixes), of_suffixes


def _similar(queries: Tensor, keys: Tensor) -> Iterator[tuple[int, int]]:
    """Begin and end of neighbours that attend together, of sequences with so many queries and keys."""
    begin = exact = longest = 0
    for number, (query, key) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        longest = max(longest, key)
        padded = (number + 1 - begin) * query * longest
        if number > begin and padded - exact - query * key > CALL_SCORES + exact // 4:
            yield begin, number
            begin, exact, longest = number, 0, key
        exact += query * key
    if len(queries):
        yield begin, len(queries)


def _padded(ends: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`index` and `back` of a `Block`, of sequences that end at these places of the row."""
    offsets = torch.arange(int(lengths.max()))
    index = torch.minimum((ends - lengths)[:, None] + offsets, ends[:, None] - 1)
    return index, (offsets < lengths[:, None]).flatten().nonzero().squeeze(-1)


def _ranges(begins: Tensor, counts: Tensor) -> Tensor:
    """The numbers from each of `begins` on, as many as `counts` says, one range after the other."""
    shifts = begins - (counts.cumsum(0) - counts)
    return shifts.repeat_interleave(counts) + torch.arange(int(counts.sum()))


def can_pack(lm: Any) -> bool:
    """Whether the model's attention can be ours: its family says so, and its config asks for no sliding windows."""
    config = lm.config
    windows = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or [])
    return family_of(config.model_type).packs and not windows and not getattr(config, "sliding_window", None)


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


def packed_states(
    backbone: Any, lengths: Tensor, prompts: Prompts | None, ranks: SequenceRanks | None = None, **entering: Tensor
) -> States:
    """Last hidden states [N, H] of a backbone, of `input_ids` [N] or `inputs_embeds` [N, H]; `ranks` share them."""
    trees = Trees.of(lengths, prompts)
    # A mask of four dimensions is handed on as it is, so none is made; our attention does not look at it.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=lengths.device)
    row = {name: flat[trees.computed] for name, flat in entering.items()} | {"position_ids": trees.positions}
    own = {name: (flat if ranks is None else ranks.share(flat))[None] for name, flat in row.items()}
    out = backbone(**own, attention_mask=no_mask, trees=trees, sequence_ranks=ranks)
    states = out.last_hidden_state.squeeze(0)
    return _gathered(states, trees.given) if ranks is None else shared_states(states, trees.given, ranks)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    trees: Trees | None = None,
    sequence_ranks: SequenceRanks | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The output of attention [1, M, a, d], for query [1, a, M, d], key and value (which may have fewer heads); of
    `sequence_ranks`, each has its m tokens of the row."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if trees is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    if sequence_ranks is None:
        return _packed_attention(query, key, value, trees, scaling), None
    num_tokens, num_heads = len(trees.computed), query.shape[1]
    q, k, v = (sequence_ranks.by_heads(x, num_tokens, num_heads) for x in (query, key, value))
    return sequence_ranks.by_tokens(_packed_attention(q, k, v, trees, scaling)), None


def _packed_attention(query: Tensor, key: Tensor, value: Tensor, trees: Trees, scaling: float | None) -> Tensor:
    """The output of attention [1, M, a, d]."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and half and query.shape[-1] in VARLEN_HEAD_SIZES:
        return _in_two_kernels(query, key, value, trees, scaling)[None]
    grouped = query.shape[1] != key.shape[1]
    # The gradient of `x[0]` is a copy among zeros, that of a squeeze none.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    outs = []
    for block in trees.blocks:
        queries, keys, values = (_gathered(x, block.index) for x in (q, k, v))
        if block.prefix_index is not None:
            assert block.prefix_of is not None
            of_prefixes = (_gathered(_gathered(x, block.prefix_index), block.prefix_of) for x in (k, v))
            keys, values = (torch.cat(sides, 1) for sides in zip(of_prefixes, (keys, values), strict=True))
        out = scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=block.visible,
            is_causal=block.visible is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outs.append(_gathered(out.transpose(1, 2).flatten(0, 1), block.back))
    return torch.cat(outs)[None]


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]`, by `embedding`: its backward pass takes a third of the time that indexing's takes on a CPU."""
    rows: Tensor = embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:])
    return rows


@cache
def _takes_groups(kernel: Callable[..., Any]) -> bool:
    """Whether a version of torch's kernel takes fewer heads of keys than of queries; each look takes as long as an
    operation of a layer."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _in_two_kernels(query: Tensor, key: Tensor, value: Tensor, trees: Trees, scaling: float | None) -> Tensor:
    """The output of attention [M, a, d] by torch's kernel for sequences of different lengths."""
    from torch.nn.attention import varlen

    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _takes_groups(varlen.varlen_attn):
            options["enable_gqa"] = True
        else:  # torch 2.11 and 2.12
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> Tensor:
        out = varlen.varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0), **options)
        assert isinstance(out, Tensor)
        return out

    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    end, prefixes, suffixes = trees.bounds
    out = attend(q[:end], k[:end], v[:end], prefixes)
    if suffixes is None:
        return out
    return torch.cat([out, attend(q[end:], k[trees.keys], v[trees.keys], suffixes)])

"""Shapes of Llama-family models: the input of the memory model, and the exact number of parameters.

Read from a Hugging Face config, a checkpoint directory, a GGUF header, a `FreshBase`, or derived from a number of
parameters. Weights are never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xray_runtime.models.config import FreshBase
from xray_runtime.models.context import positions
from xray_runtime.models.family import LayerSizes, family_of
from xray_runtime.models.lora import EXPERTS, LINEAR_LAYERS

_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151_936, True, 32_768),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True, 40_960),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128_256, True, 131_072),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151_936, True, 40_960),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128_256, True, 131_072),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, True, 40_960),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14_336, 32, 32, 8, 128, 128_256, False, 131_072),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, False, 40_960),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 17_408, 40, 40, 8, 128, 151_936, False, 40_960),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 25_600, 64, 64, 8, 128, 151_936, False, 40_960),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 28_672, 80, 64, 8, 128, 128_256, False, 131_072),
}
_MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-30B-A3B": {
        **dict(zip(_FIELDS, ("qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151_936, False, 40_960), strict=True)),
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        **dict(zip(_FIELDS, ("mixtral", 4096, 14_336, 32, 32, 8, 128, 32_000, False, 32_768), strict=True)),
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
    # Their configs in transformers are these models' by default.
    "deepseek-ai/DeepSeek-V3": {"model_type": "deepseek_v3", "max_position_embeddings": 163_840},
    "openai/gpt-oss-120b": {"model_type": "gpt_oss"},
}
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    **{name: dict(zip(_FIELDS, row, strict=True)) for name, row in _ROWS.items()},
    **_MIXTURES,
}
"""Hub name → the fields of its `config.json` that a plan needs, so that common models are planned without a network."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a mixture, of which routers choose some for each token; shared ones, which all tokens take, are
    not among them."""

    number: int
    """Experts of one layer."""
    chosen: int
    """Those of one token in one layer."""
    width: int
    """The intermediate size of one."""
    num_layers: int
    """Layers that have experts."""
    parameters: int
    """Parameters of all of them, in all layers."""

    def largest_tensor(self, hidden: int) -> int:
        """Elements of a layer's gates and up projections, which are one tensor."""
        return self.number * 2 * self.width * hidden

    def taken(self, tokens: float) -> float:
        """The share of a layer's experts that `tokens` tokens take, where routers treat all alike."""
        return 1.0 - math.pow(1.0 - self.chosen / self.number, tokens)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Llama: RMSNorm, grouped-query attention (Ainslie et al. 2023), SwiGLU; Touvron et al. 2023."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """Input and output embeddings are one matrix."""
    extra_layer_parameters: int = 0
    """Biases and norms of one layer that a Llama does not have."""
    layer_matrices: int | None = None
    """Elements of one layer's matrices; None: those of a Llama."""
    extra_parameters: int = 0
    """Parameters outside the layers that a Llama does not have."""
    extra_norm_width: int = 0
    """Features that one layer normalizes, beyond the 2·h of a Llama: norms of queries and keys, or after each part."""
    max_positions: int | None = None
    """Its context in tokens; None: unknown."""
    family: str = "llama"
    """Hugging Face's `model_type`."""
    cached_features: int | None = None
    """Features that a generator caches of a token in one layer, if they are latent (DeepSeek-AI 2024); None: keys and
    values."""
    experts: Experts | None = None
    """Those of a mixture, whose `intermediate_size` is that of all that a token takes in one layer."""
    eager: bool = False
    """Its attention is not fused: scores of each pair of a row's tokens exist."""

    @property
    def embedding_parameters(self) -> int:
        """One embedding matrix, V·h."""
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, tp: int = 1) -> int:
        """One layer's share of one of `tp` tensor-parallel ranks: q, k, v, o, gate, up and down projections are split
        (by whole heads; key-value heads are repeated where there are fewer of them than ranks), norms are not.
        """
        heads = ceil_div(self.num_heads, tp) + ceil_div(self.num_kv_heads, tp)
        mlp = 3 * self.hidden_size * ceil_div(self.intermediate_size, tp)
        matrices = 2 * self.hidden_size * self.head_size * heads + mlp
        if self.layer_matrices is not None:
            matrices = ceil_div(self.layer_matrices, tp)
        return matrices + 2 * self.hidden_size + self.extra_layer_parameters

    @property
    def num_parameters(self) -> int:
        """All parameters of the causal LM, a tied embedding once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        outside = embeddings + self.hidden_size + self.extra_parameters
        return self.num_layers * self.layer_parameters() + outside

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token does not take."""
        if self.experts is None:
            return 0
        return self.experts.parameters // self.experts.number * (self.experts.number - self.experts.chosen)

    @property
    def active_parameters(self) -> int:
        """Parameters that compute one token."""
        return self.num_parameters - self.idle_parameters


def from_fresh(config: FreshBase) -> ModelShape:
    """The shape of our own small model, at its largest vocabulary."""
    experts, head = None, config.hidden_size // config.num_heads
    if (number := config.num_experts) > 0:
        matrices = 3 * config.hidden_size * config.intermediate_size
        experts = Experts(
            number=number,
            chosen=config.num_experts_per_tok,
            width=config.intermediate_size,
            num_layers=config.num_layers,
            parameters=config.num_layers * number * matrices,
        )
        attention = 2 * config.hidden_size * head * (config.num_heads + config.num_kv_heads)
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=head,
        intermediate_size=config.intermediate_size * (experts.chosen if experts else 1),
        vocab_size=config.vocab_size,
        tied=True,
        max_positions=config.max_positions,
        # Norms of queries and keys; routers.
        extra_layer_parameters=2 * head if experts else 0,
        extra_norm_width=head * (config.num_heads + config.num_kv_heads) if experts else 0,
        layer_matrices=attention + number * (matrices + config.hidden_size) if experts else None,
        family="qwen3_moe" if experts else "llama",
        experts=experts,
    )


def is_complete(config: Mapping[str, Any]) -> bool:
    """Whether `from_hf_config` can count a `config.json`: its family says how, and every field is written out, since
    families differ in what they take for a missing one."""
    family = family_of(config.get("model_type"))
    names = [name for name in _FIELDS[1:] if name != "head_dim" or name in family.config_fields]
    return family.beyond is not None and all(isinstance(config.get(name), int) for name in names)


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a Hugging Face `config.json` that `is_complete`."""
    family, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    kv_heads, mlp = config["num_key_value_heads"], config["intermediate_size"]
    head_size = config.get("head_dim") or hidden // heads
    beyond = family_of(family).beyond
    assert beyond is not None
    extra = beyond(config, LayerSizes(hidden, heads * head_size, kv_heads * head_size, head_size, mlp))
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=mlp,
        vocab_size=config["vocab_size"],
        tied=bool(config["tie_word_embeddings"]),
        extra_layer_parameters=extra.parameters,
        extra_norm_width=extra.normalized,
        max_positions=positions(config),
        family=family,
    )


def from_parameter_count(count: float) -> ModelShape:
    """A plausible Llama with `count` parameters (short of it by less than its number of layers).

    Width and depth grow together as in the Llama 2 family (Touvron et al. 2023): hidden ≈ 128 × layers, 32,000 untied
    tokens, heads of 128, and from 30 billion parameters on 8 key-value heads. The MLP takes up what is left.
    """
    total = int(count)
    head_size, tied = (128, False) if total >= 10**9 else (64, True)
    # Heads in multiples of 8 or 16, so that large models can be split.
    step = 2048 if total >= 10**11 else 1024 if total >= 10**9 else 64
    vocab = 32_000 if total >= 10**8 else 2_048

    def shape(hidden: int) -> ModelShape:
        heads = hidden // head_size
        kv_heads = 8 if total >= 30 * 10**9 else heads
        return ModelShape(
            num_layers=1,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            intermediate_size=8 * hidden // 3,
            vocab_size=vocab,
            tied=tied,
        )

    def layers(hidden: int) -> float:
        one = shape(hidden)
        return (total - one.num_parameters) / one.layer_parameters() + 1

    widths = range(step, 40 * 1024, step)
    hidden = min((w for w in widths if layers(w) >= 1), key=lambda w: abs(w / layers(w) - 128))
    one = replace(shape(hidden), num_layers=max(round(layers(hidden)), 1))
    spare = (total - one.num_parameters) // one.num_layers
    one = replace(one, intermediate_size=one.intermediate_size + spare // (3 * hidden))
    return replace(one, extra_layer_parameters=(total - one.num_parameters) // one.num_layers)


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def device_parameters(shape: ModelShape, tp: int = 1, pp: int = 1, *, split_vocabulary: bool = False) -> int:
    """Parameters of the fullest pipeline stage's tensor-parallel rank.

    It holds ceil(L / pp) layers and one embedding matrix (both, if untied and pp = 1). DeepSpeed's AutoTP does not
    split embeddings; vLLM does (`split_vocabulary`).
    """
    matrices = 1 if shape.tied or pp > 1 else 2
    embeddings = matrices * ceil_div(shape.embedding_parameters, tp if split_vocabulary else 1)
    outside = embeddings + shape.hidden_size + shape.extra_parameters
    return ceil_div(shape.num_layers, pp) * shape.layer_parameters(tp) + outside


def lora_parameters(
    shape: ModelShape, rank: int, tp: int = 1, pp: int = 1, *, targets: tuple[str, ...] | None = None
) -> int:
    """Parameters of LoRA adapters: rank · (in + out) for each projection, ceil(L / pp) layers of them. Tensor-parallel
    ranks split the side that the matrix is split on; the other, of the hidden size, each has whole.

    `targets` names the projections; None, or a name no Llama has: all of them. A mixture's feed-forward layers are
    experts, each with adapters of its own where `targets` has `experts`.
    """
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    sizes = dict(zip(LINEAR_LAYERS, (q, kv, kv, q, *(shape.intermediate_size,) * 3), strict=True))
    per_layer = 0
    if (experts := shape.experts) is not None:
        sizes = {name: sizes[name] for name in LINEAR_LAYERS[:4]}
        if EXPERTS in (targets or ()):
            # Gates and up projections are one matrix.
            per_layer = experts.number * (2 * h + 3 * experts.width)
    known = targets is not None and all(name in sizes or name == EXPERTS for name in targets)
    chosen = [size for name, size in sizes.items() if not known or name in (targets or ())]
    return ceil_div(shape.num_layers, pp) * rank * (per_layer + sum(h + ceil_div(size, tp) for size in chosen))

"""Shapes of Llama-family models: the input of the memory model, and the exact number of parameters.

Read from a Hugging Face config, a checkpoint directory, a GGUF header, a `FreshBase`, or derived from a number of
parameters. Weights are never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xray_runtime.config.base import FreshBase, PretrainedBase
from xray_runtime.errors import first_line
from xray_runtime.store.hub import check_on_hub
from xray_runtime.store.location import NO_CODE, locate

EXACT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose parameters are counted exactly and whose layers can be split; others with the same fields are
counted as a Llama."""

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
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151_936, True),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128_256, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151_936, True),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128_256, True),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, True),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14_336, 32, 32, 8, 128, 128_256, False),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, False),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 17_408, 40, 40, 8, 128, 151_936, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 25_600, 64, 64, 8, 128, 151_936, False),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 28_672, 80, 64, 8, 128, 128_256, False),
}
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {name: dict(zip(_FIELDS, row, strict=True)) for name, row in _ROWS.items()}
"""Hub name → the fields of its `config.json` that a plan needs, so that common models are planned without a network."""


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
    family: str = "llama"
    """Hugging Face's `model_type`."""

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
        return 2 * self.hidden_size * self.head_size * heads + mlp + 2 * self.hidden_size + self.extra_layer_parameters

    @property
    def num_parameters(self) -> int:
        """All parameters of the causal LM, a tied embedding once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters() + embeddings + self.hidden_size


def from_fresh(config: FreshBase) -> ModelShape:
    """The shape of our own small Llama, at its largest vocabulary."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.hidden_size // config.num_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied=True,
    )


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a Hugging Face `config.json`.

    Raises:
        ValueError: a field that a Llama has is missing, or the model is a mixture of experts.
    """
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    absent = [name for name in names if not isinstance(config.get(name), int)]
    family = config.get("model_type", "unknown")
    if absent:
        raise ValueError(f"a {family!r} model cannot be planned: its config has no {absent[0]}; plan with --params")
    if any(config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ValueError(
            f"a {family!r} model cannot be planned: mixtures of experts are not supported; plan with --params"
        )
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    q, kv, mlp = heads * head_size, kv_heads * head_size, config["intermediate_size"]
    extra = 0
    if config.get("attention_bias"):
        extra += q + 2 * kv + hidden
    elif family == "qwen2":
        # Its config does not mention its biases on q, k and v.
        extra += q + 2 * kv
    if config.get("mlp_bias"):
        extra += 2 * mlp + hidden
    if family == "qwen3":
        extra += 2 * head_size
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=mlp,
        vocab_size=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        extra_layer_parameters=extra,
        family=family,
    )


def from_pretrained(config: PretrainedBase, field: str = "base.model") -> ModelShape:
    """The shape of a hub name, a directory, a .gguf file or a packaged model.

    Args:
        field: config field that names it; errors begin with it.

    Raises:
        ValueError: it cannot be found or read, or is not a Llama-like model.
    """
    if config.model in KNOWN_CONFIGS and not Path(config.model).exists():
        return from_hf_config(KNOWN_CONFIGS[config.model])
    check_on_hub(config.model, field, "model")
    name, gguf = locate(config.model, field)
    try:
        if gguf is not None:
            return _from_gguf(Path(name) / gguf)
        if Path(name).is_dir():
            config_json = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
            return from_hf_config(config_json if isinstance(config_json, dict) else {})
        import transformers

        return from_hf_config(transformers.AutoConfig.from_pretrained(name, **NO_CODE).to_dict())
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"{field}: {config.model!r} cannot be planned ({reason})") from error


def _from_gguf(path: Path) -> ModelShape:
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def field(key: str) -> Any:
        if key not in reader.fields:
            raise ValueError(f"its header has no {key}")
        return reader.fields[key].contents()

    family = field("general.architecture")

    def number(key: str) -> int:
        return int(field(f"{family}.{key}"))

    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    hidden, heads = number("embedding_length"), number("attention.head_count")
    shape = ModelShape(
        num_layers=number("block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv"),
        head_size=number("attention.key_length")
        if f"{family}.attention.key_length" in reader.fields
        else hidden // heads,
        intermediate_size=number("feed_forward_length"),
        vocab_size=sizes["token_embd.weight"] // hidden,
        tied="output.weight" not in sizes,
        family=family,
    )
    return replace(shape, extra_layer_parameters=(sum(sizes.values()) - shape.num_parameters) // shape.num_layers)


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

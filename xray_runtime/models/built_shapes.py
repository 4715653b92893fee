"""The shape of any causal LM, counted from the modules that transformers builds for its config on the meta device.

It is exact for every family, whatever its config leaves out, and imports torch and transformers, which takes seconds.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.store.location import NO_CODE, locate
from xray_runtime.models.context import positions
from xray_runtime.models.family import HFConfig, family_of
from xray_runtime.models.shapes import Experts, ModelShape, ceil_div

LONGEST = 240
"""Characters of a reason: some of transformers' lines go on with advice about its repository."""
MANY_CLASSES = "Unrecognized configuration class"
"""How transformers begins a message of 3,000 characters: no causal LM has this kind of config."""


def built_shape(model: str, fields: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape of `model` (as in `PretrainedBase`).

    Args:
        fields: of its `config.json`, where they are known without it.

    Raises:
        ValueError: transformers builds no causal LM for its config, or stage `base` would refuse it; one line.
    """
    import torch
    import transformers

    from xray_runtime.models.attention import attention_of, auto_class
    from xray_runtime.models.source_checks import ForeignModelError, check_config

    kind = dict(fields or {}).get("model_type")
    try:
        if fields is None:
            config = transformers.AutoConfig.from_pretrained(locate(model)[0], **NO_CODE)
        else:
            config = transformers.AutoConfig.for_model(**fields)
        kind = config.model_type
        check_config(config)
        # Nothing is allocated: a mixture's experts alone may be more than the memory of this machine.
        with torch.device("meta"):
            lm: Any = auto_class(config).from_config(config, attn_implementation=attention_of(config), **NO_CODE)
        lm.tie_weights()
        return shape_of(lm)
    except ForeignModelError as error:
        raise ValueError(f"it {error}") from error
    except Exception as error:  # a damaged config fails anywhere
        reason = textwrap.shorten(first_line(error), LONGEST, placeholder="…")
        if reason.startswith(MANY_CLASSES):
            reason = f"transformers has no causal language model of the kind {kind!r}"
        raise ValueError(reason) from error


def shape_of(lm: Any) -> ModelShape:
    """The shape of a causal LM. Raises ValueError like `built_shape`."""
    family, config = lm.config.model_type, lm.config.get_text_config()
    num_layers, hidden, heads = (
        _size(config, family, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or hidden // heads
    latent = getattr(config, "kv_lora_rank", None)
    embedding, output = lm.get_input_embeddings().weight, lm.get_output_embeddings()
    layers = _layers(lm, num_layers, family)
    parameters = list(layers.parameters())
    matrices = sum(p.numel() for p in parameters if p.dim() > 1)
    vectors = sum(p.numel() for p in parameters if p.dim() <= 1)
    experts = _experts(layers, config, family)
    normalized = sum(_normalized(layers, {"q": heads, "k": kv_heads}, head_size)) // num_layers
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=_intermediate(config, parameters) if experts is None else _taken(layers, experts, hidden),
        vocab_size=embedding.shape[0],
        tied=output is None or output.weight is embedding,
        extra_layer_parameters=vectors // num_layers - 2 * hidden,
        layer_matrices=matrices // num_layers,
        extra_norm_width=max(normalized - 2 * hidden, 0),
        max_positions=positions(lm.config.to_dict()),
        family=family,
        cached_features=latent + config.qk_rope_head_dim if latent else None,
        experts=experts,
        # Mamba's classes have no "sdpa", and no attention either.
        eager=lm.config._attn_implementation == "eager"
        and any("Attention" in type(module).__name__ for module in layers.modules()),
    )
    # Parameters outside the layers, and the remainder where layers differ in size.
    return replace(shape, extra_parameters=sum(p.numel() for p in lm.parameters()) - shape.num_parameters)


def _size(config: HFConfig, family: str, name: str) -> int:
    """A whole number of the config, under the name that a Llama has for it."""
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ValueError(f"a {family!r} model's config has no {name}")
    return value


def _intermediate(config: HFConfig, parameters: list[Any]) -> int:
    """The width of the widest MLP. Some families have one for each layer; others name it differently, and nothing in a
    layer is wider."""
    width = getattr(config, "intermediate_size", None)
    if isinstance(width, list | tuple) and width:
        return int(max(width))
    return width if isinstance(width, int) else max(max(p.shape) for p in parameters)


def _layers(lm: Any, num_layers: int, family: str) -> Any:
    """The language model's layers: the largest list of `num_layers` modules."""
    from torch import nn

    lists = [m for m in lm.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise ValueError(f"a {family!r} model has no list of its {num_layers} layers")
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


def _expert_modules(layers: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of all that hold the matrices of a layer's experts, or a kind of them, in one tensor [E, …]."""
    for name, module in layers.named_modules():
        is_experts = "expert" in name.rpartition(".")[2].lower() or "Experts" in type(module).__name__
        if is_experts and any(p.dim() == 3 for p in module.parameters(recurse=False)):
            yield name, module


def _experts(layers: Any, config: HFConfig, family: str) -> Experts | None:
    """The experts of a mixture; None: it is none. Raises ValueError: they cannot be counted."""
    found = [*_expert_modules(layers)]
    if not found:
        if any("expert" in name.rpartition(".")[2] for name, _ in layers.named_modules()):
            raise ValueError(f"a {family!r} model has experts, which cannot be counted")
        return None
    kinds = [p for _, module in found for p in module.parameters(recurse=False)]
    numbers = {p.shape[0] for p in kinds}
    chosen = getattr(config, family_of(family).chosen, None)
    if len(numbers) != 1 or not isinstance(chosen, int):
        raise ValueError(f"a {family!r} model has experts, which cannot be counted")
    number, hidden = numbers.pop(), config.hidden_size
    in_layers = {name.partition(".")[0] for name, _ in found}
    matrices = sum(p.numel() for p in kinds if p.dim() == 3)
    width = matrices // (3 * hidden * number * len(in_layers))
    return Experts(
        number=number,
        chosen=chosen,
        width=width,
        num_layers=len(in_layers),
        parameters=sum(p.numel() for p in kinds),
    )


def _taken(layers: Any, experts: Experts, hidden: int) -> int:
    """The intermediate size of the MLP that a token takes in the widest layer, shared experts and router with it: a
    third of its matrices' rows of `hidden` elements."""
    kinds = {name for name, _ in _expert_modules(layers)}

    def size(name: str, parameter: Any) -> int:
        module = name.rpartition(".")[0]
        if parameter.dim() < 2 or "attn" in module or "attention" in module:
            return 0
        taken: int = parameter.numel() // experts.number * experts.chosen if module in kinds else parameter.numel()
        return taken

    sizes: dict[str, int] = {}
    for name, parameter in layers.named_parameters():
        layer = name.partition(".")[0]
        sizes[layer] = sizes.get(layer, 0) + size(name, parameter)
    return ceil_div(max(sizes.values()), 3 * hidden)


def _normalized(layers: Any, heads: dict[str, int], head_size: int) -> Iterator[int]:
    """Features that each norm in the layers normalizes; one of queries or keys has a head's size."""
    for name, module in layers.named_modules():
        if "Norm" not in type(module).__name__ or getattr(module, "weight", None) is None:
            continue
        size = module.weight.numel()
        yield size * heads.get(name.rpartition(".")[2][0], 1) if size == head_size else size

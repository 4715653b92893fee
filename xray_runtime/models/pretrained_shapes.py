"""Shapes of models that exist: from their configs, a .gguf file's header, or the model as transformers builds it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.store.hub import check_on_hub
from xray_runtime.kernel.store.location import locate
from xray_runtime.models.built_shapes import built_shape
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.quantized import why_quantized
from xray_runtime.models.shapes import KNOWN_CONFIGS, ModelShape, from_hf_config, is_complete


def from_pretrained(config: PretrainedBase, field: str = "base.model") -> ModelShape:
    """The shape of a hub name, a directory, a .gguf file or a packaged model.

    Args:
        field: config field that names it; errors begin with it.

    Raises:
        ValueError: it cannot be found, read or built; one line.
    """
    if (known := KNOWN_CONFIGS.get(config.model)) and not Path(config.model).exists():
        return from_hf_config(known) if is_complete(known) else built_shape(config.model, known)
    check_on_hub(config.model, field, "model")
    name, gguf = locate(config.model, field)
    try:
        if gguf is not None:
            return _from_gguf(Path(name) / gguf)
        written = json.loads((Path(name) / "config.json").read_text(encoding="utf-8")) if Path(name).is_dir() else {}
        if not isinstance(written, dict):
            raise ValueError("its config.json is not a JSON object")
        if is_complete(written) and why_quantized(written) is None:
            return from_hf_config(written)
        return built_shape(config.model)
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

    if f"{family}.expert_count" in reader.fields and number("expert_count") > 0:
        raise ValueError(f"a {family!r} model in a .gguf file has experts, which are not counted there")
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
        max_positions=number("context_length") if f"{family}.context_length" in reader.fields else None,
        family=family,
    )
    extra, rest = divmod(sum(sizes.values()) - shape.num_parameters, shape.num_layers)
    return replace(shape, extra_layer_parameters=extra, extra_parameters=rest)

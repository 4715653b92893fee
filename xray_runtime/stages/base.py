"""Stage `base`: the model everything starts from, in Hugging Face form with float32 weights."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from xray_runtime.config.base import BaseConfig, FreshBase
from xray_runtime.data.pairs import prompt_text, read_examples
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.models.causal_lm import fresh_llama, load_pretrained, save_model
from xray_runtime.seeding import derive_seed
from xray_runtime.stages.spec import Recorder, StageSpec


class _Section(BaseModel):
    base: BaseConfig


def run(spec: StageSpec, out: Path, recorder: Recorder) -> int:
    """Writes config.json, model.safetensors and the tokenizer's files."""
    config = _Section.model_validate(spec.sections, strict=True).base
    recorder.progress(0, 1, "models", "loading")
    if isinstance(config, FreshBase):
        examples = read_examples(spec.parent("dataset") / "train.jsonl")
        texts = [text for e in examples for text in (prompt_text(e.prompt), e.response)]
        tokenizer = train_tokenizer(texts, config.vocab_size)
        lm = fresh_llama(config, tokenizer, derive_seed(spec.seed, "base", "weights"))
    else:
        lm, tokenizer = load_pretrained(config.model)
        layers = int(lm.config.num_hidden_layers)
        if config.trainable_layers is not None and config.trainable_layers > layers:
            raise ValueError(
                f"base.trainable_layers: {config.trainable_layers} is not allowed: {config.model!r} has {layers} layers"
            )
    save_model(lm, tokenizer, out)
    num_parameters = sum(p.numel() for p in lm.parameters())
    recorder.metrics({"base/parameters": float(num_parameters), "base/vocabulary": float(len(tokenizer))}, step=0)
    recorder.progress(1, 1, "models", f"{num_parameters / 1e6:.1f}M parameters")
    return 0

"""Stage `base`: a pretrained model in Hugging Face form with float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.models.causal_lm import load_pretrained, save_model, stop_tokens

if TYPE_CHECKING:
    from xray_runtime.config.base import HubModel
    from xray_runtime.graph.kind import NoInputs, Recorder, Stage


def run(stage: Stage[HubModel, NoInputs], out: Path, recorder: Recorder) -> int:
    """Writes config.json, model.safetensors and the tokenizer's files."""
    recorder.progress(0, 1, "models", "loading")
    lm, tokenizer, files = load_pretrained(stage.config.model, stage.config.chat_template)
    try:
        stops = stop_tokens(tokenizer, lm.generation_config.eos_token_id)
    except ValueError as error:
        raise ValueError(f"{stage.name}.model: {stage.config.model!r} cannot be used: {error}") from error
    save_model(lm, tokenizer, out, stops, files)
    report_size(recorder, sum(p.numel() for p in lm.parameters()), len(tokenizer))
    return 0


def report_size(recorder: Recorder, num_parameters: int, vocabulary: int) -> None:
    """Report the size of the model."""
    recorder.metrics({"base/parameters": float(num_parameters), "base/vocabulary": float(vocabulary)}, step=0)
    recorder.progress(1, 1, "models", f"{num_parameters / 1e6:.1f}M parameters")

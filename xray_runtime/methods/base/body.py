"""Stage `base`: a pretrained model in Hugging Face form with float32 weights, tried before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.location import locate
from xray_runtime.methods.base.generator_trial import check_sampled
from xray_runtime.models.adapter_files import keep_adapter
from xray_runtime.models.causal_lm import (
    load_model,
    load_tokenizer,
    read_pretrained,
    save_model,
    stop_tokens,
    unloadable,
)
from xray_runtime.models.picture_trial import check_pictures
from xray_runtime.models.pictures import copy_processor
from xray_runtime.models.source_checks import ForeignModelError, check_vocabulary
from xray_runtime.models.trial import OtherModelError, check_computed

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import NoInputs, Recorder
    from xray_runtime.methods.base.config import HubBase

LEFT_OUT = "left_out.json"
"""Tensors of the model's files that it does not need, and tokens of its tokenizer that no text has."""
STEPS = 2


def run(stage: Stage[HubBase, NoInputs], out: Path, recorder: Recorder) -> int:
    """Writes config.json, model.safetensors, the tokenizer's files and, if anything is left out, left_out.json.

    Raises:
        ValueError: the model cannot be loaded, or X-ray would train, compute or publish another one; one line.
    """
    model, field = stage.config.model, f"{stage.name}.model"
    recorder.progress(0, STEPS, "steps", "loading")
    lm, tokenizer, files, left_out = read_pretrained(model, stage.config.chat_template, stage.config.adapter)
    try:
        stops = stop_tokens(tokenizer, lm.generation_config.eos_token_id)
    except ValueError as error:
        raise ValueError(f"{field}: {model!r} cannot be used: {error}") from error
    save_model(lm, tokenizer, out, stops, files)
    if stage.config.adapter is not None:
        # A directory's path says where this machine keeps it.
        keep_adapter(Path(stage.config.adapter), out / ADAPTER, Path(model).name if Path(model).is_dir() else model)
    try:
        copy_processor(locate(model)[0], out)
    except (OSError, ValueError) as error:
        raise unloadable(field, model, error) from error
    recorder.progress(1, STEPS, "steps", "trying it")
    try:
        check_vocabulary(lm, tokenizer, stops)
        check_written(out, None if files else lm)
    except (ForeignModelError, OtherModelError) as error:
        raise ValueError(f"{field}: {model!r} is not allowed: it {error}") from error
    if stage.config.generator is not None:
        check_sampled(stage, out, stops, tokenizer.pad_token_id)
    if left_out:
        (out / LEFT_OUT).write_text(json.dumps(left_out, indent=2) + "\n", encoding="utf-8")
        recorder.metrics({"base/left_out": float(len(left_out))}, step=0)
    report_size(recorder, sum(p.numel() for p in lm.parameters()), len(tokenizer))
    return 0


def check_written(out: Path, loaded: Any) -> None:
    """Check that the files in `out` hold `loaded`, a model with its weights, as transformers reads them, and that X-ray
    computes it. A written skeleton (None) has its bytes from the source. Raises OtherModelError: not so."""
    found = load_model(out)
    if loaded is not None:
        expected, written = loaded.state_dict(), found.state_dict()
        changed = [name for name in expected if name not in written or not torch.equal(expected[name], written[name])]
        if changed or expected.keys() != written.keys():
            name = min([*changed, *written.keys() - expected.keys()])
            raise OtherModelError(f"is not what transformers reads again after it was saved ({name} differs)")
    check_computed(found)
    with TemporaryDirectory() as scratch:
        check_pictures(found, out, Path(scratch), load_tokenizer(out))


def report_size(recorder: Recorder, num_parameters: int, vocabulary: int) -> None:
    """Report the size of the model."""
    recorder.metrics({"base/parameters": float(num_parameters), "base/vocabulary": float(vocabulary)}, step=0)
    recorder.progress(STEPS, STEPS, "steps", f"{num_parameters / 1e6:.1f}M parameters")

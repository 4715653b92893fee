"""Stage `fresh_base`: a small Llama with random weights, and a tokenizer trained on the conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.data.pairs import TRAIN, Example, Pairs, prompt_text
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.base.body import STEPS, report_size
from xray_runtime.models.causal_lm import fresh_llama, save_model

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.fresh_base.kind import FreshBaseInputs
    from xray_runtime.models.config import FreshBase


def run(stage: Stage[FreshBase, FreshBaseInputs], out: Path, recorder: Recorder) -> int:
    """Writes config.json, model.safetensors and the tokenizer's files."""
    recorder.progress(0, STEPS, "steps", "loading")
    examples = Pairs(stage.inputs.data.path / TRAIN, Example)
    tokenizer = train_tokenizer((text for e in examples for text in _texts(e)), stage.config.vocab_size)
    lm = fresh_llama(stage.config, tokenizer, derive_seed(stage.seed, "base", "weights"))
    save_model(lm, tokenizer, out)
    report_size(recorder, sum(p.numel() for p in lm.parameters()), len(tokenizer))
    return 0


def _texts(example: Example) -> Iterator[str]:
    """Texts to train the tokenizer on; tools and calls in the chat template's form."""
    yield prompt_text(example.prompt)
    yield example.text
    for tool in example.prompt[0].get("tools", ()):
        yield json.dumps(tool, ensure_ascii=False)
    for call in example.tool_calls or ():
        yield f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"

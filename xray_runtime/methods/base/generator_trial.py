"""A few tokens sampled from a pretrained model by the generator that later stages use, before anything is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.health import WorkhorseError
from xray_runtime.cluster.pool.acquisition import BusyClusterError
from xray_runtime.cluster.protocols import get
from xray_runtime.data.batch import ReplyBatch
from xray_runtime.engines.layouts import GENERATORS
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import StageInterruptedError, cause_line, is_out_of_memory, root_cause
from xray_runtime.kernel.plugs import able
from xray_runtime.methods.common.mismatch import BFLOAT16_MISMATCH, FLOAT32_MISMATCH
from xray_runtime.methods.common.sampling.sampled_replies import prompt_rows
from xray_runtime.models.causal_lm import copy_model, load_model, max_positions
from xray_runtime.models.family import family_of
from xray_runtime.models.published_check import tried_ids
from xray_runtime.models.trial import own_logprobs
from xray_runtime.models.weight_files import overwrite, tensors

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import NoInputs
    from xray_runtime.methods.base.config import HubBase

NEW_TOKENS = 8
MAX_LENGTH = 64
UPDATED = "updated"
"""Directory, for as long as the trial lasts, of the model with other weights."""
SMALLER = 0.8
"""By this, every third element of its tensors."""
PASSING = (ConfigError, StageInterruptedError, BusyClusterError, WorkhorseError)
"""Errors that say nothing about the model."""


def check_sampled(stage: Stage[HubBase, NoInputs], out: Path, stops: tuple[int, ...], padding: int) -> None:
    """Sample from the model in `out` with the generator, then from the same model with other weights, as an update
    brings them, and compare log-probabilities with transformers', unless the generator is known to compute this family.

    Raises:
        ValueError: the generator refuses the model, or computes another one, or keeps weights that it should replace;
            one line.
    """
    generator, content = stage.config.generator, json.loads((out / "config.json").read_text(encoding="utf-8"))
    if generator is None:
        return
    tried = family_of(content["model_type"]).tried
    # Generators that run transformers' model pad its prompts, which attention ignores: tried families have no more.
    if generator.engine in tried or (tried and not generator.capabilities.own_models):
        return
    refused = f"{stage.name}.generator: {generator.engine} is not allowed for {stage.config.model!r}"
    others = [repr(e) for e in GENERATORS if e not in (generator.engine, *able(GENERATORS, "own_models"))]
    remedy = f"set generator.engine to {' or '.join(others)}"
    prompts = tried_ids(out)
    sampling = Sampling(NEW_TOKENS, 1.0, stops, padding)
    spec = GeneratorSpec(out, min(MAX_LENGTH, max_positions(out) or MAX_LENGTH), generator)
    updated = out / UPDATED
    try:
        _write_updated(out, updated)
        try:
            answers = _sampled(stage, spec, prompts, sampling, updated)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, PASSING) or is_out_of_memory(error):
                raise
            kind, text = type(cause).__name__, cause_line(cause)
            failure = kind if text == kind else f"{kind}: {text}"
            raise ValueError(f"{refused}: it fails ({failure}); {remedy}") from error
        off = [_difference(*each, prompts) for each in zip((out, updated), answers, strict=True)]
    finally:
        shutil.rmtree(updated, ignore_errors=True)
    limit = FLOAT32_MISMATCH if generator.precision(stage.runtime.device) == "float32" else BFLOAT16_MISMATCH
    for difference, weights in zip(off, ("", "after an update of its weights "), strict=True):
        if not difference <= limit:
            raise ValueError(
                f"{refused}: {weights}its log-probabilities differ from transformers' by {difference:.2g} nats a token "
                f"(at most {limit:g}); {remedy}"
            )


def _sampled(
    stage: Stage[HubBase, NoInputs], spec: GeneratorSpec, prompts: list[list[int]], sampling: Sampling, updated: Path
) -> list[ReplyBatch]:
    """Answers with the weights of `spec`, then with those of `updated`."""
    with stage.open_models({"generator": spec}) as models:
        generator, rows = models["generator"], prompt_rows(stage, prompts, "trial")
        first = get(generator.generate.remote(rows, sampling, 0))
        get(generator.load_checkpoint.remote(updated, 1))
        return [first, get(generator.generate.remote(rows, sampling, 1))]


def _write_updated(out: Path, directory: Path) -> None:
    """Write the model of `out` with other weights in every tensor, so that one that an update leaves out shows."""

    def smaller(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(tensor.numel()).view(tensor.shape) % 3 == 0, SMALLER * tensor, tensor)

    copy_model(out, directory)
    overwrite(directory, ((name, smaller(t)) for name, t in tensors(out) if t.is_floating_point()), 0, 1)


def _difference(directory: Path, answer: ReplyBatch, prompts: list[list[int]]) -> float:
    """Mean |log-probability difference| of the sampled tokens from transformers'; NaN where one is."""
    lm: Any = load_model(directory).eval()
    replies = [ids.tolist() for ids in answer.response_ids]
    ids = torch.tensor([token for prompt, reply in zip(prompts, replies, strict=True) for token in (*prompt, *reply)])
    lengths = torch.tensor([len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True)])
    logprobs, _ = own_logprobs(lm, ids, lengths)
    rows = logprobs.split((lengths - 1).tolist())
    theirs = torch.cat([row[-len(reply) :] for row, reply in zip(rows, replies, strict=True)])
    ours = torch.cat([torch.from_numpy(row) for row in answer.rollout_logprobs])
    return float((theirs - ours).abs().mean())

"""A few tokens sampled from a pretrained model by the generator that later stages use, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
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
from xray_runtime.methods.common.sampling.sampled_replies import prompt_rows
from xray_runtime.methods.ppo.config import BFLOAT16_MISMATCH, FLOAT32_MISMATCH
from xray_runtime.models.causal_lm import load_model, max_positions
from xray_runtime.models.family import family_of
from xray_runtime.models.published_check import tried_ids
from xray_runtime.models.trial import own_logprobs

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import NoInputs
    from xray_runtime.methods.base.config import HubBase

NEW_TOKENS = 8
MAX_LENGTH = 64
PASSING = (ConfigError, StageInterruptedError, BusyClusterError, WorkhorseError)
"""Errors that say nothing about the model."""


def check_sampled(stage: Stage[HubBase, NoInputs], out: Path, stops: tuple[int, ...], padding: int) -> None:
    """Sample from the model in `out` with a generator that has its own models, and compare log-probabilities with
    transformers', unless the generator is known to compute this family.

    Raises:
        ValueError: the generator refuses the model, or computes another one; one line.
    """
    generator, content = stage.config.generator, json.loads((out / "config.json").read_text(encoding="utf-8"))
    if generator is None or not generator.capabilities.own_models:
        return
    if generator.engine in family_of(content["model_type"]).tried:
        return
    refused = f"{stage.name}.generator: {generator.engine} is not allowed for {stage.config.model!r}"
    others = [repr(name) for name in GENERATORS if name not in able(GENERATORS, "own_models")]
    remedy = f"set generator.engine to {' or '.join(others)}"
    prompts = tried_ids(out)
    sampling = Sampling(NEW_TOKENS, 1.0, stops, padding)
    spec = GeneratorSpec(out, min(MAX_LENGTH, max_positions(out) or MAX_LENGTH), generator)
    try:
        with stage.open_models({"generator": spec}) as models:
            rows = prompt_rows(stage, prompts, "trial")
            answers = [get(models["generator"].generate.remote(rows, sampling, 0))]
            # Some models change weights as they load them, and must do so again where these are updated.
            get(models["generator"].load_checkpoint.remote(out, 1))
            answers.append(get(models["generator"].generate.remote(rows, sampling, 1)))
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, PASSING) or is_out_of_memory(error):
            raise
        raise ValueError(f"{refused}: it fails ({type(cause).__name__}: {cause_line(cause)}); {remedy}") from error
    off = _difference(out, prompts, answers)
    limit = FLOAT32_MISMATCH if generator.precision(stage.runtime.device) == "float32" else BFLOAT16_MISMATCH
    if not off <= limit:
        raise ValueError(
            f"{refused}: its log-probabilities differ from transformers' by {off:.2g} nats a token (at most "
            f"{limit:g}); {remedy}"
        )


def _difference(out: Path, prompts: list[list[int]], answers: Sequence[ReplyBatch]) -> float:
    """Mean |log-probability difference| of the sampled tokens; the largest of the answers', NaN where one is."""
    lm = load_model(out).eval()
    return float(np.max([_difference_of(lm, prompts, answer) for answer in answers]))


def _difference_of(lm: Any, prompts: list[list[int]], answer: ReplyBatch) -> float:
    replies = [ids.tolist() for ids in answer.response_ids]
    ids = torch.tensor([token for prompt, reply in zip(prompts, replies, strict=True) for token in (*prompt, *reply)])
    lengths = torch.tensor([len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True)])
    found, _ = own_logprobs(lm, ids, lengths)
    rows = found.split((lengths - 1).tolist())
    theirs = torch.cat([row[-len(reply) :] for row, reply in zip(rows, replies, strict=True)])
    ours = torch.cat([torch.from_numpy(row) for row in answer.rollout_logprobs])
    return float((theirs - ours).abs().mean())

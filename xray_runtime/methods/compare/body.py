"""Stage `compare`: a candidate against the current champion, on held-out prompts that neither was trained on.

Each uses its own tokenizer and the same seeds. Judges score text, so that the two may have different vocabularies and
shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.pairs import HELDOUT, TRAIN, Messages, pairs_of, prompt_text
from xray_runtime.data.text_set import TextSet
from xray_runtime.data.tokenizing import encode_prompts
from xray_runtime.methods.common.sampling.episode_source import SamplerSetup
from xray_runtime.methods.common.sampling.policy_replies import PolicyReplies, sample_policy
from xray_runtime.methods.common.sampling.sampled_replies import sampling_of
from xray_runtime.methods.common.sampling.shared_base import shared_base, shared_generator
from xray_runtime.methods.common.training.dataset import max_prompt_tokens
from xray_runtime.methods.common.training.prompts import UniquePrompts, drawn
from xray_runtime.methods.evaluate.config import PEOPLE
from xray_runtime.methods.evaluate.human_verdicts import human_judge
from xray_runtime.methods.evaluate.judging import Scoring, judge, record_replies, tagged_rows
from xray_runtime.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.compare.kind import CompareInputs
    from xray_runtime.methods.evaluate.config import EvaluationConfig

SIDES = ("champion", "candidate")
MIN_PROMPTS = 8


def run(stage: Stage[EvaluationConfig, CompareInputs], out: Path, recorder: Recorder) -> int:
    """Writes comparison.json, samples.json, lost.json and prompts.json, as the evaluation does.

    Raises:
        ValueError: too few held-out prompts remain on which the champion was not trained.
    """
    config, inputs = stage.config, stage.inputs
    paths = {"candidate": inputs.policy.path, "champion": inputs.champion.path}
    tokenizers = {side: load_tokenizer(path) for side, path in paths.items()}
    excluded = champion_prompts(inputs)
    prompts, columns, limit = select_prompts(stage, tokenizers, excluded)
    tags = tagged_rows(config, columns, stage.name)
    human_judges = {}
    if inputs.verdicts is not None:
        human_judges[PEOPLE] = human_judge(inputs.verdicts.path, paths, inputs.prompts.path, excluded)
    prompt_texts = [prompt_text(messages) for messages in prompts]
    replies: dict[str, PolicyReplies] = {}
    with contextlib.closing(_generators(stage, paths, limit + config.max_response_tokens)) as generators:
        for number, (side, generator, version) in enumerate(generators, start=1):
            tokenizer = tokenizers[side]
            begun = list(zip(prompts, encode_prompts(tokenizer, prompts), strict=True))
            sampling = sampling_of(config, paths[side], tokenizer)
            setup = SamplerSetup(stage, generator, sampling, tokenizer, limit, recorder.log_dir, out)
            replies[side] = sample_policy(setup, begun, columns, side, version)
            recorder.progress(number, 3, "steps", f"sampled the {side}")
    scoring = Scoring(stage)
    with stage.open_models(scoring.specs()) as models:
        for side in SIDES:
            scoring.score(side, models, prompts, prompt_texts, replies[side], columns)
    comparison: dict[str, Any] = {"samples": len(prompt_texts)}
    comparison |= judge(config, stage.seed, stage.name, "candidate", "champion", scoring.panel, human_judges, tags)
    record_replies(out, recorder, "comparison", "compare", comparison, prompt_texts, replies, scoring.panel, config)
    rate = comparison["win_rate"]
    recorder.progress(3, 3, "steps", "no judge" if rate is None else f"win rate over the champion {rate:.2f}")
    return 0


def _generators(
    stage: Stage[EvaluationConfig, CompareInputs], paths: dict[str, Path], max_length: int
) -> Generator[tuple[str, ModelHandle, int]]:
    """(side, a generator of it, the version of its weights), one after the other: adapters of one base take turns in
    one generator."""
    config = stage.config.generator
    shared = shared_generator(shared_base(paths.values()), max_length, config)
    if shared is not None:
        with stage.open_models({"generator": shared}) as models:
            for version, side in enumerate(SIDES, start=1):
                get(models["generator"].load_checkpoint.remote(paths[side], version))
                yield side, models["generator"], version
        return
    for side in SIDES:
        with stage.open_models({"generator": GeneratorSpec(paths[side], max_length, config)}) as models:
            yield side, models["generator"], 0


def champion_prompts(inputs: CompareInputs) -> TextSet:
    """Prompts of the champion's training data that are not in the candidate's."""
    return TextSet(text for dataset in inputs.seen for text in pairs_of(dataset.path / TRAIN).prompt_texts())


def select_prompts(
    stage: Stage[EvaluationConfig, CompareInputs], tokenizers: dict[str, Any], excluded: TextSet
) -> tuple[list[Messages], dict[str, list[Any]], int]:
    """(held-out prompts in random order that fit both models and are not `excluded`, the dataset's columns of these,
    the longest prompt that fits)."""
    inputs, reply_tokens = stage.inputs, stage.config.max_response_tokens
    dataset, models = inputs.prompts.path, (inputs.policy, inputs.champion)
    limit = min(max_prompt_tokens(dataset, model.path, reply_tokens) for model in models)
    heldout = UniquePrompts(tokenizers["candidate"], dataset / HELDOUT, limit, stage.seal)
    prompts = [messages for messages, _ in heldout]
    limit = heldout.room
    sizes = [len(ids) for ids in encode_prompts(tokenizers["champion"], prompts)]
    fit = [i for i, size in enumerate(sizes) if size <= limit and prompt_text(prompts[i]) not in excluded]
    if len(fit) < MIN_PROMPTS:
        raise ValueError(
            f"{len(fit)} held-out prompts remain on which the champion was not trained, but {MIN_PROMPTS} are needed: "
            "evaluate both on a dataset neither was trained on, or set promotion.max_regression=null"
        )
    chosen = [fit[i] for i in drawn(stage, len(fit), stage.config.num_prompts)]
    return [prompts[i] for i in chosen], heldout.columns(chosen), limit

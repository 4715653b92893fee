"""Stage `evaluate`: a policy against the model it came from, on held-out prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.algorithms.kl import kl_summary
from xray_runtime.algorithms.statistics import distinct_n
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec, scored_together
from xray_runtime.cluster.protocols import ModelHandle, get, get_all
from xray_runtime.data.batch import TextBatch, with_end_of_turn
from xray_runtime.data.pairs import HELDOUT, prompt_text
from xray_runtime.methods.common.sampling.agent_rows import split_branches
from xray_runtime.methods.common.sampling.episode_source import SamplerSetup
from xray_runtime.methods.common.sampling.policy_replies import PolicyReplies, sample_policy
from xray_runtime.methods.common.sampling.sampled_replies import sampling_of
from xray_runtime.methods.common.sampling.shared_base import SharedBase, shared_base, shared_generator
from xray_runtime.methods.common.training.dataset import max_prompt_tokens
from xray_runtime.methods.common.training.prompts import UniquePrompts, drawn
from xray_runtime.methods.evaluate.config import PEOPLE
from xray_runtime.methods.evaluate.human_verdicts import human_judge
from xray_runtime.methods.evaluate.judging import Scoring, judge, record_replies, tagged_rows
from xray_runtime.models.causal_lm import load_tokenizer, stops_of
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.rewards.reward_reader import answer_rows

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.evaluate.config import EvaluationConfig
    from xray_runtime.methods.evaluate.kind import EvaluateInputs

SIDES = ("before", "after")
"""The baseline and the policy."""


def run(stage: Stage[EvaluationConfig, EvaluateInputs], out: Path, recorder: Recorder) -> int:
    """Writes evaluation.json (the `evaluation` of lifecycle.json), samples.json (readable pairs),
    lost.json (pairs that the policy lost) and prompts.json (all prompts, for the check that none was trained on)."""
    config, inputs = stage.config, stage.inputs
    before, policy, dataset = inputs.against.path, inputs.policy.path, inputs.prompts.path
    tokenizer = load_tokenizer(before)
    stops = stops_of(before, tokenizer)
    limit = min(max_prompt_tokens(dataset, model, config.max_response_tokens) for model in (before, policy))
    found = UniquePrompts(tokenizer, dataset / HELDOUT, limit, stage.seal)
    limit = found.room
    if dropped := found.metrics():
        recorder.metrics(dropped, step=0)
    chosen = drawn(stage, len(found), config.num_prompts)
    prompts, columns = [found[i] for i in chosen], found.columns(chosen)
    tags = tagged_rows(config, columns, stage.name)
    prompt_texts = [prompt_text(messages) for messages, _ in prompts]
    human_judges = {}
    if inputs.verdicts is not None:
        human_judges[PEOPLE] = human_judge(inputs.verdicts.path, {"after": policy, "before": before}, dataset)
    scoring, sampling = Scoring(stage, tokenizer), sampling_of(config, before, tokenizer)
    sides, length = {"before": before, "after": policy}, limit + config.max_response_tokens
    shared = shared_base(sides.values())
    generator = shared_generator(shared, length, config.generator) or GeneratorSpec(before, length, config.generator)
    specs: dict[str, ModelSpec | GeneratorSpec] = {**scoring.specs(), "generator": generator}
    specs |= _compared(config, sides, shared)
    replies: dict[str, PolicyReplies] = {}
    with stage.open_models(specs) as models:
        for version, side in enumerate(SIDES):
            if sides[side] != generator.directory:
                get(models["generator"].load_checkpoint.remote(sides[side], version))
            setup = SamplerSetup(stage, models["generator"], sampling, tokenizer, limit, recorder.log_dir, out)
            replies[side] = sample_policy(setup, prompts, columns, side, version)
            recorder.progress(version + 1, 3, "steps", f"sampled {side}")
        # Beside what scores, memory is scarcest.
        get(models["generator"].sleep.remote())
        kl = _kl(models, replies["after"])
        get_all([models[side].release_memory.remote() for side in SIDES if side in models])
        for side in SIDES:
            answers = replies[side]
            conversations = [messages for messages, _ in prompts]
            ids = answers.rollout.response_ids
            tokens = TextBatch.of(answers.begun, [with_end_of_turn(reply, stops) for reply in ids])
            if not answers.rollout.are_episodes:
                tokens = answer_rows(tokenizer, conversations, answers.texts, tokens)
            scoring.score(side, models, conversations, prompt_texts, answers, columns, tokens)

    evaluation: dict[str, Any] = {"samples": len(prompts), "kl": kl}
    evaluation |= judge(config, stage.seed, stage.name, "after", "before", scoring.panel, human_judges, tags)
    own = {side: [ids.tolist() for ids in replies[side].rollout.own_tokens()] for side in SIDES}
    evaluation |= {f"distinct_2_{side}": distinct_n(own[side], 2) for side in SIDES}
    record_replies(out, recorder, "evaluation", "evaluate", evaluation, prompt_texts, replies, scoring.panel, config)
    rate = evaluation["win_rate"]
    recorder.progress(3, 3, "steps", "no judge" if rate is None else f"win rate {rate:.2f}")
    return 0


def _compared(
    config: EvaluationConfig, sides: dict[str, Path], shared: SharedBase | None
) -> dict[str, ModelSpec | GeneratorSpec]:
    """The models that score for the KL: both sides, or the policy alone where its base is the other."""
    scores = ReferenceObjective(config.temperature)
    layout = config.frozen
    if shared is None or layout.is_split or layout.zero_stage:
        return {**scored_together({side: ModelSpec(path, scores, frozen=layout) for side, path in sides.items()})}
    spec = ModelSpec(shared.directory, scores, frozen=layout)
    if shared.directory == sides["before"]:
        return {"after": replace(spec, adapter=sides["after"], reference=scores)}
    return {**scored_together({side: replace(spec, adapter=path) for side, path in sides.items()})}


def _kl(models: dict[str, ModelHandle], replies: PolicyReplies) -> float:
    """KL(policy ‖ before) of a whole reply in nats: k1 over the policy's own samples."""
    rollout = replies.rollout
    branches = rollout.branches if "branches" in rollout else None
    rows, merged = split_branches(TextBatch.of(replies.begun, rollout.response_ids), branches)
    reference = models["before"].score if "before" in models else models["after"].reference
    after, before = map(merged, get_all([models["after"].score.remote(rows), reference.remote(rows)]))
    logprobs, ref_logprobs = after.ref_logprobs, before.ref_logprobs
    chosen = rollout.response_mask.dense() if rollout.are_episodes else logprobs.mask()
    padded = (torch.from_numpy(x) for x in (logprobs.dense(), ref_logprobs.dense(), chosen))
    return float(kl_summary(*padded)["k1"])

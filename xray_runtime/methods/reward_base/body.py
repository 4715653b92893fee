"""Stage `reward_base`: an imported reward model in Hugging Face's sequence-classification form."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import save_file

from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import get
from xray_runtime.data.pairs import HELDOUT, Example, Pairs
from xray_runtime.data.tokenizing import encode_prompts
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.results import write_json
from xray_runtime.methods.common.training.dataset import max_prompt_tokens, max_reply_tokens
from xray_runtime.models.causal_lm import save_model
from xray_runtime.models.classifier import load_classifier
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.rewards.reward_reader import CONVERSATION, READS, RewardReader

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.reward_base.kind import RewardBaseInputs
    from xray_runtime.methods.reward_model.config import RewardBaseConfig

STEPS = 2


def run(stage: Stage[RewardBaseConfig, RewardBaseInputs], out: Path, recorder: Recorder) -> int:
    """Writes the model, its head, and reward.json: mean and deviation of its scores, and its input format."""
    recorder.progress(0, STEPS, "steps", "loading")
    model, tokenizer = load_classifier(stage.config.model, f"{stage.name}.model")
    save_model(model.lm, tokenizer, out)
    assert model.scalar is not None
    (out / REWARD_HEAD).parent.mkdir()
    save_file({name: tensor.detach() for name, tensor in model.scalar.state_dict().items()}, out / REWARD_HEAD)
    metrics = {"reward_base/parameters": float(sum(p.numel() for p in model.parameters()))}
    # The scoring process loads it again.
    del model
    recorder.progress(1, STEPS, "steps", "saved")
    summary: dict[str, Any] = {"mean": 0.0, "std": 1.0, READS: CONVERSATION}
    write_json(out / "reward.json", summary)
    if stage.inputs.data is not None:
        scores = _heldout_scores(stage, out, tokenizer, stage.inputs.data.path)
        if len(scores) > 1 and not scores.std() > 0:
            raise RuntimeError(
                f"{stage.name}: all {len(scores)} held-out replies have the score {scores[0]:g}: it is not informative"
            )
        summary |= {"mean": float(scores.mean()), "std": float(scores.std()) or 1.0, "heldout_replies": len(scores)}
        write_json(out / "reward.json", summary)
        metrics |= {"reward_base/mean": summary["mean"], "reward_base/std": summary["std"]}
    recorder.metrics(metrics, step=0)
    recorder.progress(STEPS, STEPS, "steps", f"scores {summary['mean']:+.2f} ± {summary['std']:.2f}")
    return 0


def _heldout_scores(
    stage: Stage[RewardBaseConfig, RewardBaseInputs], out: Path, tokenizer: Tokenizer, dataset: Path
) -> np.ndarray:
    """Scores [n] of held-out human replies to prompts within the dataset's limit."""
    examples, limit = Pairs(dataset / HELDOUT, Example), max_prompt_tokens(dataset, out, max_reply_tokens(None, out))
    batches = (encode_prompts(tokenizer, [e.prompt for e in batch]) for batch in examples.batches())
    fits = [row for row, ids in enumerate(chain.from_iterable(batches)) if len(ids) <= limit]
    fit = [row for row in fits if examples[row].has_reply]
    if fits and not fit:
        raise ValueError(f"{stage.name}.data: the held-out prompts have no replies to score: add rows with replies")
    if not fit:
        raise ValueError(
            f"{stage.name}.data: no held-out prompt fits max_prompt_tokens = {limit} in the tokens of "
            f"{stage.config.model!r}: raise the dataset's max_prompt_tokens"
        )
    order = np.random.default_rng(derive_seed(stage.seed, stage.name, "replies")).permutation(len(fit))
    chosen = [examples[fit[i]] for i in order[: stage.config.num_replies]]
    reader = RewardReader(out, stage.name)
    rows = reader.rows([e.prompt for e in chosen], [e.response for e in chosen])
    spec = ModelSpec(out, RewardObjective(), head=out / REWARD_HEAD, frozen=stage.config.frozen)
    with stage.open_models({"reward": spec}) as models:
        return get(models["reward"].score.remote(rows)).scores

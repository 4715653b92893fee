"""Every column that travels between rollout, scoring, experience, objectives and ledger, and every number of an
optimizer step.

    B  rows         P  tokens of a prompt     R  tokens of a reply     T  tokens of a row, P and R together
    H  size of a hidden state                     L  layers with experts       K  experts of a token in a layer
    k  likeliest tokens in a place

A column of shape [B] is an array. All others are `Ragged`: their rows have different lengths and are never padded. An
objective receives the tokens of a micro-batch as one flat axis: [B, R] as [R of all rows].

Columns of batches are declared in `data.batch`; here are those of the ledger, and the numbers of a step. No computation
imports this module, so its edits recompute nothing. A test compares it with the code and with a small loop.
"""

from __future__ import annotations

from typing import Any

from xray_runtime.data.batch import KINDS
from xray_runtime.data.columnar import Column, ColumnBatch


def listed(name: str, shape: str, dtype: str, writer: str, readers: str, meaning: str) -> Column:
    """A column of the ledger, with an Arrow type, or a number of a step."""
    column = Column(shape, dtype, writer, readers, meaning, required=False, wire=False)
    column.name = name
    return column


_POLICY, _CRITIC = "methods.ppo.objectives", "methods.ppo.objectives, critic"
_WRITER, _PAGES = "methods.ppo.ledger_writer", "data.ledger"
LEDGER = (
    listed("iteration", "[B]", "int32", _WRITER, _PAGES, "from 0"),
    listed("row", "[B]", "int32", _WRITER, _PAGES, "`id` above"),
    listed("round", "[B]", "int32", _WRITER, _PAGES, "0: the first rollout; r: round r of `resample_rounds`"),
    listed("prompt", "[B]", "int64", _WRITER, _PAGES, "first row of the training pairs with this prompt"),
    listed("drawn", "[B]", "string", _WRITER, _PAGES, "as above; absent without a curriculum"),
    listed("version", "[B]", "int32", _WRITER, _PAGES, "as above"),
    listed("group", "[B]", "int64", _WRITER, "trust.replay", "as above; with `in_flight_updates`"),
    listed("token_versions", "[B, R]", "int32", _WRITER, "trust.replay", "as above; with `in_flight_updates`"),
    listed("seed", "[B]", "int64", _WRITER, _PAGES, "as above"),
    listed("ended", "[B]", "bool", _WRITER, _PAGES, "as above"),
    listed("prompt_ids", "[B, P]", "int32", _WRITER, _PAGES, "the prompt"),
    listed("reply_ids", "[B, R]", "int32", _WRITER, _PAGES, "`response_ids`"),
    listed("rollout_logprobs", "[B, R]", "float", _WRITER, _PAGES, "as above"),
    listed("logprobs", "[B, R]", "float", _WRITER, _PAGES, "as above; absent where the policy scores no rollout"),
    listed("entropy", "[B, R]", "float", _WRITER, _PAGES, "of the policy's distribution, nats; absent with `logprobs`"),
    listed("ref_logprobs", "[B, R]", "float", _WRITER, _PAGES, "as above; absent without a reference"),
    listed("teacher_logprobs", "[B, R]", "float", _WRITER, _PAGES, "as above; absent without a teacher"),
    listed("route_ids", "[B, T, L·K]", "uint8, uint16", _WRITER, _PAGES, "as above; with `routing: replay`"),
    listed("route_weights", "[B, T, L·K]", "float", _WRITER, _PAGES, "as above; with `routing: replay`"),
    listed("topk_ids", "[B, R, k]", "int32", _WRITER, _PAGES, "as above; where a loss reads them"),
    listed("topk_logprobs", "[B, R, k]", "float", _WRITER, _PAGES, "as above; where a loss reads them"),
    listed("kept_ids", "[B, R, …]", "int32", _WRITER, _PAGES, "as above, by place; with top-p, top-k or min-p"),
    listed("kept_mass", "[B, R]", "float", _WRITER, _PAGES, "as above; where the policy scores the rollout"),
    listed("turns", "[B]", "int32", _WRITER, _PAGES, "of episodes"),
    listed("info", "[B]", "string", _WRITER, _PAGES, "of episodes"),
    listed("seat", "[B]", "string", _WRITER, _PAGES, "of games of several"),
    listed("answers", "[B]", "string", _WRITER, "trust.replay", "of episodes; absent if tokens are hashed"),
    listed("response_mask", "[B, R]", "bool", _WRITER, _PAGES, "of episodes"),
    listed("turn_rewards", "[B, R]", "float", _WRITER, _PAGES, "of episodes"),
    listed("score/SOURCE", "[B]", "float", _WRITER, _PAGES, "NaN: failed; null: does not apply"),
    listed("failure/SOURCE", "[B]", "string", _WRITER, _PAGES, "reason of a failure; absent if tokens are hashed"),
    listed("gold", "[B]", "float", _WRITER, _PAGES, "gold score; null if the row was replaced"),
    listed("reward", "[B]", "float", _WRITER, _PAGES, "weighted sum of the scores; null: no reward"),
    listed("scaled_reward", "[B]", "float", _WRITER, _PAGES, "the reward after scaling"),
    listed("advantages", "[B, R]", "float", _WRITER, _PAGES, "as above; empty: the reply was dropped"),
    listed("weights", "[B, R]", "float", _WRITER, _PAGES, "as above; 0: the token is masked"),
    listed("times_trained", "[B]", "int32", _WRITER, _PAGES, "number of optimizer steps with the reply"),
)
"""One Parquet shard per iteration; replaced rows come last. If tokens are hashed, `C_hash`, a salted digest, replaces
each list column C, and `C_mean` is the mean of a column of numbers."""

TOTALS = (
    listed("tokens", "number", "float", "methods", "models.objectives", "response tokens that count"),
    listed("rows", "number", "float", "methods", "models.objectives", "replies, or pairs, of the step"),
    listed("kl_coef", "number", "float", "methods.ppo.update", _POLICY, "weight of a KL in the loss"),
    listed("baseline", "number", "float", "methods.kto.body", "methods.common.preference_objectives", "KTO's z"),
    listed("counts", "numbers", "float", "methods", "models.objectives", "other counts of the step, by name"),
)
"""`data.batch.StepTotals`: inputs of a step, over all its rows."""

STATISTICS = (
    listed("grad_norm", "number", "float", "engines.trainers", "training, methods.ppo.metrics", "before clipping"),
    listed(
        "refused_by",
        "number",
        "int",
        "cluster.whole_model",
        "methods.common.training.finite",
        "rank with a non-finite loss",
    ),
    listed(
        "computed_tokens", "number", "float", "cluster.learner", "training, methods.ppo.metrics", "shared prompts once"
    ),
    listed("nll", "number", "float", "models.objectives", "methods.sft.body", "sum over tokens"),
    listed("loss", "number", "float", "models", "training", "sum over rows or pairs"),
    listed("correct", "number", "float", "models", "training", "pairs in the right order; ties half"),
    listed(
        "margin",
        "number",
        "float",
        "methods.common.preference_objectives",
        "methods.dpo.body",
        "chosen minus rejected reward",
    ),
    listed(
        "chosen_logprobs",
        "number",
        "float",
        "methods.common.preference_objectives",
        "methods.dpo.body",
        "sum over pairs",
    ),
    listed(
        "rejected_logprobs",
        "number",
        "float",
        "methods.common.preference_objectives",
        "methods.dpo.body",
        "sum over pairs",
    ),
    listed(
        "desirable_rewards",
        "number",
        "float",
        "methods.common.preference_objectives",
        "methods.kto.body",
        "sum over rows",
    ),
    listed(
        "undesirable_rewards",
        "number",
        "float",
        "methods.common.preference_objectives",
        "methods.kto.body",
        "sum over rows",
    ),
    listed("policy_loss", "number", "float", _POLICY, "methods.ppo.metrics", "sum over tokens"),
    listed("teacher_divergence", "number", "float", _POLICY, "methods.ppo.metrics", "sum over tokens"),
    listed("entropy_sum", "number", "float", _POLICY, "methods.ppo.metrics", "sum over tokens"),
    listed("clip_count", "number", "float", _POLICY, "methods.ppo.metrics", "tokens whose ratio was clipped"),
    listed("dual_clip_count", "number", "float", _POLICY, "methods.ppo.metrics", "tokens that `dual_clip` clipped"),
    listed(
        "approx_kl_sum",
        "number",
        "float",
        "methods.ppo.objectives",
        "methods.ppo.update",
        "KL to the policy before the update, by k3",
    ),
    *(
        listed(f"router_{name}", "number", "float", "models.objectives", "methods.common.training.steps", meaning)
        for name, meaning in (
            ("tokens", "of a mixture of experts: tokens of which these are sums"),
            ("max_load", "largest load of an expert over the mean one, of a micro-batch, mean over layers"),
            ("entropy", "entropy of the loads over that of even ones"),
            ("idle", "share of experts that no token took"),
        )
    ),
    listed("value_loss", "number", "float", _CRITIC, "methods.ppo.metrics", "sum over tokens"),
    listed(
        "value_clip_count",
        "number",
        "float",
        "methods.ppo.objectives, critic",
        "methods.ppo.metrics",
        "tokens whose value was clipped",
    ),
)
"""`methods.common.training.steps.StepStatistics`: outputs of a step, over all its rows."""


def _own(kind: type[ColumnBatch[Any]]) -> tuple[Column, ...]:
    return tuple(column for column in vars(kind).values() if isinstance(column, Column))


def _about(kind: type[ColumnBatch[Any]]) -> str:
    [base] = kind.__bases__
    also = "" if base is ColumnBatch else f" It has the columns of `{base.__name__}` too."
    return " ".join((kind.__doc__ or "").split()) + also


GROUPS = {kind.__name__: _own(kind) for kind in KINDS} | {
    "Ledger": LEDGER,
    "Totals of a step": TOTALS,
    "Statistics of a step": STATISTICS,
}
"""Group → its columns."""
ABOUT = {kind.__name__: _about(kind) for kind in KINDS}
"""Kind of batch → what it is."""

"""Every column that travels between rollout, scoring, experience, objectives and ledger, and every number of an
optimizer step.

    B  rows         P  tokens of a prompt     R  tokens of a reply     T  tokens of a row, P and R together
    H  size of a hidden state

A column of shape [B] is an array. All others are `Ragged`: their rows have different lengths and are never padded. An
objective receives the tokens of a micro-batch as one flat axis: [B, R] as [R of all rows].

Code uses the names as literals and no computation imports this module, so its edits recompute nothing. A test compares
it with the code and with the columns of a small loop.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column, or one number of a step."""

    name: str
    shape: str
    dtype: str
    """A numpy type; in a ledger an Arrow type."""
    writer: str
    """Module of xray_runtime that writes it."""
    readers: str
    meaning: str


_BATCHES, _LOOP = "data.rows, data.tokens", "rl.rollouts"
_POLICY, _CRITIC = "models.ppo_objectives", "models.ppo_objectives, critic"
_OBJECTIVES = "models.objectives"

TEXT = (
    Column("input_ids", "[B, T]", "int64", _BATCHES, "every model", "prompt and reply; for pairs the chosen one"),
    Column("prompt_lengths", "[B]", "int64", _BATCHES, _OBJECTIVES, "tokens of the prompt"),
    Column("rejected_ids", "[B, T]", "int64", "data.tokens", _OBJECTIVES, "the same prompt with the rejected reply"),
    Column("lengths", "[B]", "int64", "workers.learner", _OBJECTIVES, "tokens per row, if rows are flat"),
    Column("rejected_lengths", "[B]", "int64", "workers.learner", _OBJECTIVES, "of `rejected_ids`"),
    Column("alike", "[B']", "int64", "workers.learner", _OBJECTIVES, "the first sequence with the same prompt"),
    Column("id", "[B]", "int64", "rl.scoring", "workers.learner, rl.ledger_writer", "a row's own number"),
    Column("response_mask", "[B, R]", "bool", "rl.episode, data.conversations", _OBJECTIVES, "tokens that count"),
    Column("added_ends", "[B]", "bool", "rl.scoring", _POLICY, "the last token was added for reward models alone"),
    Column("trunk", "[B, T, H]", "float32 or uint16", "workers.learner", _OBJECTIVES, "output of the frozen layers"),
    Column("rejected_trunk", "[B, T, H]", "float32 or uint16", "training.trunk_states", _OBJECTIVES, "of the rejected"),
)
"""Inputs of a model. bfloat16 is sent as its bits, in uint16."""

ROLLOUT = (
    Column("seed", "[B]", "int64", _LOOP, "engines.generation", "seed of a reply or an environment"),
    Column("response_ids", "[B, R]", "int64", "engines.generation", "rl.scoring", "the reply"),
    Column("rollout_logprobs", "[B, R]", "float32", "engines.generation", "rl.experience, models", "by the generator"),
    Column("ended", "[B]", "bool", "engines.generation", "rl.experience", "False: cut off"),
    Column("version", "[B]", "int64", _LOOP, "rl.metrics, rl.ledger_writer", "updates of its policy, the oldest"),
    Column("prompt", "[B]", "int64", _LOOP, "rl.scoring, rl.ledger_writer", "index of the stage's prompt"),
    Column("prompt_ids", "[B, P]", "int64", "rl.episode", "rl.scoring", "the environment's first prompt"),
    Column("turn_rewards", "[B, R]", "float32", "rl.episode", "rl.experience", "reward of a turn, on its last token"),
    Column("turns", "[B]", "int32", "rl.episode", "rl.metrics", "number of the policy's turns"),
    Column("episode_reward", "[B]", "float64", "rl.episode", "rl.reward_sources", "sum of rewards; NaN: failed"),
    Column("failure", "[B]", "str", "rl.episode", "rl.reward_sources", "reason of the failure, or empty"),
    Column("info", "[B]", "str", "rl.episode", "rl.metrics", "JSON: other values of the environment"),
    Column("answers", "[B]", "str", "rl.episode", "lineage.replay", "JSON: the environment's answers"),
    Column("branches", "[B, …]", "int64", "rl.agent_records", "rl.agent_rows", "branches of an agent's episode"),
    Column("ran_again", "[B]", "int32", "rl.agent_records", "rl.metrics", "how often infrastructure failed an agent"),
)
"""`rl.types.Rollout`. The columns from `prompt_ids` on, and `response_mask`, exist only for episodes."""

SCORES = (
    Column("logprobs", "[B, R]", "float32", _POLICY, "rl.experience", "by the policy before the update"),
    Column("ref_logprobs", "[B, R]", "float32", _OBJECTIVES, "rl.experience", "by the reference"),
    Column("values", "[B, R]", "float32", _CRITIC, "rl.experience", "of the state before each token"),
    Column("final_values", "[B]", "float32", _CRITIC, "rl.experience", "of the state after the last token"),
    Column("scores", "[B]", "float32", "models.reward_objective", "rl.reward_sources", "of a reward model"),
    Column("nll", "[B]", "float32", _OBJECTIVES, "training.sft", "−log-probability of the counted tokens"),
    Column("loglikelihood", "[B]", "float32", "models.likelihood_objective", "evaluation", "of the whole reply"),
    Column("greedy", "[B]", "float32", "models.likelihood_objective", "evaluation", "1: every token is the likeliest"),
)
"""Outputs of a model. A reward model that is a branch of the policy writes a column named after its role."""

EXPERIENCE = (
    Column("old_logprobs", "[B, R]", "float32", "rl.experience", _POLICY, "where the ratio is 1; or the step's own"),
    Column("advantages", "[B, R]", "float32", "rl.experience", _POLICY, "0 at tokens that do not count"),
    Column("weights", "[B, R]", "float32", "rl.experience", _POLICY, "old policy over generator; or the step's"),
    Column("returns", "[B, R]", "float32", "rl.experience", _CRITIC, "targets of the values"),
)
"""`rl.types.UpdateRows`: these, and the text, `rollout_logprobs`, `values`, `ref_logprobs` and `response_mask`."""

LABELLED = (
    Column("logprobs", "[B]", "float32", "models.preference_objectives", "training.dpo, training.kto", "of a reply"),
    Column("ref_chosen", "[B]", "float32", "training.dpo", "models.preference_objectives", "by the reference"),
    Column("ref_rejected", "[B]", "float32", "training.dpo", "models.preference_objectives", "by the reference"),
    Column("ref_logprobs", "[B]", "float32", "training.kto", "models.preference_objectives", "by the reference"),
    Column("desirable", "[B]", "bool", "training.kto", "models.preference_objectives", "the label"),
)
"""Whole replies, for DPO and KTO."""

_WRITER, _PAGES = "rl.ledger_writer", "data.ledger"
LEDGER = (
    Column("iteration", "[B]", "int32", _WRITER, _PAGES, "from 0"),
    Column("row", "[B]", "int32", _WRITER, _PAGES, "`id` above"),
    Column("round", "[B]", "int32", _WRITER, _PAGES, "0: the first rollout; r: round r of `resample_rounds`"),
    Column("prompt", "[B]", "int64", _WRITER, _PAGES, "first row of the training pairs with this prompt"),
    Column("version", "[B]", "int32", _WRITER, _PAGES, "as above"),
    Column("seed", "[B]", "int64", _WRITER, _PAGES, "as above"),
    Column("ended", "[B]", "bool", _WRITER, _PAGES, "as above"),
    Column("prompt_ids", "[B, P]", "int32", _WRITER, _PAGES, "the prompt"),
    Column("reply_ids", "[B, R]", "int32", _WRITER, _PAGES, "`response_ids`"),
    Column("rollout_logprobs", "[B, R]", "float", _WRITER, _PAGES, "as above"),
    Column("logprobs", "[B, R]", "float", _WRITER, _PAGES, "as above"),
    Column("ref_logprobs", "[B, R]", "float", _WRITER, _PAGES, "as above"),
    Column("turns", "[B]", "int32", _WRITER, _PAGES, "of episodes"),
    Column("info", "[B]", "string", _WRITER, _PAGES, "of episodes"),
    Column("answers", "[B]", "string", _WRITER, "lineage.replay", "of episodes; absent if tokens are hashed"),
    Column("response_mask", "[B, R]", "bool", _WRITER, _PAGES, "of episodes"),
    Column("turn_rewards", "[B, R]", "float", _WRITER, _PAGES, "of episodes"),
    Column("score/SOURCE", "[B]", "float", _WRITER, _PAGES, "NaN: failed; null: does not apply"),
    Column("failure/SOURCE", "[B]", "string", _WRITER, _PAGES, "reason of a failure; absent if tokens are hashed"),
    Column("gold", "[B]", "float", _WRITER, _PAGES, "gold score; null if the row was replaced"),
    Column("reward", "[B]", "float", _WRITER, _PAGES, "weighted sum of the scores; null: no reward"),
    Column("scaled_reward", "[B]", "float", _WRITER, _PAGES, "the reward after scaling"),
    Column("advantages", "[B, R]", "float", _WRITER, _PAGES, "as above; empty: the reply was dropped"),
    Column("weights", "[B, R]", "float", _WRITER, _PAGES, "as above; 0: the token is masked"),
    Column("times_trained", "[B]", "int32", _WRITER, _PAGES, "number of optimizer steps with the reply"),
)
"""One Parquet shard per iteration; replaced rows come last. If tokens are hashed, `C_hash`, a salted digest, replaces
each list column C, and `C_mean` is the mean of a column of numbers."""

TOTALS = (
    Column("tokens", "number", "float", "training, rl.update", _OBJECTIVES, "response tokens that count"),
    Column("rows", "number", "float", "training, rl.update", _OBJECTIVES, "rows of the step"),
    Column("pairs", "number", "float", "training.dpo", "models.preference_objectives", "pairs of the step"),
    Column("kl_coef", "number", "float", "rl.update", _POLICY, "weight of a KL in the loss"),
    Column("baseline", "number", "float", "training.kto", "models.preference_objectives", "KTO's z"),
)
"""`training.steps.StepTotals`: inputs of a step, over all its rows."""

STATISTICS = (
    Column("grad_norm", "number", "float", "engines.training", "training, rl.metrics", "before clipping"),
    Column("refused_by", "number", "int", "workers.whole_model", "training.finite", "rank with a non-finite loss"),
    Column("computed_tokens", "number", "float", "workers.learner", "training, rl.metrics", "shared prompts once"),
    Column("nll", "number", "float", _OBJECTIVES, "training.sft", "sum over tokens"),
    Column("loss", "number", "float", "models", "training", "sum over rows or pairs"),
    Column("correct", "number", "float", "models", "training", "pairs in the right order; ties half"),
    Column("margin", "number", "float", "models.preference_objectives", "training.dpo", "chosen minus rejected reward"),
    Column("chosen_logprobs", "number", "float", "models.preference_objectives", "training.dpo", "sum over pairs"),
    Column("rejected_logprobs", "number", "float", "models.preference_objectives", "training.dpo", "sum over pairs"),
    Column("desirable_rewards", "number", "float", "models.preference_objectives", "training.kto", "sum over rows"),
    Column("undesirable_rewards", "number", "float", "models.preference_objectives", "training.kto", "sum over rows"),
    Column("policy_loss", "number", "float", _POLICY, "rl.metrics", "sum over tokens"),
    Column("entropy_sum", "number", "float", _POLICY, "rl.metrics", "sum over tokens"),
    Column("clip_count", "number", "float", _POLICY, "rl.metrics", "tokens whose ratio was clipped"),
    Column("dual_clip_count", "number", "float", _POLICY, "rl.metrics", "tokens that `dual_clip` clipped"),
    Column("approx_kl_sum", "number", "float", _POLICY, "rl.update", "KL to the policy before the update, by k3"),
    Column("value_loss", "number", "float", _CRITIC, "rl.metrics", "sum over tokens"),
    Column("value_clip_count", "number", "float", _CRITIC, "rl.metrics", "tokens whose value was clipped"),
)
"""`training.steps.StepStatistics`: outputs of a step, over all its rows."""

GROUPS = {
    "Text": TEXT,
    "Rollout": ROLLOUT,
    "Scores": SCORES,
    "Experience": EXPERIENCE,
    "Labelled replies": LABELLED,
    "Ledger": LEDGER,
    "Totals of a step": TOTALS,
    "Statistics of a step": STATISTICS,
}
"""Group → its columns."""

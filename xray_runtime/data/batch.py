"""Batches: B rows in columns, from the sampled reply to the micro-batch, and the one list of all columns.

    B  rows         P  tokens of a prompt     R  tokens of a reply     T  tokens of a row, P and R together
    H  size of a hidden state                     L  layers with experts       K  experts of a token in a layer
    k  likeliest tokens in a place

A column of shape [B] is an array. All others are `Ragged`: their rows have different lengths and are never padded. An
objective gets the same batch with tensors in place of arrays, where the values of a ragged column are one flat axis.

A new column is one field here. Splitting, joining, sharding, sending and storing follow from the fields; only its
writer and its reader have to know it. A column that a batch lacks raises an AttributeError as it is read;
`name in batch` tells whether it is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from xray_runtime.data.columnar import ColumnBatch, column
from xray_runtime.data.ragged import A, Ragged, first_alike

_BATCHES, _LOOP, _EPISODE, _EXPERIENCE = "data.batch, data.tokens", "ppo.rollouts", "sampling.episode", "ppo.experience"
_POLICY, _CRITIC = "models.ppo_objectives", "models.ppo_objectives, critic"
_OBJECTIVES, _PAIRS = "models.objectives", "models.preference_objectives"

# Columns of two kinds of batch.
_SEED = column("[B]", "int64", _LOOP, "engines.generation", "seed of a reply or an environment")
_ROLLOUT_LOGPROBS = column(
    "[B, R]", "float32", "engines.generation", "ppo.experience, models", "by the generator, at its temperature"
)
_RESPONSE_MASK = column(
    "[B, R]",
    "bool",
    "sampling.episode, data.conversations",
    _OBJECTIVES,
    "True: counted; what an episode's policy sampled",
)
_BRANCHES = column(
    "[B, …]", "int64", "agents.agent_records", "sampling.agent_rows", "of an agent's episode", wire=False
)
_ROUTE_IDS = column(
    "[B, T, L, K]", "uint8, uint16", "engines.generation", f"{_OBJECTIVES}, ppo.ledger_writer", "see `data.routes`"
)
_TOPK_IDS = column(
    "[B, R, k]", "int32", "engines.generation", f"{_POLICY}, ppo.ledger_writer", "the sampler's likeliest; −1: no more"
)
_TOPK_LOGPROBS = column(
    "[B, R, k]", "float32", "engines.generation", f"{_POLICY}, ppo.ledger_writer", "of these tokens, by the generator"
)
_KEPT_COUNTS = column(
    "[B, R]", "int32", "engines.generation", f"{_OBJECTIVES}, ppo.ledger_writer", "tokens that top-p, … left to sample"
)
_KEPT_IDS = column(
    "[B, …]",
    "int32",
    "engines.generation",
    f"{_OBJECTIVES}, ppo.ledger_writer",
    "those of all places in turn",
)
_REF_LOGPROBS = column("[B, R]", "float32", _OBJECTIVES, "ppo.experience, models", "by the reference")
_TEACHER_LOGPROBS = column("[B, R]", "float32", "models.teacher_objective", "ppo.experience, models", "by a teacher")
_TEACHER_TOPK_IDS = column("[B, R, k]", "int32", "models.teacher_objective", "models", "the teacher's likeliest tokens")
_TEACHER_TOPK_LOGPROBS = column("[B, R, k]", "float32", "models.teacher_objective", "models", "of these, by it")
_VALUES = column("[B, R]", "float32", _CRITIC, "ppo.experience", "of the state before each token")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PromptBatch(ColumnBatch[A]):
    """Input of a generator."""

    input_ids: Ragged[A] = column("[B, P]", "int64", _LOOP, "engines.generation", "the prompt", required=True)
    seed: A = _SEED


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TextBatch(ColumnBatch[A]):
    """Input of a model: prompts and replies together."""

    input_ids: Ragged[A] = column("[B, T]", "int64", _BATCHES, "every model", "prompt and reply", required=True)
    prompt_lengths: A = column("[B]", "int64", _BATCHES, _OBJECTIVES, "tokens of the prompt")
    id: A = column("[B]", "int64", "sampling.scoring", "cluster.learner, ppo.ledger_writer", "a row's own number")
    response_mask: Ragged[A] = _RESPONSE_MASK
    route_ids: Ragged[A] = _ROUTE_IDS
    """Only of rows for a policy that replays them."""
    kept_counts: Ragged[A] = _KEPT_COUNTS
    """Only where sampling was from a part of the vocabulary; so is `kept_ids`."""
    kept_ids: Ragged[A] = _KEPT_IDS
    added_ends: A = column(
        "[B]", "bool", "sampling.scoring", _POLICY, "the last token was added for reward models alone"
    )
    trunk: Ragged[A] = column(
        "[B, T, H]", "float", "cluster.learner", _OBJECTIVES, "the frozen layers' output", wire=False
    )
    alike: A = column(
        "[B']", "int64", "cluster.learner", _OBJECTIVES, "the first sequence with the same prompt", wire=False
    )

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int] | np.ndarray], replies: Sequence[Sequence[int] | np.ndarray] | Ragged
    ) -> TextBatch:
        """Each prompt with its reply."""
        ids = Ragged.of([*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True))
        return TextBatch(input_ids=ids, prompt_lengths=np.array([len(p) for p in prompts], dtype=np.int64))

    def sides(self) -> list[Ragged[A]]:
        """The columns of token ids: one, or of pairs two."""
        return [self.input_ids]

    def row_keys(self: TextBatch) -> list[bytes]:
        """The tokens of each row, prompt and reply separate, as a key."""
        both = zip(self.input_ids, self.prompt_lengths, strict=True)
        return [np.append(ids, length).astype(np.int64).tobytes() for ids, length in both]

    def alike_prompts(self: TextBatch) -> np.ndarray:
        """For each sequence, the first one with the same prompt, and the same experts for it: of rows [B], of pairs all
        chosen ones and then all rejected ones [2B]."""
        lengths = self.prompt_lengths
        prompts = (ids for side in self.sides() for ids in side.heads(np.minimum(lengths, side.lengths)))
        if "route_ids" not in self:
            return first_alike(prompt.tobytes() for prompt in prompts)
        both = zip(prompts, self.route_ids.heads(lengths), strict=True)
        return first_alike((prompt.tobytes(), routes.tobytes()) for prompt, routes in both)

    def first_with_prompt(self: TextBatch) -> np.ndarray:
        return self.alike_prompts()[: len(self)] if "prompt_lengths" in self else np.arange(len(self))

    def num_tokens(self) -> int:
        """Tokens of all sides."""
        return sum(len(side.values) for side in self.sides())

    def num_response_tokens(self: TextBatch) -> int:
        """The number of response tokens; with a `response_mask`, of those where it is True."""
        if "response_mask" in self:
            return int(self.response_mask.values.sum())
        return int(len(self.input_ids.values) - self.prompt_lengths.sum())


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PairBatch(TextBatch[A]):
    """Pairs: `input_ids` have the chosen reply."""

    rejected_ids: Ragged[A] = column(
        "[B, T]", "int64", "data.tokens", _OBJECTIVES, "the same prompt with the rejected reply", required=True
    )
    ref_chosen: A = column("[B]", "float32", "training.dpo", _PAIRS, "log-probability of the reply by the reference")
    ref_rejected: A = column("[B]", "float32", "training.dpo", _PAIRS, "of the rejected reply")

    def sides(self) -> list[Ragged[A]]:
        return [self.input_ids, self.rejected_ids]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LabelledBatch(TextBatch[A]):
    """Single replies with a label (KTO)."""

    ref_reply_logprobs: A = column("[B]", "float32", "training.kto", _PAIRS, "of the reply by the reference")
    desirable: A = column("[B]", "bool", "training.kto", _PAIRS, "the label")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TaughtBatch(TextBatch[A]):
    """Replies with a teacher's distributions (`distill_replies`)."""

    teacher_topk_ids: Ragged[A] = _TEACHER_TOPK_IDS
    teacher_topk_logprobs: Ragged[A] = _TEACHER_TOPK_LOGPROBS


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PolicyBatch(TextBatch[A]):
    """Input of the update: the replies that have a reward."""

    old_logprobs: Ragged[A] = column("[B, R]", "float32", _EXPERIENCE, _POLICY, "where the ratio is 1")
    """Absent where nothing reads it; then `rollout_logprobs` is there. What follows is there where a loss reads it."""
    rollout_logprobs: Ragged[A] = _ROLLOUT_LOGPROBS
    topk_ids: Ragged[A] = _TOPK_IDS
    topk_logprobs: Ragged[A] = _TOPK_LOGPROBS
    turns: Ragged[A] = column("[B, R]", "int64", _EXPERIENCE, _POLICY, "which stretch of the policy's own tokens")
    chosen: Ragged[A] = column("[B, R]", "bool", _EXPERIENCE, _POLICY, "what its method chose over the rollout")
    versions: Ragged[A] = column("[B, R]", "int64", _EXPERIENCE, _POLICY, "updates of the policy that sampled it")
    group: A = column("[B]", "int64", _EXPERIENCE, _POLICY, "which of the rollout's prompts")
    advantages: Ragged[A] = column("[B, R]", "float32", _EXPERIENCE, _POLICY, "0 at tokens that do not count")
    weights: Ragged[A] = column("[B, R]", "float32", _EXPERIENCE, _POLICY, "old policy over generator")
    values: Ragged[A] = _VALUES
    """Absent without a critic; so is `returns`."""
    returns: Ragged[A] = column("[B, R]", "float32", _EXPERIENCE, _CRITIC, "targets of the values")
    ref_logprobs: Ragged[A] = _REF_LOGPROBS
    """Only if the KL is in the loss, or the loss reads it."""
    teacher_logprobs: Ragged[A] = _TEACHER_LOGPROBS
    """Only if the loss reads it."""
    teacher_topk_ids: Ragged[A] = _TEACHER_TOPK_IDS
    """With `distillation.beta`; so is `teacher_topk_logprobs`."""
    teacher_topk_logprobs: Ragged[A] = _TEACHER_TOPK_LOGPROBS
    branches: Ragged[A] = _BRANCHES


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ReplyBatch(ColumnBatch[A]):
    """Answer of a generator."""

    response_ids: Ragged[A] = column(
        "[B, R]", "int64", "engines.generation", "sampling.scoring", "the reply", required=True
    )
    rollout_logprobs: Ragged[A] = _ROLLOUT_LOGPROBS
    ended: A = column("[B]", "bool", "engines.generation", "ppo.experience", "False: cut off")
    route_ids: Ragged[A] = _ROUTE_IDS
    """With `Sampling.routes`; so is `route_weights`."""
    route_weights: Ragged[A] = column(
        "[B, T, L, K]", "float32", "engines.generation", "ppo.ledger_writer", "of these experts, by the generator"
    )
    topk_ids: Ragged[A] = _TOPK_IDS
    """With `Sampling.top_logprobs`; so is `topk_logprobs`."""
    topk_logprobs: Ragged[A] = _TOPK_LOGPROBS
    kept_counts: Ragged[A] = _KEPT_COUNTS
    """With `Sampling.kept`; so is `kept_ids`."""
    kept_ids: Ragged[A] = _KEPT_IDS


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Rollout(ReplyBatch[A]):
    """Sampled replies; those to one prompt follow one another. Columns from `prompt_ids` on are those of episodes."""

    seed: A = _SEED
    version: A = column("[B]", "int64", _LOOP, "ppo.metrics, ppo.ledger_writer", "updates of its policy, the oldest")
    token_versions: Ragged[A] = column(
        "[B, R]",
        "int32",
        "sampling.journaled_turns",
        "ppo.ledger_writer",
        "`version` of each token",
    )
    """Only with `in_flight_updates`; so is `group`."""
    group: A = column("[B]", "int64", "ppo.in_flight", "ppo.ledger_writer", "number of its group, as they began")
    prompt: A = column("[B]", "int64", _LOOP, "sampling.scoring, ppo.ledger_writer", "index of the stage's prompt")
    drawn: A = column("[B]", "str", _LOOP, "ppo.ledger_writer", "why a curriculum drew the prompt")
    prompt_ids: Ragged[A] = column("[B, P]", "int64", _EPISODE, "sampling.scoring", "the environment's first prompt")
    response_mask: Ragged[A] = _RESPONSE_MASK
    turn_rewards: Ragged[A] = column("[B, R]", "float32", _EPISODE, _EXPERIENCE, "of a turn, on its last token")
    turns: A = column("[B]", "int32", _EPISODE, "ppo.metrics", "number of the policy's turns")
    episode_reward: A = column("[B]", "float64", _EPISODE, "rewards.reward_sources", "sum of rewards; NaN: failed")
    failure: A = column("[B]", "str", _EPISODE, "rewards.reward_sources", "reason of the failure, or empty")
    info: A = column("[B]", "str", _EPISODE, "ppo.metrics", "JSON: the environment's numbers, summed over the turns")
    seat: A = column("[B]", "str", _EPISODE, "ppo.experience, ppo.metrics", "of a game of several")
    answers: A = column("[B]", "str", _EPISODE, "trust.replay", "JSON: the environment's answers, an agent's record")
    branches: Ragged[A] = _BRANCHES
    ran_again: A = column(
        "[B]", "int32", "agents.agent_records", "ppo.metrics", "how often infrastructure failed an agent"
    )
    """Not in the ledger, whose bytes no failed process changes."""

    @property
    def are_episodes(self) -> bool:
        return "prompt_ids" in self

    def own_tokens(self: Rollout) -> Ragged:
        """The tokens that the policy sampled."""
        if not self.are_episodes:
            return self.response_ids
        return Ragged.of(row[chosen] for row, chosen in zip(self.response_ids, self.response_mask, strict=True))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Scores(ColumnBatch[A]):
    """Output of a model. A reward model that is a branch of the policy has a column under its role in `others`."""

    logprobs: Ragged[A] = column("[B, R]", "float32", _POLICY, _EXPERIENCE, "by the policy before the update")
    entropy: Ragged[A] = column("[B, R]", "float32", _POLICY, "ppo.ledger_writer", "of the same policy, nats")
    own_route_logprobs: Ragged[A] = column("[B, R]", "float32", _POLICY, _EXPERIENCE, "the same, with its own routes")
    """Only where `logprobs` are of replayed ones."""
    kept_mass: Ragged[A] = column(
        "[B, R]", "float32", _POLICY, f"{_EXPERIENCE}, ppo.ledger_writer", "the policy's probability of the kept set"
    )
    """Only where sets are kept, of which all log-probabilities then are."""
    ref_logprobs: Ragged[A] = _REF_LOGPROBS
    teacher_logprobs: Ragged[A] = _TEACHER_LOGPROBS
    teacher_reads: A = column("[B]", "bool", "ppo.teachers", _EXPERIENCE, "False: it reads other text than the reply")
    """Only where a teacher has another vocabulary."""
    teacher_topk_ids: Ragged[A] = _TEACHER_TOPK_IDS
    teacher_topk_logprobs: Ragged[A] = _TEACHER_TOPK_LOGPROBS
    values: Ragged[A] = _VALUES
    """Absent without a critic; so is `final_values`."""
    final_values: A = column("[B]", "float32", _CRITIC, _EXPERIENCE, "of the state after the last token")
    scores: A = column("[B]", "float32", "models.reward_objective", "rewards.reward_models", "of a reward model")
    reply_logprobs: A = column("[B]", "float32", _PAIRS, "training.dpo, training.kto", "of a whole reply")
    nll: A = column("[B]", "float32", _OBJECTIVES, "training.sft", "−log-probability of the counted tokens")
    teacher_divergence: A = column("[B]", "float32", "distill_replies", "distill_replies", "from a teacher's, a reply")
    loglikelihood: A = column("[B]", "float32", "models.likelihood_objective", "evaluation", "of the whole reply")
    greedy: A = column("[B]", "float32", "models.likelihood_objective", "evaluation", "1: all tokens are the likeliest")

    def by_role(self: Scores, role: str) -> np.ndarray:
        """The scores [B] of a branch."""
        scores = self.others[role]
        assert isinstance(scores, np.ndarray)
        return scores


REPLAYED = ("route_ids", "kept_counts", "kept_ids")
"""Columns of a rollout that say how its tokens were sampled; the policy's passes follow them."""
OF_KEPT_SETS = ("kept_counts", "kept_ids")
"""Those of them that the reference follows, too."""
KINDS = (PromptBatch, TextBatch, PairBatch, LabelledBatch, TaughtBatch, PolicyBatch, ReplyBatch, Rollout, Scores)


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over all micro-batches and ranks of an optimizer step, and values that all of them share.

    A loss divided by a missing count is NaN, and engines skip such a step.
    """

    tokens: float = math.nan
    """Number of response tokens that count."""
    rows: float = math.nan
    """Number of replies, or of pairs."""
    kl_coef: float = 0.0
    """Weight of the KL in the loss."""
    baseline: float = 0.0
    """KTO's z."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Name → another count, for components that name it."""

    def count(self, name: str) -> float:
        """`tokens`, `rows`, or one of `counts`."""
        known = {"tokens": self.tokens, "rows": self.rows}
        return known[name] if name in known else self.counts.get(name, math.nan)

    @staticmethod
    def of(
        rows: TextBatch, *, kl_coef: float = 0.0, baseline: float = 0.0, counts: Mapping[str, float] | None = None
    ) -> StepTotals:
        """Those of a step over `rows`."""
        tokens = float(rows.num_response_tokens()) if "prompt_lengths" in rows else math.nan
        given = {"tokens": tokens, "rows": float(len(rows)), "kl_coef": kl_coef, "baseline": baseline}
        return StepTotals(**given, counts=counts or {})


def with_end_of_turn(reply: Sequence[int] | np.ndarray, stops: Sequence[int]) -> list[int]:
    """`reply`, with the first stop token (the end of turn) added if it ends with none, as in the reward model's
    data."""
    ids = list(reply)
    return ids if ids and ids[-1] in stops else [*ids, stops[0]]

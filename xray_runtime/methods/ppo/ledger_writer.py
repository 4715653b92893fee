"""The rollout ledger of a PPO stage: sampled replies, their scores, and how they were trained on.

Each iteration writes a shard into the checkpoint under construction. Snapshots include all earlier shards; a resumed
attempt restores those and writes the later ones again with the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from xray_runtime.algorithms.rewards import SourceScores, weighted_sum
from xray_runtime.data.ledger import (
    ANSWERS,
    FAILURE,
    GOLD,
    KEPT,
    NESTED,
    NUMBERS,
    ROUTES,
    SCORE,
    TOKENS,
    TOP,
    LedgerShard,
    iterations,
    lists,
    lists_of_lists,
    lists_of_sets,
    read_shard,
    readable,
    shard_path,
    table_of,
)
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.files import link_or_copy
from xray_runtime.kernel.graph.artifacts import SHOWN_ROLLOUTS
from xray_runtime.kernel.store.manifest import LEDGER, MANIFEST

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.batch import Rollout, Scores
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.common.sampling.scoring import ScoredRollout
    from xray_runtime.methods.common.training.prompts import UniquePrompts
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.experience import Experience
    from xray_runtime.methods.ppo.kind import PPOInputs
    from xray_runtime.rewards.reward_sources import RewardSources

HASH_DIGITS = 32


class Ledger:
    """Writes the ledger of one stage into its checkpoint `out`."""

    def __init__(
        self, stage: Stage[PPOConfig, PPOInputs], out: Path, prompts: UniquePrompts, rewards: RewardSources
    ) -> None:
        self._config, self._directory = stage.config, out / LEDGER
        self._prompts, self._rewards = prompts, rewards
        self._salt: bytes | None = None
        if self._config.ledger.tokens == "hashed":
            # The salt comes from data and stage, so hashes cannot be looked up in a table made for others. With the
            # data, one can still test a guess at a reply.
            name = f"{stage.seed}\x1f{stage.name}\x1f".encode()
            self._salt = hashlib.sha256(name + (stage.inputs.prompts.path / MANIFEST).read_bytes()).digest()

    def write(
        self,
        iteration: int,
        scored: ScoredRollout,
        scaled: torch.Tensor,
        experience: Experience,
        times_trained: np.ndarray,
        policy: str | None,
        golds: Sequence[float] | None,
        dropped: Sequence[int] = (),
    ) -> None:
        """Write an iteration's rollouts, as configured.

        Args:
            scaled: reward of each reply [B]; NaN: it has none and is not in `experience`.
            times_trained: number of optimizer steps on each row of `experience`.
            policy: `LedgerShard.policy`.
            golds: gold score of each reply [B]; None without `gold`.
            dropped: `LedgerShard.dropped`.
        """
        keep = self._config.ledger.keep
        if keep == "none":
            return
        rewarded = np.flatnonzero(~scaled.isnan().numpy())
        assert len(rewarded) == experience.num_rows
        trained = np.zeros(len(scaled), np.int32)
        trained[rewarded] = times_trained
        columns = {"advantages": experience.rows.advantages, "weights": experience.rows.weights}
        token_columns = {name: column.spread(rewarded, len(scaled)) for name, column in columns.items()}
        tables = [self._table(iteration, scored, scaled, token_columns, trained, golds)]
        for replaced in scored.dropped:
            count = len(replaced.replies)
            nothing = Ragged.of(([] for _ in range(count)), np.float32)
            empty = dict.fromkeys(token_columns, nothing)
            unscaled, untrained = torch.full((count,), torch.nan), np.zeros(count, np.int32)
            ungraded = None if golds is None else [None] * count
            tables.append(self._table(iteration, replaced, unscaled, empty, untrained, ungraded))
        table = pa.concat_tables(tables).combine_chunks()
        table = self._hashed(table) if self._salt is not None else table
        LedgerShard(iteration, policy, table, tuple(dropped)).write(self._directory)
        if isinstance(keep, int):
            shard_path(self._directory, iteration - keep).unlink(missing_ok=True)

    def _table(
        self,
        iteration: int,
        scored: ScoredRollout,
        scaled: torch.Tensor,
        token_columns: dict[str, Ragged],
        times_trained: np.ndarray,
        golds: Sequence[float | None] | None,
    ) -> pa.Table:
        text, rollout, ids = scored.text, scored.rollout, scored.text.id
        count = len(ids)
        return table_of(
            {
                "iteration": np.full(count, iteration, np.int32),
                "row": ids.astype(np.int32),
                "round": (ids // self._config.rollout_size).astype(np.int32),
                "prompt": self._prompts.rows[rollout.prompt].astype(np.int64),
                **({"drawn": rollout.drawn} if "drawn" in rollout else {}),
                "version": rollout.version.astype(np.int32),
                "seed": rollout.seed.astype(np.int64),
                "ended": rollout.ended,
                "prompt_ids": lists(text.input_ids.heads(text.prompt_lengths), pa.int32()),
                "reply_ids": lists(rollout.response_ids, pa.int32()),
                "rollout_logprobs": lists(rollout.rollout_logprobs, pa.float32()),
                **_token_scores(scored.scores),
                **_turns(rollout),
                **_versions(rollout),
                **_nested(rollout),
                **_scores(scored.sources),
                **({} if golds is None else {GOLD: pa.array(golds, pa.float32())}),
                "reward": _or_null(weighted_sum(scored.sources, self._rewards.weights)),
                "scaled_reward": _or_null(scaled),
                **{name: lists(column, pa.float32()) for name, column in token_columns.items()},
                "times_trained": times_trained,
            }
        )

    def _hashed(self, table: pa.Table) -> pa.Table:
        """The table without lists: with the policy, log-probabilities would reveal the tokens."""
        columns: dict[str, Any] = {}
        for name in table.column_names:
            # A reason may quote a reply.
            if name == ANSWERS or name.startswith(FAILURE):
                continue
            if name not in (*TOKENS, *NUMBERS, *NESTED):
                columns[name] = table[name].combine_chunks()
                continue
            rows = [np.asarray(row.values.flatten() if name in NESTED else row.values) for row in table[name]]
            stem = name.removesuffix("_ids")
            digests = (hashlib.sha256((self._salt or b"") + name.encode() + row.tobytes()) for row in rows)
            columns[f"{stem}_hash"] = pa.array([digest.hexdigest()[:HASH_DIGITS] for digest in digests])
            if name in NUMBERS:
                columns[f"{stem}_mean"] = pa.array([row.mean() if len(row) else None for row in rows], pa.float32())
        return table_of(columns)

    def save_state(self, directory: Path) -> None:
        """Link all shards into a snapshot."""
        _link(self._directory, directory / LEDGER)

    def load_state(self, directory: Path) -> None:
        _link(directory / LEDGER, self._directory)

    def show(self, recorder: Recorder, tokenizer: Tokenizer) -> None:
        """Report a few rows of the first, middle and last iteration: lowest and highest reward, and one unused row.
        Reports nothing if the ledger is hashed."""
        numbers = iterations(self._directory)
        if not numbers or self._salt is not None:
            return
        found: list[dict[str, Any]] = []
        for number in sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]}):
            table = read_shard(shard_path(self._directory, number)).table
            found += readable(table.take(_remarkable(table)), tokenizer)
        sources = list(found[0]["scores"])
        reasoning = ["reasoning"] if any("reasoning" in row for row in found) else []
        names = ["iteration", "prompt", *reasoning, "reply", "reward", "advantage", "used"]
        names += [GOLD] if GOLD in table.column_names else []
        rows = [[*map(row.get, names), *(row["scores"][source] for source in sources)] for row in found]
        recorder.table(SHOWN_ROLLOUTS, [*names, *sources], rows)


def _remarkable(table: pa.Table) -> list[int]:
    rewards = table["reward"].to_numpy()
    used = np.flatnonzero(table["times_trained"].to_numpy())
    found = [int(used[choose(rewards[used])]) for choose in (np.nanargmin, np.nanargmax)] if len(used) else []
    unused = np.flatnonzero(table["times_trained"].to_numpy() == 0)
    return list(dict.fromkeys([*found, *unused[:1].tolist()]))


def _scores(sources: SourceScores) -> dict[str, pa.Array]:
    return {
        SCORE + source: pa.array(values.float().numpy(), pa.float32(), mask=~sources.applies[source].numpy())
        for source, values in sources.values.items()
    } | {FAILURE + source: pa.array(reasons, pa.string()) for source, reasons in sources.failures.items()}


def _turns(rollout: Rollout) -> dict[str, Any]:
    """The columns that only episodes have."""
    if not rollout.are_episodes:
        return {}
    return {
        "turns": rollout.turns,
        "info": rollout.info,
        **({"seat": rollout.seat} if "seat" in rollout else {}),
        ANSWERS: rollout.answers,
        "response_mask": lists(rollout.response_mask, pa.bool_()),
        "turn_rewards": lists(rollout.turn_rewards, pa.float32()),
    }


def _nested(rollout: Rollout) -> dict[str, pa.Array]:
    """The columns of lists of lists, as far as the rollout has them; a token's experts of all layers are one list."""
    found = rollout.pick(*ROUTES, *TOP).items()
    columns = {name: lists_of_lists(column) for name, column in found if isinstance(column, Ragged)}
    return columns | ({KEPT: lists_of_sets(rollout.kept_ids, rollout.kept_counts)} if KEPT in rollout else {})


def _versions(rollout: Rollout) -> dict[str, Any]:
    """The columns that only rollouts in flight have."""
    if "group" not in rollout:
        return {}
    return {"group": rollout.group, "token_versions": lists(rollout.token_versions, pa.int32())}


def _token_scores(scores: Scores) -> dict[str, pa.Array]:
    """The columns of the policy, the reference and the teacher, of those that scored the rollout."""
    found = scores.pick("logprobs", "entropy", "ref_logprobs", "teacher_logprobs", "kept_mass").items()
    return {name: lists(column, pa.float32()) for name, column in found if isinstance(column, Ragged)}


def _or_null(values: torch.Tensor) -> pa.Array:
    return pa.array(values.float().numpy(), pa.float32(), mask=values.isnan().numpy())


def _link(source: Path, target: Path) -> None:
    """Link the shards of one directory into another. Shards are replaced, never modified, so links are safe."""
    for number in iterations(source):
        target.mkdir(exist_ok=True)
        path = shard_path(source, number)
        link_or_copy(path, target / path.name)

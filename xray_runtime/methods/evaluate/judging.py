"""Comparison of two models' replies with intervals, for `evaluate` and `compare`.

Each judge decides wins independently; rewards, which the policy was trained against, are only reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xray_runtime.algorithms.statistics import bootstrap_interval, wins
from xray_runtime.algorithms.verdicts import outcomes
from xray_runtime.cluster.model_spec import ModelSpec, scored_together
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.data.gold import load_gold
from xray_runtime.data.reasoning import answers_of, reasoning_of
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.results import plain_numbers, write_json, write_results
from xray_runtime.methods.evaluate.config import GOLD
from xray_runtime.rewards.reward_sources import RewardSources

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.batch import TextBatch
    from xray_runtime.data.pairs import Messages
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.common.sampling.policy_replies import PolicyReplies
    from xray_runtime.methods.evaluate.config import EvaluationConfig

MIN_TAGGED = 8
"""Prompts that a tag needs for results of its own."""
MAX_LOST = 12
"""Pairs in lost.json."""

Scores = Mapping[str, torch.Tensor]
"""Side → score of each reply [n], float64; NaN without a score, and then the pair is dropped."""


@dataclass
class Panel:
    """Scores of each side's replies by judges, rewards and the gold score."""

    judges: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Judge, or source that is only reported → `Scores`."""
    rewards: dict[str, torch.Tensor] = field(default_factory=dict)
    """`Scores` of the weighted sum; empty without rewards."""

    @property
    def gold(self) -> Scores | None:
        return self.judges.get(GOLD)


class Scoring:
    """Scores replies with all sources of an evaluation; `tokenizer` is the policy's, if replies have its tokens."""

    def __init__(self, stage: Stage[EvaluationConfig, Any], tokenizer: Tokenizer | None = None) -> None:
        self._rewards = RewardSources(stage, tokenizer)
        self._judges = RewardSources(stage, tokenizer, field="judges")
        self._gold = load_gold(stage.config.gold, stage.functions) if stage.config.gold is not None else None
        self.panel = Panel()
        self._replies: dict[str, Sequence[str]] = {}
        """Replies of the sides scored so far."""

    def specs(self) -> dict[str, ModelSpec]:
        """Specs of the models among the sources."""
        return scored_together(self._rewards.specs() | self._judges.specs())

    def score(
        self,
        side: str,
        models: Mapping[str, ModelHandle],
        prompts: Sequence[Messages],
        prompt_texts: Sequence[str],
        answers: PolicyReplies,
        columns: Mapping[str, Sequence[Any]],
        tokens: TextBatch | None = None,
    ) -> None:
        """Add a side's replies to the panel. Equal replies to a prompt get equal scores, so they tie. `tokens`: as
        `RewardSources.requests` takes them."""
        replies, episodes = answers.texts, answers.scores
        if self._gold is not None:
            self.panel.judges.setdefault(GOLD, {})[side] = torch.tensor(self._gold(prompt_texts, replies)).double()
        of_rewards, of_judges = (s.requests(models, prompts, replies, tokens) for s in (self._rewards, self._judges))
        if self._rewards.weights:
            scores = self._rewards.scores(of_rewards, prompts, replies, columns, episodes=episodes, tokens=tokens)
            self.panel.rewards[side] = self._rewards.scaled(scores).double()
        if self._judges.weights:
            scores = self._judges.scores(of_judges, prompts, replies, columns, tokens=tokens)
            for name, of_judge in self._judges.each(scores).items():
                self.panel.judges.setdefault(name, {})[side] = of_judge
        if episodes is None:
            self._tie_equal(side, replies)

    def _tie_equal(self, side: str, replies: Sequence[str]) -> None:
        # In another batch the same reply's score differs in the last bits, and a judge may answer differently.
        for other, other_replies in self._replies.items():
            equal = torch.tensor([a == b for a, b in zip(replies, other_replies, strict=True)])
            for scores in (self.panel.rewards, *self.panel.judges.values()):
                if side in scores:
                    scores[side] = torch.where(equal & ~scores[other].isnan(), scores[other], scores[side])
        self._replies[side] = replies


@dataclass(frozen=True)
class Verdicts:
    """Results with 95% intervals of side `better` over `worse`."""

    config: EvaluationConfig
    seed: int
    stage: str
    better: str
    worse: str

    def interval(self, x: torch.Tensor, purpose: str) -> tuple[float, list[float]]:
        seed = derive_seed(self.seed, self.stage, purpose)
        mean, low, high = bootstrap_interval(x, self.config.bootstrap_samples, seed)
        return mean, [low, high]

    def verdict(self, scores: Scores, name: str) -> dict[str, Any]:
        """Wins and difference by one judge, for whose `name` random numbers are drawn."""
        better, worse = scores[self.better], scores[self.worse]
        won = wins(better, worse)
        rate, rate_ci = self.interval(won, f"win_rate/{name}")
        delta, delta_ci = self.interval(better - worse, f"delta/{name}")
        return {
            "samples": len(won),
            **outcomes(won.tolist()),
            "win_rate": rate,
            "win_rate_ci95": rate_ci,
            "delta": delta,
            "delta_ci95": delta_ci,
            f"score_{self.worse}": float(worse.mean()),
            f"score_{self.better}": float(better.mean()),
        }


def judge(
    config: EvaluationConfig,
    seed: int,
    stage: str,
    better: str,
    worse: str,
    panel: Panel,
    others: Mapping[str, dict[str, Any]] | None = None,
    tags: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Win rate of side `better` over `worse`, and differences of scores, with 95% intervals; of the rows of each of
    `tags` too.

    `judges` has them by judge. `win_rate` is that of the strictest judge, whose interval begins lowest; `judge` is
    its name. It is null without judges. Ties count half, and their number is reported. `others` are judges outside the
    panel, with their results.

    Raises:
        RuntimeError: no pair of replies has both its scores.
    """

    verdicts = Verdicts(config, seed, stage, better, worse)
    judges: dict[str, dict[str, Any]] = dict(others or {})
    for name, of_judge in panel.judges.items():
        scores = _both_scored(of_judge, stage, f"score of {name}")
        judges[name] = {"judges": name in config.judging} | verdicts.verdict(scores, name)
    judging = [name for name, verdict in judges.items() if verdict["judges"]]
    strictest = min(judging, key=lambda name: judges[name]["win_rate_ci95"][0], default=None)
    content: dict[str, Any] = {"judge": strictest, "win_rate": None, "win_rate_ci95": None, "judges": judges}
    if strictest is not None:
        content |= {name: judges[strictest][name] for name in ("win_rate", "win_rate_ci95")}
    rewards = _both_scored(panel.rewards, stage, "reward") if panel.rewards else None
    for kind, shown in {"reward": rewards, "gold": panel.gold}.items():
        change: tuple[float | None, list[float] | None] = (None, None)
        if shown is not None:
            change = verdicts.interval(shown[better] - shown[worse], f"{kind}_delta")
        content |= {f"{kind}_delta": change[0], f"{kind}_delta_ci95": change[1]}
        content |= {
            f"{kind}_{side}": float(shown[side].mean()) if shown is not None else None for side in (worse, better)
        }
    if tags is not None:
        content["tags"] = {
            tag: {
                name: verdicts.verdict(scores, f"{name}/{tag}") for name, scores in _of_rows(panel.judges, rows).items()
            }
            for tag, rows in tags.items()
        }
    return content


def tagged_rows(
    config: EvaluationConfig, columns: Mapping[str, Sequence[Any]], stage: str
) -> dict[str, list[int]] | None:
    """Tag → its prompts; only tags that `MIN_TAGGED` or more of them have; None where the config names no column.

    A value is a tag or a list of tags.

    Raises:
        ValueError: no prompt has the column.
    """
    column = config.tag_column
    if column is None:
        return None
    if column not in columns:
        others = ", ".join(columns) or "no column"
        raise ValueError(f"{stage}.tag_column: {column!r} is not allowed: the held-out prompts have {others}")
    found: dict[str, list[int]] = {}
    for row, value in enumerate(columns[column]):
        tags = value if isinstance(value, list) else [] if value is None else [value]
        for tag in dict.fromkeys(map(str, tags)):
            found.setdefault(tag, []).append(row)
    return {tag: rows for tag, rows in sorted(found.items()) if len(rows) >= MIN_TAGGED}


def _of_rows(judges: Mapping[str, Scores], rows: Sequence[int]) -> dict[str, Scores]:
    """The scores of these rows by each judge that gave `MIN_TAGGED` or more of them a score for both replies."""
    chosen = {name: {side: of_side[rows] for side, of_side in scores.items()} for name, scores in judges.items()}
    scored = {name: ~torch.stack(list(scores.values())).isnan().any(0) for name, scores in chosen.items()}
    return {
        name: {side: of_side[scored[name]] for side, of_side in scores.items()}
        for name, scores in chosen.items()
        if int(scored[name].sum()) >= MIN_TAGGED
    }


def _both_scored(scores: Scores, stage: str, what: str) -> Scores:
    """The rows in which every side has a score."""
    scored = ~torch.stack(list(scores.values())).isnan().any(0)
    if not scored.any():
        raise RuntimeError(f"{stage}: no prompt has a {what} for both replies")
    return {side: of_side[scored] for side, of_side in scores.items()}


def _lost(scores: Scores, sides: Sequence[str]) -> list[int]:
    """The rows in which the second side scored lower than the first, the largest loss first."""
    if not scores:
        return []
    losses = (scores[sides[0]] - scores[sides[1]]).nan_to_num(0.0)
    order = losses.argsort(descending=True, stable=True).tolist()
    return [row for row in order[:MAX_LOST] if losses[row] > 0]


def _shown(side: str, replies: PolicyReplies) -> dict[str, Sequence[str | None]]:
    """Column of the samples → its text for each reply."""
    if replies.scores is not None or not any(replies.reasoning_lengths):
        return {side: replies.shown}
    return {f"{side}_reasoning": reasoning_of(replies.texts), side: answers_of(replies.texts)}


def record_replies(
    out: Path,
    recorder: Recorder,
    name: str,
    prefix: str,
    summary: dict[str, Any],
    prompt_texts: list[str],
    replies: Mapping[str, PolicyReplies],
    panel: Panel,
    config: EvaluationConfig,
) -> None:
    """Write `summary` with each side's lengths and means as NAME.json and metrics `prefix`/…, the prompts, and replies
    of each side next to each other; those that lost most by the strictest judge, of all prompts, as lost.json."""

    def score(scores: Scores | None, side: str, row: int) -> float | None:
        return None if not scores or scores[side][row].isnan() else float(scores[side][row])

    for side, of_side in replies.items():
        summary[f"length_{side}"] = float(of_side.rollout.own_tokens().lengths.mean())
        if any(of_side.reasoning_lengths):
            summary[f"reasoning_length_{side}"] = float(np.mean(of_side.reasoning_lengths))
        summary |= {f"{measure}_{side}": mean for measure, mean in of_side.means.items()}
    shown = {"reward": panel.rewards or None, GOLD: panel.gold} | panel.judges
    texts = {name: column for side, of_side in replies.items() for name, column in _shown(side, of_side).items()}

    def sample(i: int) -> dict[str, Any]:
        scored = {f"{kind}_{side}": score(scores, side, i) for kind, scores in shown.items() for side in replies}
        return {"prompt": prompt_texts[i], **{name: column[i] for name, column in texts.items()}, **scored}

    samples = [sample(i) for i in range(min(config.num_samples_shown, len(prompt_texts)))]
    write_results(out, recorder, f"{name}.json", summary, prompt_texts, samples)
    lost = _lost(panel.judges.get(summary["judge"], panel.rewards), list(replies))
    write_json(out / "lost.json", [sample(row) for row in lost])
    recorder.metrics(plain_numbers(summary, prefix), step=0)

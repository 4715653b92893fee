"""NaN, infinities and corrupt rollouts put into a stage one at a time: each is refused by its true cause, unpublished.

The PPO loop runs over fake models; `Broken` injects what one case says. What engines refuse is in
tests/component/test_non_finite.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.message_texts import Messages
from tests.unit.methods.ppo.loop import PPOModel, World, attempt, plain
from tests.unit.methods.training import preference_loop
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.errors import NonFiniteError, may_retry
from xray_runtime.kernel.graph.artifacts import Dataset, Model, Preferences
from xray_runtime.methods.common.training.finite import check_rollout, naming
from xray_runtime.methods.common.training.steps import SkippedSteps, StepStatistics
from xray_runtime.methods.dpo import body as dpo
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.dpo.kind import DPOInputs
from xray_runtime.methods.kto import body as kto
from xray_runtime.methods.kto.config import KTOConfig
from xray_runtime.methods.kto.kind import KTOInputs
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards.config import reward_term

NAN, INF = math.nan, math.inf
Change = Callable[[Any], Any]


def setting(column: str, value: float) -> Change:
    """Puts `value` in the last place of a column of scores or of statistics."""

    def change(answer: Any) -> Any:
        if isinstance(answer, dict):
            return answer | {column: value}
        old = getattr(answer, column)
        values = (old.values if isinstance(old, Ragged) else old).copy()
        values[-1] = value
        return answer.with_columns(**{column: old.like(values) if isinstance(old, Ragged) else values})

    return change


def with_sums(**sums: float) -> Change:
    return lambda answer: answer | sums


def replies(change: Callable[[list[np.ndarray]], list[Any]]) -> Change:
    """Other tokens than were sampled; log-probabilities to match."""

    def changed(answer: ReplyBatch) -> ReplyBatch:
        ids = Ragged.of(change(list(answer.response_ids)))
        return answer.with_columns(response_ids=ids, rollout_logprobs=ids.like(np.full(len(ids.values), -1.0)))

    return changed


@dataclasses.dataclass
class Faulty(World):
    """A world in which one answer is changed."""

    role: str = ""
    method: str = ""
    change: Change = dataclasses.field(default=lambda answer: answer)
    at: int = 1
    """Which of the role's calls of the method it is, from 0."""


class Broken(PPOModel):
    """A fake WholeModel whose answer is changed."""

    calls = 0

    def _broken(self, method: str, answer: Any) -> Any:
        world = self.world
        assert isinstance(world, Faulty)
        if (self.role, method) != (world.role, world.method):
            return answer
        self.calls += 1
        return world.change(answer) if self.calls == world.at + 1 else answer

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        return self._broken("generate", super()._generate(rows, sampling, version))

    def _score(self, rows: TextBatch) -> Scores:
        return self._broken("score", super()._score(rows))

    def _train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        return self._broken("train", super()._train(rows, totals, lr))


CORRUPT = r"the rollout is corrupt: "
CASES: dict[str, tuple[str, str, Change, str]] = {
    "generator: NaN": ("generator", "generate", setting("rollout_logprobs", NAN), r"rollout_logprobs of 1 of 4 rows"),
    "generator: a probability above 1": (
        *("generator", "generate"),
        *(setting("rollout_logprobs", 0.5), CORRUPT + "a log-probability above 0"),
    ),
    "rollout: a reply is missing": (
        *("generator", "generate", lambda rows: rows.take([0, 1, 2])),
        CORRUPT + "3 replies to 4 prompts",
    ),
    "rollout: an empty reply": (
        *("generator", "generate", replies(lambda ids: [*ids[:3], []])),
        CORRUPT + "a reply of 0 tokens",
    ),
    "rollout: no token": (
        *("generator", "generate", replies(lambda ids: [*ids[:3], [-7, 1]])),
        CORRUPT + "a token below 0",
    ),
    "rollout: log-probabilities are missing": (
        *("generator", "generate"),
        lambda rows: rows.with_columns(rollout_logprobs=rows.rollout_logprobs[np.array([0, 1, 2])]),
        CORRUPT + "tokens and log-probabilities differ in number",
    ),
    "rollout: other tokens": (
        *("generator", "generate", replies(lambda ids: [np.roll(i, 1) for i in ids])),
        "generator and trainer differ by",
    ),
    "policy's scores: NaN": ("policy", "score", setting("logprobs", NAN), r"old_logprobs of 1 of 4 rows \(.* row 3\)"),
    "reference's scores: NaN": ("reference", "score", setting("ref_logprobs", NAN), r"advantages of . of 4 rows"),
    "critic's values: NaN": ("critic", "score", setting("values", NAN), r"advantages of . of 4 rows"),
    "reward model: -inf": ("rewards.0", "score", setting("scores", -INF), r"reward model rewards.0: scores of 1 of 4"),
    "policy's loss: NaN": ("policy", "train", setting("policy_loss", NAN), r"step 1: 'policy' .* policy_loss is nan"),
    "policy's KL: NaN": ("policy", "train", setting("approx_kl_sum", NAN), r"'policy' .* approx_kl_sum is nan"),
    "policy's gradient: inf": ("policy", "train", setting("grad_norm", INF), r"'policy' .* gradient's norm is inf"),
    "a loss on one rank": (
        *("policy", "train", with_sums(policy_loss=NAN, grad_norm=NAN, refused_by=3.0)),
        r"policy_loss is nan on rank 3",
    ),
    "critic's loss: NaN": ("critic", "train", setting("value_loss", NAN), r"step 1: 'critic' .* value_loss is nan"),
}


@pytest.mark.parametrize(("role", "method", "change", "cause"), CASES.values(), ids=list(CASES))
def test_non_finite_values_are_refused_by_their_cause(
    inputs: PPOInputs, tmp_path: Path, role: str, method: str, change: Change, cause: str
) -> None:
    world = Faulty(role=role, method=method, change=change)
    with pytest.raises(RuntimeError, match=cause) as caught:
        attempt(inputs, tmp_path / "out", world, model=Broken, iterations=3, critic="separate")
    assert not any("save" in call for call in world.calls)
    if isinstance(caught.value, NonFiniteError):
        # The second call: of scores in iteration 1, of steps in iteration 0.
        assert str(caught.value).startswith(f"ppo, iteration {0 if method == 'train' else 1} (")
        assert not may_retry(caught.value)


def rollout(ids: list[list[int]], logprob: float = -1.0, ended: int | None = None) -> TextBatch:
    """What a generator gives, every token with the same log-probability."""
    tokens = Ragged.of(ids)
    logprobs = Ragged(np.full(len(tokens.values), logprob, np.float32), tokens.offsets)
    done = np.ones(len(ids) if ended is None else ended, bool)
    return ReplyBatch(response_ids=tokens, rollout_logprobs=logprobs, ended=done)


LONGEST = Sampling(max_new_tokens=3, temperature=1.0, stop_token_ids=(1,), pad_token_id=0)


def test_replies_up_to_the_bounds_are_taken() -> None:
    check_rollout(rollout([[0, 1, 2], [5]]), 2, LONGEST)
    check_rollout(rollout([[1]], 5e-5), 1, LONGEST)  # of rounding


@pytest.mark.parametrize(
    "sampled",
    [rollout([[1], [2]]), rollout([[1]], ended=2), rollout([[1, 2, 3, 4]]), rollout([[1]], 2e-4)],
    ids=["one too many", "ends of others", "a token too many", "above rounding"],
)
def test_a_rollout_beyond_them_is_refused(sampled: TextBatch, message_texts: Messages) -> None:
    with message_texts.raises(RuntimeError):
        check_rollout(sampled, 1, LONGEST)


def test_the_place_of_an_error_is_named_once() -> None:
    where = "ppo, iteration 3"
    with pytest.raises(NonFiniteError, match=rf"^{where}: x is nan$"), naming(where), naming(where):
        raise NonFiniteError("x is nan")
    # What is something else stays what it is.
    with pytest.raises(KeyError, match="x"), naming(where):
        raise KeyError("x")


@pytest.mark.parametrize(
    "function",
    [
        lambda prompts, replies: [INF] * len(replies),
        lambda prompts, replies: [-INF] * len(replies),
        lambda prompts, replies: [10**400] * len(replies),
        lambda prompts, replies: [1e300] * len(replies),
        lambda prompts, replies: [3e38] * len(replies),
        lambda prompts, replies: [NAN] * len(replies),
    ],
    ids=["inf", "-inf", "beyond floats", "beyond float32", "a sum beyond float32", "NaN"],
)
def test_rewards_that_are_not_finite_are_refused(
    inputs: PPOInputs, tmp_path: Path, function: Callable[..., Any], message_texts: Messages
) -> None:
    world, doubled = World(), reward_term(function="f", weight=2.0)
    with message_texts.raises(RuntimeError):
        attempt(inputs, tmp_path / "out", world, rewards=[doubled], functions={"f": function})
    assert not world.batches


def test_a_reward_model_that_gives_all_replies_one_score_is_refused(inputs: PPOInputs, tmp_path: Path) -> None:
    world = Faulty(role="rewards.0", method="score", change=lambda a: Scores(scores=np.full_like(a.scores, 0.5)), at=0)
    cause = "the reward model rewards.0 gave [89] different replies the same score, 0.5: it is not informative"
    with pytest.raises(RuntimeError, match=cause):
        attempt(inputs, tmp_path / "out", world, model=Broken, prompts_per_iteration=9, minibatch_size=3)
    assert not world.batches


# Steps that may be left out


def test_steps_that_may_be_left_out_are_counted_and_change_nothing_else(inputs: PPOInputs, tmp_path: Path) -> None:
    world = Faulty(role="policy", method="train", change=setting("grad_norm", NAN))
    recorder = attempt(inputs, tmp_path / "out", world, model=Broken, iterations=3, max_skipped_steps=1)
    assert [point["training/skipped_steps"] for point in recorder.points] == [1.0, 1.0, 1.0]
    # Two minibatches an iteration; in the first one's sums the other alone.
    assert [point["policy/updates"] for point in recorder.points] == [2.0, 2.0, 2.0]
    assert all(math.isfinite(value) for point in recorder.points for value in point.values())
    whole = World()
    attempt(inputs, tmp_path / "whole", whole, iterations=3)
    np.testing.assert_equal(list(map(plain, world.batches)), list(map(plain, whole.batches)))


def test_an_iteration_may_lose_all_its_steps(inputs: PPOInputs, tmp_path: Path) -> None:
    class Always(Broken):
        def _train(self, *args: Any, **keywords: Any) -> dict[str, float]:
            return setting("policy_loss", NAN)(super()._train(*args, **keywords))  # type: ignore[no-any-return]

    recorder = attempt(inputs, tmp_path / "out", Faulty(), model=Always, iterations=1, max_skipped_steps=2)
    assert recorder.points[0]["training/skipped_steps"] == 2.0
    with pytest.raises(NonFiniteError, match=r"skipped steps: 3; max_skipped_steps = 2"):
        attempt(inputs, tmp_path / "more", Faulty(), model=Always, iterations=2, max_skipped_steps=2)


def test_how_many_were_left_out_is_remembered(inputs: PPOInputs, tmp_path: Path) -> None:
    world = Faulty(role="policy", method="train", change=setting("grad_norm", NAN))
    first = attempt(inputs, tmp_path / "first", world, model=Broken, iterations=3, max_skipped_steps=1)
    assert [snapshot.state["skipped"] for snapshot in first.snapshots] == [{"count": 1}] * 2
    again = Faulty(role="policy", method="train", change=setting("grad_norm", NAN))
    with pytest.raises(NonFiniteError, match="skipped steps: 2; max_skipped_steps = 1"):
        attempt(
            inputs,
            tmp_path / "again",
            again,
            newest=first.snapshots[0],
            model=Broken,
            iterations=3,
            max_skipped_steps=1,
        )


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_stages_of_preferences_refuse_too(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body: Any = {"dpo": dpo, "kto": kto}[kind]
    pairs = Preferences(root / "pairs")
    given: Any = DPOInputs(Model(root / "model"), pairs, None)
    if kind == "kto":
        given = KTOInputs(Model(root / "model"), pairs, None, Dataset(root / "data"))
    config: Any = (DPOConfig if kind == "dpo" else KTOConfig)(batch_size=2, epochs=1, max_skipped_steps=1)
    learns = preference_loop.Likelier.do_train
    wrong = {2}

    def train(self: Any, *args: Any) -> dict[str, float]:
        answer = learns(self, *args)
        return with_sums(loss=NAN, grad_norm=NAN)(answer) if self.updates in wrong else answer

    monkeypatch.setattr(preference_loop.Likelier, "do_train", train)
    world = preference_loop.World()
    recorder = preference_loop.attempt(body, given, config, root / "out", world)
    assert recorder.points[-1]["training/skipped_steps"] == 1.0
    assert all(math.isfinite(value) for point in recorder.points for value in point.values())
    wrong.add(3)
    refused = preference_loop.World()
    with pytest.raises(NonFiniteError, match=r"optimizer step 2: 'policy' skipped it, because loss is nan"):
        preference_loop.attempt(body, given, config, root / "refused", refused)
    assert not any("saves" in call for call in refused.calls)


def test_a_step_that_is_finite_is_taken() -> None:
    skipped = SkippedSteps()
    assert skipped.check_step(None, "policy", 0, StepStatistics({"nll": 1.0}, grad_norm=0.0))  # type: ignore[arg-type]
    assert skipped.count == 0

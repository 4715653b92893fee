"""The loops of `dpo`, `kto` and `reward_model` over a model in this process with answers worked out by hand.

The model gives each reply the log-probability −(its tokens); a step of training makes every reply 0.5 nats likelier.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.training.preference_loop import PAIRS, STEP, Likelier, World, attempt, plain
from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.kernel.graph.artifacts import Dataset, Judgements, Model, Preferences
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.dpo import body as dpo
from xray_runtime.methods.dpo.config import DPOConfig, DPOValidation
from xray_runtime.methods.dpo.kind import DPOInputs
from xray_runtime.methods.kto import body as kto
from xray_runtime.methods.kto.config import KTOConfig, KTOValidation
from xray_runtime.methods.kto.kind import KTOInputs
from xray_runtime.methods.reward_model import body as reward_model
from xray_runtime.methods.reward_model.config import RewardConfig
from xray_runtime.methods.reward_model.kind import RewardModelInputs


def kept(root: Path, beside: str = "pairs") -> list[Path]:
    return list((root / f"{beside}.tokens-").glob("reference-*.safetensors"))


# DPO


def pairs_of(root: Path, reference: str | None = None) -> DPOInputs:
    other = None if reference is None else Model(root / reference)
    return DPOInputs(Model(root / "model"), Preferences(root / "pairs"), other)


def test_the_policy_as_it_begins_is_its_reference_and_scores_once(root: Path) -> None:
    world, config = World(), DPOConfig(batch_size=5, epochs=2)
    recorder = attempt(dpo, pairs_of(root), config, root / "out", world)
    assert world.calls[:3] == ["model scores 20", "model scores 6", "model learns"]
    assert world.calls.count("model learns") == 4
    assert world.calls[-1] == "model saves"
    for rows, totals, _ in world.batches:
        # Both replies of a pair are in one step, and what they are divided by is global.
        assert totals.rows == 5
        sides = (("input_ids", "ref_chosen"), ("rejected_ids", "ref_rejected"))
        for ids, ref in sides:
            lengths = getattr(rows, ids).lengths
            np.testing.assert_array_equal(getattr(rows, ref), -(lengths - rows.prompt_lengths).astype(float))
    assert len({ids.tobytes() for rows, _, _ in world.batches[:2] for ids in rows.input_ids}) == PAIRS
    # Every reply became 2 nats likelier: no margin grew, and of 3 held-out pairs none is in order or out of it.
    assert recorder.points[-1]["dpo/heldout_accuracy"] == 0.5
    assert recorder.points[-1]["dpo/heldout_loss"] == pytest.approx(np.log(2))
    assert recorder.points[-1]["dpo/loss"] == 2.0 / 5
    # Another run with another beta finds the reference's scores.
    again = World()
    attempt(dpo, pairs_of(root), DPOConfig(batch_size=5, beta=0.5), root / "again", again)
    assert again.calls[0] == "model learns"


def test_another_reference_scores_before_the_policy_is_opened(root: Path) -> None:
    world = World()
    attempt(dpo, pairs_of(root, "reference"), DPOConfig(batch_size=10), root / "out", world)
    assert world.calls[:3] == ["reference scores 20", "reference scores 6", "model learns"]
    rows = world.batches[0][0]
    np.testing.assert_array_equal(rows.ref_chosen, -1 - (rows.input_ids.lengths - rows.prompt_lengths))
    assert len(kept(root)) == 1
    # Another reference has another key.
    attempt(dpo, pairs_of(root), DPOConfig(batch_size=10), root / "own", World())
    assert len(kept(root)) == 2


def test_damaged_or_outdated_scores_are_computed_again(root: Path) -> None:
    config = DPOConfig(batch_size=10)
    attempt(dpo, pairs_of(root), config, root / "out", World())
    [path] = kept(root)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    damaged = World()
    attempt(dpo, pairs_of(root), config, root / "damaged", damaged)
    assert damaged.calls[0] == "model scores 20"
    assert kept(root) == [path]
    (root / "model" / "manifest.json").write_text(json.dumps({"of": "another"}))
    other = World()
    attempt(dpo, pairs_of(root), config, root / "other", other)
    assert other.calls[0] == "model scores 20"


def test_simpo_opens_no_reference(root: Path) -> None:
    world = World()
    attempt(dpo, pairs_of(root), DPOConfig(loss="simpo", beta=2.0, batch_size=10), root / "out", world)
    assert world.calls[0] == "model learns"
    assert set(world.batches[0][0].columns()) == {"input_ids", "rejected_ids", "prompt_lengths"}
    assert not kept(root)


class Sharper(Likelier):
    """What it was taught to like becomes likelier in each step, and from the third on less likely; of the rest a share
    of that less likely, or more."""

    MARGINS = (0.0, 1.0, 2.0, 1.5)
    others = 0.0

    def do_score(self, rows: TextBatch) -> Scores:
        found = super().do_score(rows)
        # "no" is shorter than every answer, under whatever prompt.
        tokens = rows.input_ids.lengths - rows.prompt_lengths
        margin = self.MARGINS[min(self.updates, 3)] * np.where(tokens > tokens.min(), 1.0, self.others)
        return Scores(reply_logprobs=(found.reply_logprobs - STEP * self.updates + margin).astype(np.float32))


class Parting(Sharper):
    MARGINS, others = (0.0, 1.0, 3.0, 2.0), -1.0


def chosen_by_validation(root: Path, out: str, newest: Snapshot | None = None, **looks: Any) -> tuple[World, Any]:
    world, fields = World(), {"every": 1, "num_pairs": 3} | looks
    config = DPOConfig(batch_size=2, validation=DPOValidation(**fields))
    return world, attempt(dpo, pairs_of(root), config, root / out, world, newest, model=Sharper)


def test_the_version_of_the_lowest_loss_on_pairs_left_out_is_kept(root: Path) -> None:
    world, recorder = chosen_by_validation(root, "out")
    record = json.loads((root / "out" / "validation.json").read_text())
    assert 0 < record["pairs"] < PAIRS
    steps = max(1, (PAIRS - record["pairs"]) // 2)
    assert world.calls.count("model learns") == steps == 3
    # Sigmoid loss, beta 0.1, of margins 1, 2, 1.5, …
    losses = [float(np.log1p(np.exp(-0.1 * margin))) for margin in Sharper.MARGINS[1:]]
    assert record["scores"] == {str(n + 1): pytest.approx(-loss) for n, loss in enumerate(losses)}
    assert [p["dpo/validation_loss"] for p in recorder.points] == pytest.approx(losses)
    assert (record["kept"], (root / "out" / "updates").read_text()) == (2, "2")
    # What a version is chosen by is not trained on, and no pair is lost.
    trained = {ids.tobytes() for rows, _, _ in world.batches for ids in rows.input_ids}
    assert len(trained) <= PAIRS - record["pairs"]
    _, whole = World(), World()
    attempt(dpo, pairs_of(root), DPOConfig(batch_size=10), root / "all", whole)
    everything = {ids.tobytes() for rows, _, _ in whole.batches for ids in rows.input_ids}
    assert trained < everything


@pytest.mark.parametrize("lose_what_is_kept", [False, True])
def test_dpo_resumes_exactly(root: Path, lose_what_is_kept: bool) -> None:
    whole, resumed, config = World(), World(), DPOConfig(batch_size=4, epochs=2)
    first = attempt(dpo, pairs_of(root), config, root / "whole", whole)
    assert [snapshot.step for snapshot in first.snapshots] == [1, 2, 3, 4]
    if lose_what_is_kept:
        kept(root)[0].unlink()
    second = attempt(dpo, pairs_of(root), config, root / "resumed", resumed, first.snapshots[2])
    np.testing.assert_equal(plain(resumed.batches), plain(whole.batches[3:]))
    assert second.points == first.points[3:]
    # The policy as it began scores again, not the one that had learned.
    assert ("model scores 20" in resumed.calls) == lose_what_is_kept


# KTO


def replies_of(root: Path, **given: bool) -> KTOInputs:
    pairs = Preferences(root / "pairs") if given.get("preferences") else None
    verdicts = Judgements(root / "judged") if given.get("verdicts") else None
    return KTOInputs(Model(root / "model"), pairs, verdicts, Dataset(root / "data"))


def test_kto_learns_from_pairs_and_verdicts(root: Path) -> None:
    world = World()
    # 20 replies of pairs and 8 of verdicts: of six one is a skip, and one was asked a held-out prompt.
    config = KTOConfig(batch_size=14, epochs=2)
    recorder = attempt(kto, replies_of(root, preferences=True, verdicts=True), config, root / "out", world)
    counts = {name: v for name, v in recorder.points[0].items() if name != "kto/lr"}
    assert counts == {
        "kto/skipped": 1,
        "kto/dropped_prompt_held_out": 1,
        "kto/dropped_same": 0,
        "kto/desirable": 14,
        "kto/undesirable": 14,
    }
    learned = {
        (ids.tobytes(), bool(desirable))
        for rows, _, _ in world.batches[:2]
        for ids, desirable in zip(rows.input_ids, rows.desirable, strict=True)
    }
    assert len(learned) == 28
    assert sum(desirable for _, desirable in learned) == 14
    # Each step every reply is 0.5 nats likelier than the reference says, under whatever prompt.
    assert [totals.rows for _, totals, _ in world.batches] == [14] * 4
    assert [totals.baseline for _, totals, _ in world.batches] == pytest.approx([STEP * step for step in range(4)])
    assert [point["kto/baseline"] for point in recorder.points[1:]] == pytest.approx([0, 0.5, 1.0, 1.5])
    assert "kto/heldout_accuracy" in recorder.points[-1]


def test_kto_learns_from_verdicts_alone(root: Path) -> None:
    world = World()
    recorder = attempt(kto, replies_of(root, verdicts=True), KTOConfig(batch_size=8), root / "out", world)
    rows = world.batches[0][0]
    np.testing.assert_array_equal(rows.ref_reply_logprobs, -(rows.input_ids.lengths - rows.prompt_lengths))
    assert sorted(rows.desirable.tolist()) == [False] * 4 + [True] * 4
    assert "kto/heldout_accuracy" not in recorder.points[-1]
    assert len(kept(root, "judged")) == 1


def test_kto_resumes_exactly(root: Path) -> None:
    whole, resumed, config = World(), World(), KTOConfig(batch_size=6, epochs=1)
    inputs = replies_of(root, preferences=True)
    first = attempt(kto, inputs, config, root / "whole", whole)
    second = attempt(kto, inputs, config, root / "resumed", resumed, first.snapshots[0])
    np.testing.assert_equal(plain(resumed.batches), plain(whole.batches[1:]))
    assert second.points == first.points[2:]


def kto_chosen_by_validation(root: Path, out: str, newest: Snapshot | None = None, **looks: Any) -> tuple[World, Any]:
    world, fields = World(), {"every": 1, "num_replies": 6} | looks
    config, inputs = KTOConfig(batch_size=4, validation=KTOValidation(**fields)), replies_of(root, preferences=True)
    return world, attempt(kto, inputs, config, root / out, world, newest, model=Parting)


def test_ktos_version_of_the_lowest_loss_on_replies_left_out_is_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zs: list[float] = []

    def baseline(ratios: Any) -> float:
        zs.append(max(float(ratios.mean()), 0.0))
        return zs[-1]

    monkeypatch.setattr(kto, "kto_baseline", baseline)
    world, recorder = kto_chosen_by_validation(root, "out")
    record = json.loads((root / "out" / "validation.json").read_text())
    left = record["replies"]
    # Both replies to a prompt.
    assert 0 < left < 2 * PAIRS
    assert left % 2 == 0
    steps = (2 * PAIRS - left) // 4
    assert world.calls.count("model learns") == steps >= 3
    # Of each prompt the desirable reply has log-ratio m, the other −m: 1 − σ(0.1 (m − z)) and 1 − σ(0.1 (z + m)).
    for step, margin in enumerate(Parting.MARGINS[1:]):  # of the first three steps
        point = recorder.points[step + 1]
        z = zs[2 * step + 1]  # after that of the step
        losses = [1 / (1 + math.exp(0.1 * (margin - z))), 1 / (1 + math.exp(0.1 * (margin + z)))]
        assert point["kto/validation_loss"] == pytest.approx(sum(losses) / 2)
        assert point["kto/validation_accuracy"] == 1.0
        assert record["scores"][str(step + 1)] == -point["kto/validation_loss"]
    assert (record["kept"], (root / "out" / "updates").read_text()) == (2, "2")
    # Nothing that a version is chosen by is trained on.
    trained = {ids.tobytes() for rows, _, _ in world.batches for ids in rows.input_ids}
    whole = World()
    attempt(kto, replies_of(root, preferences=True), KTOConfig(batch_size=20), root / "all", whole)
    everything = {ids.tobytes() for rows, _, _ in whole.batches for ids in rows.input_ids}
    assert trained < everything
    assert len(everything - trained) >= left


def test_all_feedback_on_a_prompt_is_left_out_together(root: Path) -> None:
    both = replies_of(root, preferences=True, verdicts=True)
    config = KTOConfig(batch_size=4, epochs=9, validation=KTOValidation(every=1, num_replies=8))
    world = World()
    attempt(kto, both, config, root / "out", world)
    left = json.loads((root / "out" / "validation.json").read_text())["replies"]
    prompts = {ids[:n].tobytes() for rows, _, _ in world.batches
               for ids, n in zip(rows.input_ids, rows.prompt_lengths, strict=True)}  # fmt: skip
    # Ten prompts of pairs and four of verdicts, each with two replies.
    assert len(prompts) == 14 - left // 2


@pytest.mark.parametrize("chosen", [chosen_by_validation, kto_chosen_by_validation])
def test_the_last_version_is_kept_where_that_is_wanted(root: Path, chosen: Any) -> None:
    world, _ = chosen(root, "out", keep="last")
    assert (root / "out" / "updates").read_text() == str(world.calls.count("model learns"))


@pytest.mark.parametrize("chosen", [chosen_by_validation, kto_chosen_by_validation])
def test_after_a_crash_the_best_version_of_before_is_found(root: Path, chosen: Any) -> None:
    whole, first = chosen(root, "out")
    newest = first.snapshots[1]
    assert (newest.step, newest.state["validation"]["best"]) == (2, 2)
    world, _ = chosen(root, "again", newest)
    assert world.calls.count("model learns") == whole.calls.count("model learns") - 2
    for name in ("validation.json", "updates"):
        assert (root / "again" / name).read_text() == (root / "out" / name).read_text()


def test_something_to_train_on_must_be_left(root: Path) -> None:
    with pytest.raises(ValueError, match=r"stage.validation.num_pairs: 10 of 10 for training leaves 10"):
        chosen_by_validation(root, "out", num_pairs=PAIRS)
    with pytest.raises(ValueError, match=r"stage.validation.num_replies: 99 of 20 for training leaves 20"):
        kto_chosen_by_validation(root, "kto", num_replies=99)


def test_too_few_replies_are_reported(root: Path) -> None:
    (root / "judged" / "judgements.jsonl").write_text("")
    with pytest.raises(ValueError, match="0 replies are too few, must be at least 2"):
        attempt(kto, replies_of(root, verdicts=True), KTOConfig(), root / "out", World())


# Reward model


class Longer(Likelier):
    """A reward model: a reply's score is its number of tokens."""

    def do_score(self, rows: TextBatch) -> Scores:
        return Scores(scores=super().do_score(rows).reply_logprobs * -1 + STEP * self.updates)


def test_both_sides_of_a_pair_come_with_the_prompt_that_they_share(root: Path) -> None:
    """Without `prompt_lengths` a model computes each prompt twice."""
    world, inputs = World(), RewardModelInputs(Model(root / "model"), Preferences(root / "pairs"))
    attempt(reward_model, inputs, RewardConfig(batch_size=5, epochs=1), root / "out", world, model=Longer)
    assert world.calls == ["model learns", "model scores 6"] * 2 + ["model saves"]
    for rows, totals, _ in world.batches:
        assert totals.rows == 5
        assert (rows.prompt_lengths > 1).all()
        chosen, rejected = rows.alike_prompts().reshape(2, -1)
        assert (chosen == rejected).all()
        assert len(set(chosen.tolist())) == 5
    summary = json.loads((root / "out" / "reward.json").read_text())
    assert summary["accuracy"] == 1.0
    assert summary["heldout_pairs"] == 3

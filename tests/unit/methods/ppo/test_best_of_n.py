"""What is kept of sampled replies, over a generator in this process; rewards come from a function."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xray
from tests.message_texts import Messages
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.protocols import ModelHandle, Ready
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import ReplyBatch, TextBatch
from xray_runtime.data.pairs import Example, Pairs, PreferenceExample, prompt_text, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.best_of_n import body as best_of_n
from xray_runtime.methods.best_of_n.body import kept
from xray_runtime.methods.best_of_n.config import BestOfNConfig
from xray_runtime.methods.best_of_n.kind import BestOfNInputs
from xray_runtime.methods.common.sampling import sampled_groups
from xray_runtime.methods.common.sampling.sampled_groups import _Done, _groups
from xray_runtime.methods.preferences import body as preferences
from xray_runtime.methods.preferences.config import RewardedPreferences, SampledPreferences
from xray_runtime.methods.preferences.kind import PreferencesInputs
from xray_runtime.rewards.config import reward_term

PROMPTS, SAMPLES = 12, 4
NAN = math.nan
WORDS = [*"abcdefghijklmnopqrstuvwxyz"]


def letter(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
    """The place of a reply's letter in the alphabet."""
    return [float(WORDS.index(reply)) if reply else -1.0 for reply in replies]


def same(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
    return [1.0] * len(replies)


class FakeGenerator:
    """Replies one letter, by the seed alone; of two prompts one reply is cut off."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls = tokenizer, 0
        self.generate = self

    def remote(self, rows: TextBatch, sampling: Any, version: int) -> Ready[TextBatch]:
        self.calls += 1
        letters = [WORDS[int(seed) % 26] for seed in rows.seed]
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in letters]
        ended = np.array([int(seed) % 3 != 0 for seed in rows.seed])
        replies = [[*row, sampling.stop_token_ids[0]] if end else row for row, end in zip(ids, ended, strict=True)]
        return Ready(ReplyBatch(response_ids=Ragged.of(replies), ended=ended))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    texts = [f"question {number}" for number in range(PROMPTS)]
    train_tokenizer([*texts, *WORDS] * 3, 300).save_pretrained(tmp_path / "model")
    examples = [Example(str(i), "c", [{"role": "user", "content": text}], "x") for i, text in enumerate(texts)]
    write_pairs(tmp_path / "data" / "train.arrow", Example, examples)
    write_pairs(tmp_path / "data" / "heldout.arrow", Example, [Example("h", "h", examples[0].prompt, "kept")])
    (tmp_path / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    return tmp_path


def attempt(
    root: Path,
    name: str,
    body: Any = best_of_n,
    function: Any = letter,
    newest: Snapshot | None = None,
    function_name: str = "f",
    **fields: Any,
) -> tuple[Path, FakeRecorder, FakeGenerator]:
    from xray_runtime.models.causal_lm import load_tokenizer

    policy, data = Model(root / "model"), Dataset(root / "data")
    given = {"rewards": [reward_term(function=function_name)], "samples": SAMPLES} | fields
    pairs = body is preferences
    kind = BestOfNConfig if not pairs else RewardedPreferences
    config: Any = SampledPreferences(**fields) if fields.get("source") == "gold" else kind(**given)
    inputs: Any = PreferencesInputs(policy, data) if pairs else BestOfNInputs(policy, data)
    generator = FakeGenerator(load_tokenizer(root / "model"))

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
        assert list(specs) == ["generator"]
        yield {"generator": generator}  # type: ignore[dict-item]

    out = root / name
    out.mkdir()
    logs = root / f"{name}-logs"
    logs.mkdir()
    recorder = FakeRecorder(logs, newest)
    functions = {function_name: function}
    body.run(Stage("stage", 7, config, inputs, RuntimeConfig(), open_models, functions), out, recorder)
    return out, recorder, generator


def written(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_kept_replies_and_reasons_for_the_others() -> None:
    rewards = torch.tensor([[1.0, 5.0], [2.0, 2.0], [NAN, NAN], [0.0, 1.0], [NAN, 3.0]])
    best, counts = kept(rewards, None, skip_tied=False)
    assert best.tolist() == [1, 0, -1, 1, 1]
    assert counts == {"skipped_without_reward": 1, "skipped_below_min_reward": 0, "skipped_tied": 0}
    best, counts = kept(rewards, 2.0, skip_tied=True)
    assert best.tolist() == [1, -1, -1, -1, -1]
    assert counts == {"skipped_without_reward": 1, "skipped_below_min_reward": 1, "skipped_tied": 2}


def test_the_best_reply_to_each_prompt_is_kept(root: Path) -> None:
    out, recorder, _ = attempt(root, "out", truncated="keep")
    examples = list(Pairs(out / "train.arrow", Example))
    assert {prompt_text(e.prompt) for e in examples} == {f"question {number}" for number in range(PROMPTS)}
    stats = json.loads((out / "stats.json").read_text())
    assert (stats["kept"], stats["replies"]) == (PROMPTS, PROMPTS * SAMPLES)
    # The mean over prompts of the best letter, and over all replies of any.
    assert stats["reward_best"] == np.mean(letter([], [e.response for e in examples]))
    assert stats["reward_best"] > stats["reward"] == stats["source/f"]
    assert recorder.points[-1]["best_of_n/kept"] == PROMPTS
    for name in ("heldout.arrow", "dataset.json"):
        assert (out / name).read_bytes() == (root / "data" / name).read_bytes()
    # SFT takes it.
    with recording():
        chats = xray.prepare()
        base = xray.fresh_base(chats)
        xray.sft(base, xray.best_of_n(base, chats, rewards=[same]))


@pytest.mark.parametrize("body", [best_of_n, preferences])
@pytest.mark.parametrize("name", ["__main__:<lambda>", "m:f.<locals>.<lambda>", "m:" + "f" * 400, "m:größe+x,y"])
def test_a_function_of_any_name_has_metrics(root: Path, body: Any, name: str) -> None:
    _, recorder, _ = attempt(root, "out", body, truncated="keep", function_name=name)
    keys = [key for point in recorder.points for key in point]
    assert any("/source/" in key for key in keys)
    # What MLflow allows.
    assert [key for key in keys if not re.fullmatch(r"[\w./ -]{1,250}", key)] == []


@pytest.mark.parametrize(
    ("fields", "function"),
    [
        ({}, lambda replies, answer: [1.0] * len(replies)),
        ({}, lambda a, b: [1.0] * len(b)),
        ({"gold": "no_such:f"}, letter),
        ({"rewards": [reward_term(verifier={"kind": "math", "column": "a"})]}, letter),
    ],
)
def test_rewards_that_cannot_score_are_refused_before_sampling(
    root: Path, fields: dict[str, Any], function: Any, monkeypatch: pytest.MonkeyPatch, message_texts: Messages
) -> None:
    monkeypatch.setattr(FakeGenerator, "remote", lambda *_: pytest.fail("sampled"))
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "no_such")
    with message_texts.raises(ValueError):
        attempt(root, "out", function=function, **fields)


def test_cut_replies_are_not_kept_unless_asked_for(root: Path) -> None:
    out, _, _ = attempt(root, "out")
    stats = json.loads((out / "stats.json").read_text())
    assert stats["left_out_truncated"] > 0
    other, _, _ = attempt(root, "other", truncated="keep")
    assert json.loads((other / "stats.json").read_text())["left_out_truncated"] == 0
    assert (out / "train.arrow").read_bytes() != (other / "train.arrow").read_bytes()


def test_a_reply_whose_score_failed_is_as_if_absent() -> None:
    replies = ["a", "b", "", "d", "e", "f"]
    done = _Done(
        replies, [True, True, True, False, True, True], [NAN, 2.0, 9.0, 9.0, 1.0, NAN], {"f": [NAN, 2, 9, 9, 1, NAN]}
    )
    groups = _groups(BestOfNConfig(samples=3), [[], []], done)
    assert groups.rewards.isfinite().tolist() == [[False, True, False], [False, True, False]]
    assert groups.stats == {
        "replies": 6,
        "left_out_score_failed": 2,
        "left_out_truncated": 1,
        "left_out_empty": 1,
        "source/f": 5.25,
        "reward": 1.5,
    }
    best, _ = kept(groups.rewards, None, skip_tied=False)
    assert [row[place] for row, place in zip(groups.replies, best.tolist(), strict=True)] == ["b", "e"]


def test_a_stage_that_keeps_no_reply_says_so(root: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no reply to any of the 12 prompts was kept \(.*'skipped_below_min_reward': 12.0"
    ):
        attempt(root, "low", min_reward=99.0, truncated="keep")
    with pytest.raises(ValueError, match=r"'skipped_tied': 12.0"):
        attempt(root, "tied", function=same, skip_tied=True, truncated="keep")


@pytest.mark.parametrize("body", [best_of_n, preferences])
def test_it_goes_on_to_the_same_bytes(root: Path, monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    monkeypatch.setattr(sampled_groups, "GENERATION_BATCH", 3 * SAMPLES)
    whole, recorder, generator = attempt(root, "whole", body)
    assert generator.calls == 4
    assert [snapshot.step for snapshot in recorder.snapshots] == [1, 2, 3]
    resumed, again, generator = attempt(root, "resumed", body, newest=recorder.snapshots[1])
    assert generator.calls == 2
    assert written(resumed) == written(whole)
    assert again.points == recorder.points


def test_best_and_worst_are_pairs(root: Path) -> None:
    out, _, _ = attempt(root, "pairs", preferences, truncated="keep", heldout_fraction=0.3)
    sides = [list(Pairs(out / side, PreferenceExample)) for side in ("train.arrow", "heldout.arrow")]
    found = {prompt_text(pair.prompt): pair for side in sides for pair in side}
    assert all(sides)
    kept_too = {
        prompt_text(e.prompt): e for e in Pairs(attempt(root, "best", truncated="keep")[0] / "train.arrow", Example)
    }
    for prompt, pair in found.items():
        # The same samples: what best_of_n keeps is what is chosen.
        assert pair.chosen == kept_too[prompt].response
        assert letter([], [pair.chosen]) > letter([], [pair.rejected])
    stats = json.loads((out / "stats.json").read_text())
    assert stats["pairs"] == len(found) == PROMPTS - stats["dropped_tied"]


def test_pairs_need_rewards() -> None:
    with recording():
        chats = xray.prepare()
        base = xray.fresh_base(chats)
        pairs = xray.preferences(policy=base, data=chats, source="rewards", rewards=[same])
        xray.dpo(base, pairs)
        with pytest.raises(xray.ConfigError, match="rewards: must have at least 1 item"):
            xray.preferences(policy=base, data=chats, source="rewards")
        with pytest.raises(xray.ConfigError, match="policy: is required with source 'rewards'"):
            xray.preferences(data=chats, source="rewards", rewards=[same])
        with pytest.raises(xray.ConfigError, match=r"preferences-2\.rewards: unknown field"):
            xray.preferences(policy=base, data=chats, source="gold", gold="vader", rewards=[same])


def test_gold_scores_label_the_two_replies_to_a_prompt(root: Path) -> None:
    fields = {"source": "gold", "gold": "own:letter", "num_pairs": PROMPTS, "sharpness": 1e6, "heldout_fraction": 0.3}
    out, _, generator = attempt(root, "out", preferences, function_name="own:letter", **fields)
    pairs = [pair for side in ("train", "heldout") for pair in Pairs(out / f"{side}.arrow", PreferenceExample)]
    assert len({prompt_text(pair.prompt) for pair in pairs}) == len(pairs) > PROMPTS / 2
    # The draw of a pair is all but certain at this sharpness.
    assert all(letter([], [pair.chosen]) > letter([], [pair.rejected]) for pair in pairs)
    assert json.loads((out / "stats.json").read_text())["label_noise"] == 0.0
    assert generator.calls == 1
    with pytest.raises(ValueError, match=r"^stage\.num_pairs: 13 is not allowed: the dataset has only 12 prompts$"):
        attempt(root, "few", preferences, function_name="own:letter", **fields | {"num_pairs": PROMPTS + 1})

"""What models and sources of reward are given of a rollout: four replies "an" to one prompt of two messages.

row 0  a n end      row 1  an end      row 2  a n end      row 3  a n, cut off
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.unit.methods.ppo.fake_model import FakeModel
from tests.unit.methods.ppo.sources import sources
from xray_runtime.cluster.model_spec import BranchSpec
from xray_runtime.data.batch import Rollout, Scores, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.sampling.agent_rows import BranchRow, encoded_branches
from xray_runtime.methods.common.sampling.scoring import RolloutScorer, own_texts
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.config import reward_term

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "question"}]


class Prompts(list[Any]):
    """As `UniquePrompts`, of a dataset without columns."""

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        return {}


class Policy(FakeModel):
    """Scores with the reward model that is its branch, and remembers what it was given."""

    def __init__(self) -> None:
        self.given = list[TextBatch]()

    def do_score(self, rows: TextBatch) -> Scores:
        self.given.append(rows)
        # In the last bits rows alike may differ; here by more.
        logprobs = Ragged.of([[-1.0]] * 4, np.float32)
        rewards = np.array([1.0, 2.0, 1.5, 1.25], np.float32)
        return Scores(logprobs=logprobs, ref_logprobs=logprobs, others={"rewards.0": rewards})


class Critic(FakeModel):
    def __init__(self) -> None:
        self.given = list[TextBatch]()

    def do_score(self, rows: TextBatch) -> Scores:
        self.given.append(rows)
        return Scores(values=np.zeros(len(rows.id)))


def test_a_reward_model_reads_whole_replies_and_a_function_the_messages(inputs: PPOInputs) -> None:
    tokenizer, told = load_tokenizer(inputs.policy.path), []

    def tell(prompts: list[str], replies: list[str], messages: Any, metadata: Any) -> list[float]:
        told.extend((*row, metadata["step"]) for row in zip(prompts, replies, messages, strict=True))
        return [0.0] * len(replies)

    reward = inputs.rewards[0].path
    rewards = sources(reward_term(model="rewards.0"), reward_term(function="tell"), models=[reward], tell=tell)
    rewards.branches["rewards.0"] = BranchSpec(reward)
    rewards.roles.remove("rewards.0")
    a, n, an, end = *tokenizer.convert_tokens_to_ids(["a", "n", "an"]), tokenizer.eos_token_id
    replies = [[a, n, end], [an, end], [a, n, end], [a, n]]
    policy, critic, prompts = Policy(), Critic(), Prompts([(ASKED, [5, 6])])
    models: dict[str, Any] = {"policy": policy, "critic": critic}
    scorer = RolloutScorer(models, rewards, tokenizer, (end,), prompts)  # type: ignore[arg-type]
    zeros = np.zeros(4, np.int64)
    rollout = Rollout(
        response_ids=Ragged.of(replies),
        rollout_logprobs=Ragged.of(replies),
        ended=np.array([True, True, True, False]),
        **dict.fromkeys(("seed", "version", "prompt"), zeros),
    )
    scored = scorer.score(rollout, 3, first_id=8)
    [given] = policy.given
    # The end that was added to a reply is marked: what else the policy says is of what it sampled.
    assert [ids.tolist() for ids in given.input_ids] == [[5, 6, *(r if end in r else [*r, end])] for r in replies]
    assert given.added_ends.tolist() == [False, False, False, True]
    assert [ids.tolist() for ids in scored.text.input_ids] == [[5, 6, *reply] for reply in replies]
    assert given.id.tolist() == scored.text.id.tolist() == [8, 9, 10, 11]
    # The critic reads what was sampled.
    [seen] = critic.given
    assert [ids.tolist() for ids in seen.input_ids] == [[5, 6, *reply] for reply in replies]
    assert told == [("be brief\nquestion", "an", ASKED, 3)] * 4
    # Alike are rows whose whole tokens are, not those that read the same.
    assert scored.sources.values["rewards.0"].tolist() == [1.0, 2.0, 1.0, 1.0]


def test_each_turn_of_each_branch_is_a_line_of_the_policys_own_text(inputs: PPOInputs) -> None:
    """The second branch begins with a reply, as the first one ends."""
    tokenizer = load_tokenizer(inputs.policy.path)
    a, n, end = *tokenizer.convert_tokens_to_ids(["a", "n"]), tokenizer.eos_token_id
    reply, mask = [a, end, n, n, end, n, end], [True, True, False, True, True, True, True]
    branches = encoded_branches(
        [
            BranchRow([5], reply[:5], [0.0] * 5, mask[:5], [0] * 5),
            BranchRow([5, a, n], reply[5:], [0.0] * 2, mask[5:], [0] * 2),
        ]
    )
    numbers, texts = np.zeros(1, np.int64), np.array([""])
    rollout = Rollout(
        response_ids=Ragged.of([reply]),
        rollout_logprobs=Ragged.of([reply]),
        ended=np.array([True]),
        **dict.fromkeys(("seed", "version", "prompt", "turns", "episode_reward"), numbers),
        prompt_ids=Ragged.of([[5]]),
        response_mask=Ragged.of([mask], np.bool_),
        turn_rewards=Ragged.of([[0.0] * 7]),
        **dict.fromkeys(("failure", "info", "answers"), texts),
        branches=Ragged.of([branches]),
    )
    assert own_texts(tokenizer, rollout) == ["a\nn\nn"]
    whole = rollout.with_columns(branches=None)
    assert own_texts(tokenizer, whole) == ["a\nnn"]

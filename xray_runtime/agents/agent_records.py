"""The record of an agent's episode: in the journal and the ledger (`answers`), and from there into a rollout.

    {"calls": [{"key", "parent", "prompt", "seed", "ids", "ended", "versions", "is_trained", "options",
                "messages"}],
     "trained": [keys], "reward", "info", "failure", "counts"}

A call's `prompt` and `messages` leave out those of its parent. A failure begins with its sort: `broke`, `unusable` or
`infrastructure` (`agents.outcomes`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.agents.episode import AgentEpisode, call_from_json
from xray_runtime.agents.outcomes import Outcome
from xray_runtime.agents.request import before_stop, read_calls as found_calls
from xray_runtime.agents.segments import PolicyCall, call_id, rows
from xray_runtime.data.agent_conversations import in_order
from xray_runtime.data.batch import Rollout
from xray_runtime.data.pairs import Example, Messages
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.sampling.agent_rows import BranchRow, encoded_branches
from xray_runtime.methods.common.sampling.episode import shortened

Record = dict[str, Any]
EpisodeKey = tuple[str, int]
"""(rollout, row) of an episode."""

AGENT = "agent"
"""The journal's source."""
SORTS = {"broke": "broke", "unusable": "failed_unusable", "infrastructure": "failed_infrastructure"}
"""Sort of failure → its metric."""


@dataclass(frozen=True)
class Planned:
    """An episode to play."""

    name: str
    """In its rollout; seeds derive from it."""
    rollout: str
    row: int
    task: dict[str, Any]
    seed: int
    """The task's, shared by a group."""
    prompt: list[int]
    keep: bool

    def key(self, *parts: Any) -> str:
        return journal_key(self.rollout, self.row, *parts)


@dataclass(frozen=True)
class Played:
    """An episode that has ended."""

    record: Record
    calls: list[PolicyCall]
    """With log-probabilities."""
    ran_again: int = 0
    """How often infrastructure failed, so that the agent ran again."""

    def version(self, default: int) -> int:
        """The oldest version of the policy among the calls; `default` if there are none."""
        return min((call.version for call in self.calls), default=default)


def journal_key(*parts: Any) -> str:
    return hashlib.sha256(repr((AGENT, *parts)).encode()).hexdigest()[:32]


def journal_entry(key: str, step: int, **content: Any) -> dict[str, Any]:
    return {"key": key, "source": AGENT, "step": step, **content}


def record_of(episode: AgentEpisode, outcome: Outcome) -> Record:
    trained, failure = sorted(episode.trained()), _failure(episode, outcome)
    branches = max(0, len(rows(episode.calls(), frozenset(trained))) - 1)
    return {
        "calls": written_calls(episode.calls()),
        "trained": trained,
        "reward": None if failure else episode.reward,
        "info": episode.info,
        "failure": shortened(failure),
        "counts": episode.counts | {"branches": branches},
    }


def written_calls(calls: Sequence[PolicyCall]) -> list[dict[str, Any]]:
    """Calls as JSON, in an order that does not depend on time."""
    by_key = {call.key: call for call in calls}
    written = []
    for call in sorted(calls, key=lambda call: call.key):
        known = len(by_key[call.parent].tokens) if call.parent is not None else 0
        names = ("key", "parent", "seed", "ids", "ended", "versions", "is_trained", "options", "messages")
        written.append({name: getattr(call, name) for name in names} | {"prompt": call.prompt[known:]})
    return written


def read_calls(record: Mapping[str, Any]) -> dict[str, PolicyCall]:
    """The calls of a record by key; without log-probabilities."""
    written, calls = {call["key"]: call for call in record["calls"]}, dict[str, PolicyCall]()

    def read(key: str) -> PolicyCall:
        if key not in calls:
            given = written[key]
            before = read(given["parent"]).tokens if given["parent"] is not None else []
            prompt, logprobs = before + given["prompt"], [0.0] * len(given["ids"])
            calls[key] = call_from_json(given | {"prompt": prompt, "logprobs": logprobs})
        return calls[key]

    for key in written:
        read(key)
    return calls


def agent_examples(record: Record, decode: Callable[[list[int]], str], name: str) -> Iterator[Example]:
    """Each call in the loss as a row for SFT of the conversation `name`: its history in messages, and the reply."""
    histories: dict[str | None, Messages] = {None: []}
    for number, (call, _) in enumerate(in_order(record)):
        messages = [*histories[call["parent"]], *call["messages"]]
        if "prompt" in messages[0]:
            continue  # a completion has no messages
        tools = messages[0].get("tools")
        text = before_stop(decode(call["ids"]), call["options"].get("stop", ()))
        text, calls = found_calls(text) if tools else (text, [])
        known = sum(len(message.get("tool_calls") or ()) for message in messages)
        numbers = enumerate(calls, start=known)
        tool_calls = [{"id": call_id(n), "type": "function", "function": each} for n, each in numbers] or None
        reply = {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})
        histories[call["key"]] = [*messages, reply]
        if call["key"] in record["trained"]:
            yield Example(f"{name}-{number}", name, messages, text, tool_calls)


def write_episodes(path: Path, records: Mapping[EpisodeKey, Record]) -> None:
    """Write the records of rollouts that no ledger has."""
    lines = [{"rollout": rollout, "row": row, "record": records[rollout, row]} for rollout, row in sorted(records)]
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def read_episodes(path: Path) -> dict[EpisodeKey, Record]:
    """The records in a file, empty if there is none. Raises ValueError if it is damaged."""
    if not path.exists():
        return {}
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {(line["rollout"], line["row"]): line["record"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error})") from None


def rollout_of_records(planned: Sequence[Planned], played: Sequence[Played], end_of_turn: int, version: int) -> Rollout:
    """Episodes as the rows of a rollout; `version` is that of an episode without calls."""
    split = [_rows(episode, plan.prompt, end_of_turn) for plan, episode in zip(planned, played, strict=True)]
    records = [episode.record for episode in played]
    failures = [record["failure"] for record in records]
    rewards = [np.nan if record["failure"] else record["reward"] for record in records]
    masks = [[own for row in branches for own in row.sampled] for branches in split]
    placed = [_on_last(mask, reward) for mask, reward in zip(masks, rewards, strict=True)]
    oldest = [episode.version(version) for episode in played]
    versions = [
        [first if each is None else each for row in branches for each in row.versions]
        for branches, first in zip(split, oldest, strict=True)
    ]
    return Rollout(
        response_ids=Ragged.of([i for row in branches for i in row.ids] for branches in split),
        rollout_logprobs=Ragged.of(([p for row in branches for p in row.logprobs] for branches in split), np.float32),
        ended=np.array([not failure for failure in failures]),
        seed=np.array([plan.seed for plan in planned]),
        version=np.array(oldest),
        token_versions=Ragged.of(versions, np.int32),
        prompt=np.array([plan.row for plan in planned]),
        prompt_ids=Ragged.of(branches[0].prompt for branches in split),
        response_mask=Ragged.of(masks, np.bool_),
        turn_rewards=Ragged.of(placed, np.float32),
        turns=np.array([len(record["trained"]) for record in records], np.int32),
        episode_reward=np.array(rewards, np.float64),
        failure=np.array(failures, object),
        info=np.array([json.dumps(record["info"], sort_keys=True) for record in records], object),
        answers=np.array([json.dumps(record, sort_keys=True) for record in records], object),
        branches=Ragged.of(encoded_branches(branches) for branches in split),
        ran_again=np.array([episode.ran_again for episode in played], np.int32),
    )


def agent_metrics(episodes: Rollout) -> dict[str, float]:
    """`rollout/agent/NAME`: counts over the episodes."""
    records = [json.loads(text) for text in episodes.answers.tolist()]
    totals = dict.fromkeys(SORTS.values(), 0.0) | {SORTS["infrastructure"]: float(episodes.ran_again.sum())}
    for record in records:
        for name, count in record["counts"].items():
            totals[name] = totals.get(name, 0.0) + count
        if record["failure"]:
            totals[SORTS[record["failure"].partition(":")[0]]] += 1
    return {f"rollout/agent/{name}": count for name, count in totals.items()}


def _rows(episode: Played, prompt: Sequence[int], end_of_turn: int) -> list[BranchRow]:
    branches = rows(episode.calls, frozenset(episode.record["trained"]))
    # A row must have a token; nothing learns from a row without a reward.
    return branches or [BranchRow(list(prompt), [end_of_turn], [0.0], [True], [None])]


def _on_last(mask: list[bool], reward: float) -> list[float]:
    """The reward on the last sampled token."""
    placed = [0.0] * len(mask)
    placed[max(place for place, is_sampled in enumerate(mask) if is_sampled)] = 0.0 if np.isnan(reward) else reward
    return placed


def _failure(episode: AgentEpisode, outcome: Outcome) -> str:
    """Sort and reason; empty if the episode has a reward to train on."""
    reasons: list[tuple[bool, Callable[[], str]]] = [
        (episode.broken is not None, lambda: f"broke: {episode.broken}"),
        (episode.unusable is not None, lambda: f"unusable: {episode.unusable}"),
        (not episode.trained(), lambda: "broke: the agent made no call to train on"),
        (episode.reward is not None and episode.is_over, lambda: ""),
        (outcome.infrastructure is not None, lambda: f"infrastructure: {outcome.infrastructure}"),
        (outcome.broken is not None, lambda: f"broke: {outcome.broken}"),
    ]
    return next((reason() for holds, reason in reasons if holds), "broke: the agent ended without a reward")

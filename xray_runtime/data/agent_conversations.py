"""The record of an agent's episode (`agents.agent_records`) as a conversation with branches, for display."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xray_runtime.data.pairs import message_text
from xray_runtime.data.pictures import shown_text


def in_order(record: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """(call, whether it begins a branch) of each call, in the order of the rows that are trained on."""
    children: dict[str | None, list[dict[str, Any]]] = {}
    for call in sorted(record["calls"], key=lambda call: str(call["key"])):
        children.setdefault(call["parent"], []).append(call)
    waiting = [(call, number > 0) for number, call in enumerate(children.get(None, []))][::-1]
    while waiting:
        call, begins = waiting.pop()
        yield call, begins
        waiting += [(child, number > 0) for number, child in enumerate(children.get(call["key"], []))][::-1]


def conversation(record: Mapping[str, Any], decode: Callable[[list[int]], str], version: int) -> list[dict[str, Any]]:
    """The calls, numbered from 1; `after` is the call that each continues. `version` is of the policy that sampled."""
    numbers: dict[str | None, int | None] = {None: None}
    messages = []
    for number, (call, begins) in enumerate(in_order(record), start=1):
        numbers[call["key"]] = number
        messages.append(
            {
                "call": number,
                "after": numbers[call["parent"]],
                "branch": begins,
                "seed": call["seed"],
                "version": min((v for v, _ in call.get("versions", ())), default=call.get("version", version)),
                "messages": call["messages"],
                "reply": decode(call["ids"]),
                "ended": call["ended"],
                "in_loss": call["key"] in record["trained"],
            }
        )
    return messages


def conversation_text(record: Mapping[str, Any], calls: list[dict[str, Any]]) -> str:
    """The calls of `conversation`, then how the episode ended, one line each."""
    lines = []
    for call in calls:
        after = f" after call {call['after']}" if call["after"] not in (None, call["call"] - 1) else ""
        branch = ", a branch" if call["branch"] else ""
        lines.append(f"call {call['call']}{after}{branch} (seed {call['seed']}, version {call['version']})")
        lines += [f"  {_message(message)}" for message in call["messages"]]
        notes = ["" if call["ended"] else "cut off", "" if call["in_loss"] else "not in the loss"]
        lines.append("; ".join(filter(None, [f"  policy: {call['reply']}", *notes])))
    counts = [f"{name.replace('_', ' ')} {count}" for name, count in sorted(record["counts"].items()) if count]
    end = f"failed, {record['failure']}" if record["failure"] else f"reward {record['reward']:g}"
    return "\n".join([*lines, "; ".join([end, *counts])])


def _message(message: Mapping[str, Any]) -> str:
    if "prompt" in message:
        return f"prompt: {message['prompt']}"
    return f"{message['role']}: {message_text(shown_text(message), message.get('tool_calls'))}"

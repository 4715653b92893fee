"""Conversations of many turns through real engines: files of tool calls, SFT on them, GRPO over Gymnasium's API."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.component.processes import open_models
from tests.unit.agents.environments import caller, samples
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.conversations import ConversationTokens
from xray_runtime.data.pairs import TRAIN
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.config.allowed_imports import VARIABLE
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.kind import NoInputs
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.methods.common.environment import EnvironmentConfig
from xray_runtime.methods.ppo import body as ppo
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.prepare import body as prepare
from xray_runtime.methods.prepare.config import DataConfig
from xray_runtime.methods.sft import body as sft
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.methods.sft.kind import SFTInputs
from xray_runtime.models.causal_lm import fresh_llama, load_tokenizer, save_model

RUNTIME = RuntimeConfig(threads=2, device="cpu")


def trl(number: int) -> dict[str, Any]:
    """A conversation as TRL takes it: arguments are objects, tools a column."""
    [asked, _, _, said] = caller.conversation()
    tools = asked.pop("tools")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": number}}}
    messages = [
        asked | {"content": f"1 and {number}"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(1 + number)},
        said | {"content": str(1 + number)},
    ]
    # By its name a conversation is held out of both files, or of none.
    return {"conversation_id": str(number), "messages": messages, "tools": tools}


def openai(number: int) -> dict[str, Any]:
    """The same as OpenAI's server has it: arguments are text, calls have ids, nothing said is null."""
    row = trl(number)
    [asked, calling, answer, said] = row["messages"]
    [call] = calling["tool_calls"]
    in_text = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
    calling = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call | {"id": f"call_{number}", "function": in_text}],
    }
    answer = {"role": "tool", "tool_call_id": f"call_{number}", "content": answer["content"]}
    return row | {"messages": [asked, calling, answer, said]}


def done(kind: Any, config: Any, inputs: Any, out: Path) -> tuple[Path, FakeRecorder]:
    """What the body of a stage leaves, and reports."""
    log_dir = out.with_name(f"{out.name}-log")
    for directory in (out, log_dir):
        directory.mkdir(parents=True)
    recorder = FakeRecorder(log_dir)
    opened = functools.partial(open_models, RUNTIME, out.parent / "logs")
    kind.run(Stage(out.name, 3, config, inputs, RUNTIME, opened), out, recorder)
    return out, recorder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same conversations, prepared from a file of each form."""
    found, directory = {}, tmp_path_factory.mktemp("data")
    for form in (trl, openai):
        source = directory / f"{form.__name__}.jsonl"
        source.write_text("".join(json.dumps(form(number)) + "\n" for number in range(40)))
        config = DataConfig(source=str(source), context_messages=None, min_chars=1, max_prompt_tokens=400)
        found[form.__name__], _ = done(prepare, config, NoInputs(), directory / form.__name__)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = train_tokenizer([str(trl(number)) for number in range(40)], 500)
    directory = tmp_path_factory.mktemp("base")
    save_model(fresh_llama(caller.SMALL, tokenizer, seed=1), tokenizer, directory)
    return directory


def test_both_forms_are_the_same_tokens(data: dict[str, Path], base: Path) -> None:
    tokenizer, found = load_tokenizer(base), {}
    for form, dataset in data.items():
        rows = ConversationTokens(dataset / TRAIN, tokenizer, 400, 64, process_seal())
        taken = rows.take(range(len(rows)))
        found[form] = [(i.tolist(), m.tolist()) for i, m in zip(taken.input_ids, taken.response_mask, strict=True)]
    assert len(found["trl"]) > 30
    assert found["trl"] == found["openai"]
    for ids, mask in found["trl"]:
        # What the assistant said, a call and a text, and nothing else.
        said = tokenizer.decode([token for token, is_said in zip(ids[-len(mask) :], mask, strict=True) if is_said])
        call = r'<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": (\d+)}}\n</tool_call>'
        words = re.fullmatch(rf"{call}<\|end\|>(\d+)<\|end\|>", said)
        assert words is not None, said
        assert int(words[2]) == 1 + int(words[1])


def test_calls_are_learned_and_a_gymnasium_environment_is_played(
    cluster: None, data: dict[str, Path], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, recorder = done(
        sft,
        SFTConfig(steps=40, batch_size=8, lr=3e-3, max_response_tokens=64),
        SFTInputs(Model(base), Dataset(data["openai"])),
        tmp_path / "sft",
    )
    losses = [point["sft/loss"] for point in recorder.points if "sft/loss" in point]
    assert losses[-1] < losses[0] / 2

    monkeypatch.setenv(VARIABLE, samples.__name__)
    config = PPOConfig(
        method="grpo",
        iterations=2,
        prompts_per_iteration=2,
        samples_per_prompt=4,
        minibatch_size=4,
        lr=1e-3,
        max_new_tokens=16,
        reward_scaling="none",
        environment=EnvironmentConfig(
            path=f"{samples.__name__}:{samples.spelling.__name__}", max_turns=3, max_tokens=150, num_workers=1
        ),
        generator=GeneratorConfig(engine="transformers"),
    )
    policy, recorder = done(ppo, config, PPOInputs(Model(tuned), Dataset(data["trl"])), tmp_path / "ppo")
    for point in recorder.points:
        # Each letter is paid 0.1.
        assert point["rollout/info/letters"] > 0
        assert point["rollout/info/letters"] == pytest.approx(10 * point["reward/source/environment/mean"])
        assert 1 < point["rollout/turns"] <= 3
        assert all(math.isfinite(value) for value in point.values())
    before, after = (load_file(directory / "model.safetensors") for directory in (tuned, policy))
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())

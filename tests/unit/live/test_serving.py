"""Which checkpoint is served: REF, the champion's moves, and what its audit refuses."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.commands import serve_command
from tests.unit.trust.promoting import promoted, second_candidate
from tests.unit.trust.synthetic import NAME
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.choice import (
    LONGEST_WAIT_S,
    SETTLE_SECONDS,
    Follower,
    champion,
    fixed,
    followed,
    require_sound,
)


def test_references_that_follow_the_champion(fresh: Callable[[], Path]) -> None:
    output = fresh()
    assert [followed(ref, output) for ref in ("ppo-2", "abc123", f"{NAME}/1", f"{NAME}@candidate")] == [None] * 4
    for reference in ("champion", f"{NAME}@champion"):
        with pytest.raises(ConfigError, match="has no such champion"):
            followed(reference, output)
        with pytest.raises(ConfigError, match="needs --output DIR"):
            followed(reference, None)
    promoted(output, "ppo-2", min_win_rate=None)
    assert followed("champion", output) == followed(f"{NAME}@champion", output) == NAME
    with pytest.raises(ConfigError, match="has no such champion"):
        followed("other@champion", output)


def test_names_lead_to_the_checkpoint(fresh: Callable[[], Path]) -> None:
    output = fresh()
    promoted(output, "ppo-2", min_win_rate=None)
    choice = champion(NAME, output, None)
    assert choice.names[0] == f"{NAME}/1"
    assert {resolve(name, output, None)[1].sha256 for name in choice.names[:2]} == {choice.node.sha256}
    assert fixed("ppo-1", output, None).names[2:] == ("ppo-1",)
    assert fixed(f"{NAME}@candidate", output, None).names[2:] == ("ppo-2", f"{NAME}@candidate")
    with pytest.raises(ConfigError, match="it is a RewardModel; must be a Model"):
        fixed("reward", output, None)


def test_a_champion_that_moves_is_followed_once_it_is_sound(fresh: Callable[[], Path]) -> None:
    output, now = fresh(), 0.0
    promoted(output, "ppo-2", min_win_rate=None)
    first = champion(NAME, output, None)
    require_sound(first, None)
    follower = Follower(NAME, output, None, None, first.node.sha256, clock=lambda: now)
    assert follower.next_champion() is None
    stage = second_candidate(output)
    assert follower.next_champion() is None
    promoted(output, stage, "compare", min_win_rate=None, max_regression=0.2)
    weights = resolve(stage, output, None)[1].directory / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[::-1])
    # A promotion may still be at work.
    assert follower.next_champion() is None
    now = SETTLE_SECONDS
    with pytest.raises(NotServedError, match=r"ppo-3 .*: the audit found file-changed \(ppo-3"):
        follower.next_champion()
    for _ in range(20):
        now += LONGEST_WAIT_S
        assert follower.next_champion() is None
    weights.write_bytes(sound)
    assert follower.next_champion() is None
    now += LONGEST_WAIT_S
    news = follower.next_champion()
    assert news is not None
    assert news.names[0] == f"{NAME}/2"
    follower.serving = news.node.sha256
    now += LONGEST_WAIT_S
    assert follower.next_champion() is None


def test_bad_input_is_one_line_and_exit_code_2(fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    output = fresh()
    monkeypatch.delenv("XRAY_API_KEY", raising=False)
    refused = "error: REF: 'champion' is not allowed: {} has no such champion; promote one with `xray promote`"
    assert serve_command(output) == (2, refused.format(output))
    refused = "error: --host: '0.0.0.0' is not allowed without a key: set XRAY_API_KEY"
    assert serve_command(output, "ppo-2", "--host", "0.0.0.0") == (2, refused)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = f"error: --port: {port} is not allowed: Address already in use on 127.0.0.1"
        assert serve_command(output, "ppo-2", "--port", str(port)) == (2, refused)
    refused = "error: --tensor-parallel: 2 is not allowed: must divide the model's 1 attention heads"
    assert serve_command(output, "ppo-2", "--tensor-parallel", "2") == (2, refused)
    assert serve_command(output, "nothing")[0] == 2


def test_a_changed_file_is_refused_with_exit_code_1(fresh: Callable[[], Path]) -> None:
    output = fresh()
    weights = resolve("sft", output, None)[1].directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    code, said = serve_command(output, "ppo-2")
    assert code == 1
    assert re.fullmatch(r"refused: ppo-2 \w+: the audit found file-changed \(sft \w+\)", said)

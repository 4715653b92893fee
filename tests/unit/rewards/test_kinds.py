"""Kinds of reward: found by the field that chooses them, whole or refused, also those of other packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.kernel.plugs import Registry
from xray_runtime.rewards.config import KINDS, reward_kinds, reward_term
from xray_runtime.rewards.kind import ExternalTerm
from xray_runtime.rewards.term import Recording, Term

ROOT = Path(__file__).parents[3]
STRANGER = """
import json
from tests.unit.methods.ppo.sources import sources
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.rewards.config import reward_term
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.rewards.external_rewards import recorded_sources
from xray_runtime.cluster.protocols import Ready

written = {"rewards": [{"brevity": {"max_words": 4}, "weight": 2.0}]}
config = validate_as(LifecycleConfig, written)
assert config.model_dump()["rewards"] == [{"weight": 2.0, "when": None, "brevity": {"max_words": 4}}]
assert "BrevityTerm" in json.dumps(PPOConfig.model_json_schema())
try:
    validate_as(LifecycleConfig, {"rewards": [{"brevity": {"max_word": 4}}]})
except ConfigError as error:
    print(error)
[term] = config.rewards
found = sources(term)
prompts = [[{"role": "user", "content": "p"}]] * 3
scores = found.scores([], prompts, ["", "a b c", "<think>\\nlong\\n</think>\\n\\na b c d e"], {})
print(found.scaled(scores).tolist(), term.plugs(), recorded_sources(config))
"""


def test_a_kind_of_another_package_is_a_file_and_a_line(tmp_path: Path) -> None:
    """As CONTRIBUTING.md shows it."""
    [code] = re.findall(r"```python\n(\"\"\"Short replies.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "brevity.py").write_text(code)
    (tmp_path / "mine-1.dist-info").mkdir()
    (tmp_path / "mine-1.dist-info" / "METADATA").write_text("Name: mine\nVersion: 1\n")
    points = "[xray.rewards]\nbrevity = my_package.brevity\n"
    (tmp_path / "mine-1.dist-info" / "entry_points.txt").write_text(points)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}){STRANGER}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rewards.0.brevity.max_word: unknown field (did you mean max_words?); allowed here: max_words",
        "[2.0, 0.5, 0.0] ('my_package.brevity',) []",
    ]


class Whole(ExternalTerm, field="whole", recording=Recording.COMPUTED):
    whole: str


class Unrecorded(ExternalTerm, field="unrecorded", recording="no"):  # type: ignore[arg-type]
    unrecorded: str


class Misnamed(ExternalTerm, field="other", recording=Recording.COMPUTED):
    misnamed: str


class Bare(Term):
    bare: str


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("whole", Whole, None),
        ("unrecorded", Unrecorded, "must say how its answers are recorded: recording=Recording.COMPUTED"),
        ("misnamed", Misnamed, "must be a kind of reward with the field 'misnamed'"),
        ("bare", Bare, "must be a kind of reward with the field 'bare'"),
        ("text", "text", "must be a kind of reward with the field 'text'"),
    ],
)
def test_a_kind_that_is_not_whole_is_refused(
    name: str, kind: Any, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"kinds_{name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{name}.py").write_text(f"from {__name__} import {name.title()} as TERM\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type[Term]] = Registry("reward", package, "TERM", "xray.none")
    if why is None:
        assert reward_kinds(registry) == {name: kind}
        return
    with pytest.raises(ValueError, match=f"^reward '{name}': .*{re.escape(why)}"):
        reward_kinds(registry)


Text = "text"


def test_forgetting_how_answers_are_recorded_is_an_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'recording'"):

        class Forgetful(ExternalTerm, field="forgetful"):  # type: ignore[call-arg]
            forgetful: str


def test_kinds_and_how_they_are_recorded() -> None:
    recorded = {name for name, kind in KINDS.items() if kind.recording is Recording.RECORDED}
    assert recorded == {"judge", "service"}
    assert set(KINDS) == {"function", "judge", "model", "models", "service", "verifier"}


def test_a_kind_that_is_null_was_not_chosen() -> None:
    assert reward_term(function="f", verifier=None, model=None) == reward_term(function="f")

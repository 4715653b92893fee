"""What help() says of a stage kind."""

from __future__ import annotations

import inspect
import io
import pydoc
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

import xray
from xray_runtime.kernel.graph import kinds
from xray_runtime.kernel.graph.kind import KINDS, StageKind

SHIPPED = kinds.shipped()


def shown(kind: object) -> str:
    out = io.StringIO()
    pydoc.Helper(output=out).help(kind)
    return pydoc.plain(out.getvalue())


def test_inputs_and_fields_with_bounds_and_descriptions() -> None:
    text = shown(xray.ppo)
    inputs = "policy, prompts, reference=None, rewards=None, judges=None, champion=None, teacher=None"
    assert f"xray.ppo({inputs}, *, name=None, **fields)" in text
    assert "reference: Model, optional\n          Reference of the KL penalty" in text
    assert "rewards: any number of RewardModel" in text
    assert "clip_range: number, > 0.0, ≤ 1.0; default `0.2`\n          The policy ratio is clipped to 1 ± this." in text
    assert "One kind of stage" not in text


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.name)
def test_every_kind_says_what_it_is_for(kind: StageKind) -> None:
    text = inspect.getdoc(kind) or ""
    assert text.splitlines()[2], "the module of its body says what the kind is for"
    assert all(f"\n  {name}: " in text for name in {*kind.roles, *kind.all_field_names})
    assert {*kind.roles, *kind.all_field_names, "name"} == set(inspect.signature(kind).parameters)


def test_a_choice_of_sections_is_told_apart() -> None:
    text = shown(xray.preferences)
    assert "Fields with source='gold', by name:" in text
    assert "Fields with source='ratings', by name:" in text


class _Config(xray.Section):
    share: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share to keep."""


@dataclass(frozen=True)
class _Inputs:
    data: xray.Dataset
    """What is read."""


def test_a_kind_of_the_users_own_is_described_too() -> None:
    @xray.stage_kind("described_here", config=_Config, inputs=_Inputs, output=xray.Dataset)
    def body(stage: xray.Stage[_Config, _Inputs], out: Path, recorder: xray.Recorder) -> int:
        """Keeps a share."""
        return 0

    try:
        text = shown(body)
        assert "Keeps a share." in text
        assert "data: Dataset\n          What is read." in text
        assert "share: number, > 0.0, ≤ 1.0; required\n          Share to keep." in text
    finally:
        del KINDS["described_here"]


def test_the_class_itself_keeps_its_own_text() -> None:
    assert StageKind.__doc__ == "One kind of stage."
    assert next(iter(inspect.signature(StageKind).parameters)) == "name"

"""What a stage's task refuses before it computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xray.tasks.spec import StageSpec
from xray.tasks.stage import _check_code
from xray.tasks.stage_job import check_numbers
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.graph.stage_identity import code_of
from xray_runtime.kernel.store.identity import OTHER_ENVIRONMENT
from xray_runtime.methods.prepare.kind import PREPARE


def test_a_stage_on_a_node_with_other_code_is_refused() -> None:
    code = code_of(PREPARE)
    spec = StageSpec(
        name="chats",
        kind="prepare",
        module=PREPARE.registered_in,
        config={},
        seed=0,
        runtime=RuntimeConfig(),
        code=code,
    )
    _check_code(spec, PREPARE)
    there = f"^chats on .*: {re.escape(OTHER_ENVIRONMENT)}"
    for other in ({"xray_runtime.kernel.seeding": "0" * 64}, {"xray_runtime.only_there": "0" * 64}):
        with pytest.raises(ConfigError, match=rf"{there} \({re.escape(next(iter(other)))}\)$"):
            _check_code(spec.model_copy(update={"code": code | other}), PREPARE)


def test_a_weight_that_is_not_finite_is_not_published(tmp_path: Path) -> None:
    check_numbers("sft", tmp_path, None)
    (tmp_path / "critic").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    check_numbers("sft", tmp_path, None)
    save_file({"a": torch.tensor([1.0, torch.inf])}, tmp_path / "critic" / "model.safetensors")
    with pytest.raises(NonFiniteError, match=r"^sft: critic/model\.safetensors: a has numbers that are not finite$"):
        check_numbers("sft", tmp_path, None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_result_that_is_not_finite_is_not_published(tmp_path: Path, number: str) -> None:
    check_numbers("evaluate", tmp_path, "evaluation.json")
    (tmp_path / "evaluation.json").write_text('{"kl": 1.5, "text": "NaN", "win_rate": null}')
    (tmp_path / "samples.json").write_text('[{"reward": NaN}]')
    check_numbers("evaluate", tmp_path, "evaluation.json")
    (tmp_path / "evaluation.json").write_text(f'{{"judges": {{"gold": {{"delta": {number}}}}}}}')
    with pytest.raises(NonFiniteError, match=rf"^evaluate: evaluation\.json: it has the number {number}$"):
        check_numbers("evaluate", tmp_path, "evaluation.json")

"""Where bfloat16 has no instructions, a config that asks for it is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.methods.loading import load_config
from xray_runtime.ops.planner.precision import has_bfloat16, slow_precision

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("processor\t: 0\nflags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor\t: 0\n", None),
    ],
)
def test_instructions_as_linux_names_them(tmp_path: Path, text: str, expected: bool | None) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert has_bfloat16(tmp_path / "cpuinfo") is expected
    assert has_bfloat16(tmp_path / "absent") is None


def test_a_config_that_asks_for_it_is_told(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("flags : avx2\n")
    new.write_text("flags : avx2 amx_bf16\n")
    smollm2, tiny = (recorded_graph(load_config(CONFIGS / f"{name}.yaml")) for name in ("smollm2", "tiny"))
    said = slow_precision(smollm2, "cpu", old)
    assert said is not None
    assert "sft.engine.precision, reward.engine.precision, ppo-1.engine.precision" in said
    assert "evaluate.frozen.precision" in said
    for config, device, cpuinfo in ((smollm2, "cpu", new), (smollm2, "cuda", old), (tiny, "cpu", old)):
        assert slow_precision(config, device, cpuinfo) is None

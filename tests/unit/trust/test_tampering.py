"""Every falsification is found and named; what is untouched is sound.

XRAY_TAMPER_CASES=500 runs the long form.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.synthetic import GRAPHS, Lifecycle
from tests.unit.trust.tampering import CASES, COUNT
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust.audit.checkpoints import Audit, audit


def audited(output: Path) -> Audit:
    return audit(open_lineage_store(output, None))


def codes(result: Audit) -> set[str]:
    return {finding.code for finding in result.findings if finding.is_broken}


@pytest.mark.parametrize("seed", range(COUNT))
def test_tampering_is_found_and_named(seed: int, fresh: Callable[[], Path]) -> None:
    output = fresh()
    name = list(CASES)[seed % len(CASES)]
    expected = CASES[name](random.Random(seed), output)
    found = codes(audited(output))
    assert found & expected, f"{name}: expected one of {expected}, found {found}"


def test_an_untouched_lifecycle_is_sound_wherever_it_lies(untouched: Path, fresh: Callable[[], Path]) -> None:
    for output in (untouched, fresh()):
        result = audited(output)
        assert codes(result) == set()
        assert result.checkpoints == 8


@pytest.mark.parametrize("number", range(4 if COUNT < 500 else 20))
def test_other_lifecycles_are_sound_too(number: int, tmp_path: Path) -> None:
    """Of four graphs; with a second evaluation, or rebuilt after damage: nothing of it is a falsification."""
    graph = list(GRAPHS)[number % len(GRAPHS)]
    lifecycle = Lifecycle(tmp_path / f"run-{number}").whole(graph=graph)
    if number % 3:
        lifecycle.evaluate([f"question {i}" for i in range(52, 59)], lifecycle.policy)
        lifecycle.record()
    else:
        weights = lifecycle.done[lifecycle.policy].path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[::-1])
        Lifecycle(lifecycle.output).whole(graph=graph)
    assert codes(audited(lifecycle.output)) == set()


@pytest.mark.parametrize("first", [0, 49, 55])
def test_an_evaluation_on_training_prompts_is_found_though_properly_signed(first: int, tmp_path: Path) -> None:
    asked = [f"question {i}" for i in range(first, first + 4)]
    lifecycle = Lifecycle(tmp_path / "run", tracking=False).whole(asked)
    found = codes(audited(lifecycle.output))
    assert ("evaluation-overlap" in found) == (first < 50)
    assert ("evaluation-foreign" in found) == (first < 50)

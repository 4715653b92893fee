"""Bodies of stages, run in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.kernel.config.section import RuntimeConfig


def ran(
    body: Callable[..., int],
    root: Path,
    config: Any,
    inputs: Any,
    model: Callable[[str], Any] | None = None,
    roles: Collection[str] = (),
    name: str = "stage",
    seed: int = 7,
    functions: Mapping[str, Any] | None = None,
) -> tuple[Path, FakeRecorder]:
    """(a new directory below `root` with what the body wrote, recorder).

    Args:
        model: role → what stands for its WholeModel; None: the body opens none.
        roles: those that the body must open.
    """

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        assert model is not None
        assert set(specs) == set(roles)
        yield {role: model(role) for role in specs}

    out = root / f"out-{len(list(root.iterdir()))}"
    out.mkdir()
    recorder = FakeRecorder(out)
    stage: Stage[Any, Any] = Stage(name, seed, config, inputs, RuntimeConfig(), open_models, functions or {})
    body(stage, out, recorder)
    return out, recorder

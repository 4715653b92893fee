"""The progress of a stage, and the parts of work by which its models show that they live."""

from __future__ import annotations

from xray_runtime.cluster.progress import ProgressActor


def test_parts_add_up_until_the_next_progress() -> None:
    progress = ProgressActor()
    progress.alive("ppo", 3)  # of a stage that has reported nothing
    assert progress.read() == {}
    progress.report("ppo", 1, 9, "iterations", "reward 0.5")
    progress.alive("ppo", 3)
    progress.alive("ppo", 4)
    assert progress.read() == {"ppo": (1, 9, "iterations", "reward 0.5", 7)}
    progress.report("ppo", 2, 9, "iterations", "")
    assert progress.read() == {"ppo": (2, 9, "iterations", "", 0)}

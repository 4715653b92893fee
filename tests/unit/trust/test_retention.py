"""What pruning removes, and what it keeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.unit.trust.promoting import broken
from tests.unit.trust.synthetic import Lifecycle, decided
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.trust.retention import plan_prune, prune


def test_pruning_keeps_chains_whole(fresh: Callable[[], Path]) -> None:
    output = fresh()
    lifecycle = Lifecycle.resumed(output)
    lifecycle.add("trial", "ppo", {"model.safetensors": b"trial"}, {"policy": "ppo-1", "prompts": "prepare"})
    lifecycle.add("trial-2", "ppo", {"model.safetensors": b"trial 2"}, {"policy": "trial", "prompts": "prepare"})
    # Tokens of a dataset are no checkpoint, and go with it.
    tokens = [Path(f"{lifecycle.done[stage].path}.tokens-") for stage in ("prepare", "trial")]
    for directory in tokens:
        directory.mkdir()
    place = open_lineage_store(output, None)
    plan = plan_prune(place, [])
    assert [node.manifest.stage for node in plan.remove] == ["trial-2", "trial"]
    assert plan.bytes == len(b"trial") + len(b"trial 2")
    assert plan_prune(place, [resolve("trial-2", output, None)[1]]).remove == []
    prune(place, plan)
    assert [directory.exists() for directory in tokens] == [True, False]
    assert len(list((output / "checkpoints").iterdir())) == 8 + 1
    assert broken(output) == []
    chain = decided(output)
    said = [(d["action"], d["checkpoint"], d["note"]) for d in chain[1:]]
    assert said == [("prune", node.sha256, node.name) for node in plan.remove]


def test_a_comparison_stays_with_both_that_it_compares(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path, tracking=False).whole()
    life.add("ppo-3", "ppo", {"model.safetensors": b"3"}, {"policy": "ppo-1", "prompts": "prepare"})
    life.compare("ppo-3", "ppo-2", [f"question {i}" for i in range(51, 57)])

    def removed(*stages: str) -> list[str]:
        plan = plan_prune(open_lineage_store(tmp_path, None), [resolve(s, tmp_path, None)[1] for s in stages])
        assert len(plan.keep) + len(plan.remove) == len(life.done)
        return sorted(node.manifest.stage for node in plan.remove)

    assert removed("ppo-2", "ppo-3") == []
    assert removed("ppo-3") == ["compare", "evaluate", "ppo-2"]
    assert removed("ppo-2") == ["compare", "ppo-3"]


def test_a_broken_chain_is_pruned_and_kept_as_far_as_it_is_there(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path, tracking=False).whole()
    shutil.rmtree(life.done["base"].path)
    plan = plan_prune(open_lineage_store(tmp_path, None), [resolve("sft", tmp_path, None)[1]])
    assert [node.manifest.stage for node in plan.keep] == ["prepare", "sft"]
    assert len(plan.remove) == 5

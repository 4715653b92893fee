"""Every stage kind that X-ray ships, one file each, and how a kind is found by its name.

The files declare kinds and import no torch: bodies are named and imported when they run.
"""

from __future__ import annotations

import importlib

from xray_runtime.graph.kind import KINDS, StageKind
from xray_runtime.stages.base import BASE
from xray_runtime.stages.benchmark import BENCHMARK
from xray_runtime.stages.best_of_n import BEST_OF_N
from xray_runtime.stages.compare import COMPARE
from xray_runtime.stages.dpo import DPO
from xray_runtime.stages.evaluate import EVALUATE
from xray_runtime.stages.fresh_base import FRESH_BASE
from xray_runtime.stages.kto import KTO
from xray_runtime.stages.lm_eval import LM_EVAL
from xray_runtime.stages.ppo import PPO
from xray_runtime.stages.preferences import PREFERENCES
from xray_runtime.stages.prepare import PREPARE
from xray_runtime.stages.reward_base import REWARD_BASE
from xray_runtime.stages.reward_model import REWARD_MODEL
from xray_runtime.stages.sft import SFT
from xray_runtime.stages.split_preferences import SPLIT_PREFERENCES

__all__ = [
    "BASE",
    "BENCHMARK",
    "BEST_OF_N",
    "COMPARE",
    "DPO",
    "EVALUATE",
    "FRESH_BASE",
    "KTO",
    "LM_EVAL",
    "PPO",
    "PREFERENCES",
    "PREPARE",
    "REWARD_BASE",
    "REWARD_MODEL",
    "SFT",
    "SPLIT_PREFERENCES",
    "find_kind",
    "import_kind",
]

USES: tuple[str, ...] = ()
"""None of the modules that are imported by name here: a key digests the code of a kind's body by itself."""


def find_kind(name: str) -> StageKind | None:
    """A kind by the name that a manifest, a config or a person gives: ours, or one whose module is imported already.

    Whatever the name, nothing is imported but X-ray's own kinds: it may come from anybody.
    """
    return KINDS.get(name)


def import_kind(name: str, module: str) -> StageKind | None:
    """The kind of a stage that a graph at work handed over; `module`, which registers it, is imported.

    For what comes through Ray from the process that wrote the graph and has imported `module` itself. Never for a name
    in a manifest, a bundle, a config or a parameter that Prefect passes on: those are looked up with `find_kind`.
    """
    if find_kind(name) is None:
        importlib.import_module(module)
    return KINDS.get(name)

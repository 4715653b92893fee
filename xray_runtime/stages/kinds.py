"""All stage kinds of X-ray, one file each, and the lookup of kinds by name.

These files declare kinds and do not import torch; bodies are imported when they run.
"""

from __future__ import annotations

import importlib

from xray_runtime.graph.kind import KINDS, StageKind
from xray_runtime.stages.base import BASE
from xray_runtime.stages.benchmark import BENCHMARK
from xray_runtime.stages.best_of_n import BEST_OF_N
from xray_runtime.stages.compare import COMPARE
from xray_runtime.stages.curate import CURATE, DEMONSTRATIONS, RECORDED_PROMPTS
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
    "CURATE",
    "DEMONSTRATIONS",
    "DPO",
    "EVALUATE",
    "FRESH_BASE",
    "KTO",
    "LM_EVAL",
    "PPO",
    "PREFERENCES",
    "PREPARE",
    "RECORDED_PROMPTS",
    "REWARD_BASE",
    "REWARD_MODEL",
    "SFT",
    "SPLIT_PREFERENCES",
    "find_kind",
    "import_kind",
]

USES: tuple[str, ...] = ()
"""None of the modules imported by name here: a key digests the code of a kind's body separately."""


def find_kind(name: str) -> StageKind | None:
    """A kind by its name: one of X-ray's, or one whose module is imported already.

    Names from manifests and configs are untrusted, so this never imports anything.
    """
    return KINDS.get(name)


def import_kind(name: str, module: str) -> StageKind | None:
    """A kind by its name; imports `module`, which registers it.

    Only for names that Ray passes from the process of the graph, which has imported `module` itself. Use `find_kind`
    for names in a manifest, a bundle, a config or a Prefect parameter.
    """
    if find_kind(name) is None:
        importlib.import_module(module)
    return KINDS.get(name)

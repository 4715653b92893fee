"""Registers all stage kinds of X-ray; the lookup of kinds by name.

The modules imported here declare kinds and do not import torch; bodies are imported when they run.
"""

from __future__ import annotations

import importlib

from xray_runtime.graph.kind import KINDS, StageKind, register
from xray_runtime.stages.bases import BASE, FRESH_BASE, REWARD_BASE  # noqa: F401
from xray_runtime.stages.datasets import (  # noqa: F401
    BEST_OF_N,
    CURATE,
    DEMONSTRATIONS,
    PREFERENCES,
    PREPARE,
    RECORDED_PROMPTS,
    SPLIT_PREFERENCES,
)
from xray_runtime.stages.evaluation import BENCHMARK, COMPARE, EVALUATE, LM_EVAL  # noqa: F401
from xray_runtime.stages.training import DPO, KTO, PPO, REWARD_MODEL, SFT  # noqa: F401

USES: tuple[str, ...] = ()
"""None of the modules imported by name here: a key digests the code of a kind's body separately."""

for _kind in [value for value in globals().values() if isinstance(value, StageKind)]:
    register(_kind)


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
    return find_kind(name)

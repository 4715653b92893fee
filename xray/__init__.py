"""X-ray: the whole life of an RLHF model as one auditable workflow, written as a graph in Python.

    import xray

    with xray.workspace("runs/mine", project="mine"):
        chats = xray.prepare(source="chats.jsonl")
        base = xray.base(model="Qwen/Qwen3-0.6B")
        sft = xray.sft(base, data=chats, steps=500)
        policy = xray.ppo(sft, prompts=chats, rewards=[xray.reward(my_function)])
        result = xray.evaluate(policy, against=sft, prompts=chats)
        xray.register(policy, result)

Every stage kind is a callable under its name (`xray.sft`), including users' own kinds. Names are imported on first use,
so that `import xray` is fast. `xray.algorithms`, `xray.data`, `xray.environments` and `xray.rewards` contain types and
functions for your own code. Type checkers read `__init__.pyi`, which is made at installation.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "xray.flow_runner": ("task_runner",),
    "xray.session": ("workspace", "checkpoint", "register"),
    "xray.tasks.result": ("Result",),
    "xray.tasks.workspace": ("Workspace",),
    "xray_runtime.methods.common.environment_protocol": ("Start", "Step"),
    "xray_runtime.algorithms.checking": ("check_advantages", "check_loss"),
    "xray_runtime.algorithms.estimators": ("AdvantageInputs",),
    "xray_runtime.algorithms.losses": ("PolicyLossInputs", "TokenLoss"),
    "xray_runtime.cluster.stage": ("Stage",),
    "xray_runtime.engines.layouts": ("FrozenConfig", "GeneratorConfig", "LayoutConfig"),
    "xray_runtime.engines.training_config": ("TrainingConfig",),
    "xray_runtime.kernel.config.section": ("Section",),
    "xray_runtime.kernel.config.validation": ("ConfigError",),
    "xray_runtime.kernel.graph.artifacts": (
        "Artifact",
        "Benchmark",
        "Comparison",
        "Curated",
        "Dataset",
        "Evaluation",
        "Feedback",
        "Judgements",
        "Model",
        "Preferences",
        "RewardModel",
    ),
    "xray_runtime.kernel.graph.handles": ("Handle", "reward"),
    "xray_runtime.kernel.graph.kind": ("Recorder", "StageKind", "stage_kind"),
    "xray_runtime.engines.roles": ("ModelRole", "frozen", "sampled", "trained"),
    "xray_runtime.methods.ppo.curriculum": ("PromptStatistics",),
    "xray_runtime.methods.ppo.published": ("Method",),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}


_SUBMODULES = ("algorithms", "data", "environments", "rewards")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"xray.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if not name.startswith("_"):
        from xray_runtime.kernel.graph.kinds import find_kind

        kind = find_kind(name)
        if kind is not None:
            return kind
    raise AttributeError(f"module 'xray' has no attribute {name!r}")


def __dir__() -> list[str]:
    from xray_runtime.kernel.graph.kind import KINDS
    from xray_runtime.kernel.graph.kinds import find_kind

    find_kind("")
    return sorted([*_MODULES, *_SUBMODULES, *KINDS])

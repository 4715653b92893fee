"""Multi-turn environments: their interface, and adapters for tools, Gymnasium and HTTP. Imports no torch."""

from __future__ import annotations

from xray_runtime.agents.environments.adapters import from_gymnasium, from_tools, tool_schema
from xray_runtime.agents.environments.http import from_http
from xray_runtime.agents.environments.reasoning_gym import from_reasoning_gym, write_items
from xray_runtime.methods.common.environment_protocol import Environment, Start, Step

__all__ = [
    "Environment",
    "Start",
    "Step",
    "from_gymnasium",
    "from_http",
    "from_reasoning_gym",
    "from_tools",
    "tool_schema",
    "write_items",
]

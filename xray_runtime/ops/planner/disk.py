"""Bytes that a stage leaves on a disk."""

from __future__ import annotations

from xray_runtime.ops.planner.cost import trained_parameters
from xray_runtime.ops.planner.layout import Layout
from xray_runtime.ops.planner.model_states import FLOAT32_BYTES
from xray_runtime.ops.planner.workload import PlannedRole, Workload

SNAPSHOT_BYTES = 12
"""Per trained parameter: weight and AdamW's two moments in float32."""
LEDGER_BYTES = 24
"""Per token of a kept rollout, compressed: ids, log-probabilities, advantages, weights and the text."""

ROUTE_BYTES = 5
"""Per expert of such a token, where routes are kept: its id and weight."""
TOP_TOKEN_BYTES = 8
"""Per likeliest token in its place: its id and log-probability."""


def disk_bytes(workload: Workload) -> dict[str, int]:
    """Kind of file → bytes, without those that are 0.

    `checkpoint` is the published model in float32. `snapshots` are two: a new one is whole before the last is removed.
    `ledger` has the rollouts that the config keeps.
    """
    trained = workload.of_use("trained")
    sampled = workload.of_use("sampled")
    token_bytes = sum(role.kept_rollouts * _token_bytes(role) for role in sampled)
    sizes = {
        "checkpoint": trained[0].shape.num_parameters * FLOAT32_BYTES if trained else 0,
        "snapshots": 2 * SNAPSHOT_BYTES * sum(trained_parameters(role, Layout()) for role in trained),
        "ledger": token_bytes * workload.rollout_size * workload.sequence_tokens,
    }
    return {what: size for what, size in sizes.items() if size}


def _token_bytes(role: PlannedRole) -> int:
    """Those of a token in the ledger; the few tokens of a kept set are not counted."""
    experts = role.shape.experts if role.keeps_routes else None
    of_routes = 0 if experts is None else ROUTE_BYTES * experts.chosen * experts.num_layers
    return LEDGER_BYTES + of_routes + TOP_TOKEN_BYTES * role.kept_top_tokens

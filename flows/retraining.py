"""Withdrawals and the cycle: nothing that it learns from, and not the policy it starts from, descends from them.

The signed log's entries are the request: as long as the champion or the candidate descends from withdrawn data, a cycle
is due, also where nothing was recorded since the last.
"""

from __future__ import annotations

from collections.abc import Iterable

from xray.flows.cycles import Cycle
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.live.feedback.collection import collect
from xray_runtime.live.withdrawal import LIVE, refusal


def is_due(store: LineageStore, name: str, last: Iterable[str]) -> bool:
    """Whether the champion or the candidate of the registered model `name` descends from withdrawn data, and no cycle
    has been without it.

    Args:
        last: what the last cycle worked with and made; nothing where there was none.
    """
    log, last = view(store.output), list(last)
    if not log.state(Withdrawals) or (last and not any(is_touched(store, sha) for sha in last)):
        return False
    live = [decision.checkpoint for (model, alias), decision in log.decided.items() if model == name and alias in LIVE]
    return any(is_touched(store, sha) for sha in live)


def is_touched(store: LineageStore, sha256: str) -> bool:
    """Whether a checkpoint descends from withdrawn data; one that is not in the store does not count."""
    node = store.graph.nodes.get(sha256)
    return node is not None and refusal(store, node) is not None


def sound_start(store: LineageStore, node: Node) -> Node:
    """`node`, or the nearest policy before it that does not descend from withdrawn data.

    Raises:
        ConfigError: all do.
    """
    parents = {"policy": node.sha256}
    while (sha := parents.get("policy")) is not None and sha in store.graph.nodes:
        node = store.graph.nodes[sha]
        if refusal(store, node) is None:
            return node
        parents = dict(store.graph.parents(sha))
    raise ConfigError(
        f"start: {node.name} descends from withdrawn data, and so does every policy after it: run the lifecycle again "
        "without it, with the command that `xray withdraw` prints"
    )


def without_withdrawn(store: LineageStore, project: str, by: str, cycle: Cycle) -> str:
    """The feedback checkpoint of a cycle; collected anew where it descends from withdrawn data."""
    newest = cycle.feedback[-1]
    return collect(store, project, by, cycle.first, cycle.last).sha256 if is_touched(store, newest) else newest

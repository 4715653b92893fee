"""How checkpoints follow from each other, in an audit."""

from __future__ import annotations

from collections.abc import Iterator

from xray_runtime.kernel.history.audit_check import ASK, RECOMPUTE, AuditCheck, Audited, Finding, Meaning

CODES = {
    "misplaced": Meaning(
        "The checkpoint is where another one belongs: directories were swapped or renamed.",
        "Rename it to its stage and the first 12 digits of its key.",
    ),
    "duplicate": Meaning("The same checkpoint is in the store twice.", "Remove the copy that has the wrong name."),
    "parent-missing": Meaning("A parent is not in the store: the chain ends here.", RECOMPUTE),
    "cycle": Meaning("The checkpoint is its own ancestor, which is impossible.", ASK),
    "manifest-malformed": Meaning("The list of the checkpoint's files cannot be read.", RECOMPUTE),
}


def check_structure(audited: Audited) -> Iterator[Finding]:
    """The graph of the checkpoints: their parents, their places, and their copies."""
    graph = audited.store.graph
    position = {node.sha256: i for i, node in enumerate(audited.nodes)}
    for sha, node in ((node.sha256, node) for node in audited.nodes):
        if not node.is_at_home:
            yield Finding(node.name, "misplaced", f"it is in {node.directory.name}")
        for role, parent in graph.parents(sha):
            if parent not in graph.nodes:
                yield Finding(node.name, "parent-missing", f"{role} {parent[:12]} is not in the store")
            elif position[parent] >= position[sha]:
                yield Finding(node.name, "cycle", f"its {role} {parent[:12]} comes from it")
    for copy in graph.duplicates:
        if audited.whole or copy.sha256 in position:
            yield Finding(copy.name, "duplicate", f"there is another copy in {copy.directory.name}")
    if audited.whole:
        for directory, reason in graph.unreadable.items():
            yield Finding(directory.name, "manifest-malformed", reason)


CHECK = AuditCheck("parents, ancestors, copies and names of the checkpoints", CODES, check_structure)

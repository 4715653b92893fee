"""Whether this machine's processor is fast in the precision of a graph's models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.engines.roles import models_of

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.graph import Graph

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Linux's names: the first two on x86, the last on ARM."""


def has_bfloat16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Whether the processor has instructions for bfloat16, which is emulated many times slower; None if unknown."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = [line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))]
    return bool(INSTRUCTIONS & set(flags[0])) if flags else None


def slow_precision(graph: Graph, device: str, cpuinfo: Path = CPUINFO) -> str | None:
    """A warning if `graph` uses bfloat16 on a processor without instructions for it."""
    precisions = {
        f"{call.name}.{role.field}.precision": getattr(role.layout, "precision", "float32")
        for call in graph.calls.values()
        for role in models_of(call).values()
    }
    fields = [name for name, precision in precisions.items() if precision == "bfloat16"]
    if device != "cpu" or not fields or has_bfloat16(cpuinfo) is not False:
        return None
    return (
        f"this processor has no bfloat16 instructions (avx512_bf16, amx_bf16): {', '.join(fields)} = bfloat16 will be "
        "several times slower than float32"
    )

"""An independent count of a plan's peak memory."""

from __future__ import annotations

from xray_runtime.planning.plan import Plan


def recounted(plan: Plan) -> int:
    """Peak bytes on the fullest GPU, counted turn by turn."""
    workload = plan.workload
    if plan.placement == "separate":
        return max(p.memory.total for p in plan.roles)

    def turn(working: set[str]) -> int:
        held = 0
        for p in plan.roles:
            sleeps = workload.generator_sleeps if p.role.use == "sampled" else workload.trainer_sleeps
            asleep = p.memory.process if sleeps and p.role.use != "frozen" else p.memory.resident
            # An allocator keeps its peak while nobody takes turns; vLLM keeps its cache until it sleeps.
            keeps = not workload.generator_sleeps or (p.role.use == "sampled" and not sleeps)
            held += p.memory.total if p.role.use in working or keeps else asleep
        return held

    return max(turn({"sampled"}), turn({"trained", "frozen"}))

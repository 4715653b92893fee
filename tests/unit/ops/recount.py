"""An independent count of a plan's peak memory: a ledger of one GPU through an iteration, event by event.

The order is that of `ppo/body.py` with vLLM: at the first sync trainers and generator are built; each iteration then

    sync        the generator's weights wake up (its KV cache does not), weights are sent through a buffer
    generate    trained models sleep if they may, the KV cache wakes up, replies are sampled, the generator sleeps
    score       trained models wake up; they and the frozen ones score
    update      trained models train
"""

from __future__ import annotations

from collections.abc import Iterator

from xray_runtime.ops.planner.plan import Plan, RolePlan

AWAKE_BETWEEN_TURNS = ("weights", "optimizer", "kept", "graphs", "process")
"""Memory of a model that neither works nor sleeps."""
ASLEEP = ("graphs", "process")
WORKING = (*("weights", "gradients", "optimizer", "buffers", "activations", "logits", "kv_cache", "graphs", "process"),)


def sum_of(model: RolePlan, names: tuple[str, ...]) -> int:
    return sum(getattr(model.memory, name) for name in names)


def recounted(plan: Plan) -> int:
    """Peak bytes on the fullest GPU."""
    if plan.placement == "separate":
        return max(max(held.values(), default=0) for p in plan.roles for _, held in ledger(plan, (p,)))
    return max(sum(held.values()) for _, held in ledger(plan, plan.roles))


def ledger(plan: Plan, models: tuple[RolePlan, ...]) -> Iterator[tuple[str, dict[str, int]]]:
    """(event, model → bytes that it holds) through two iterations, of models on one GPU."""
    turns, trainers_turn = plan.workload.generator_sleeps, plan.workload.trainer_sleeps
    by_use = {use: [p for p in models if p.role.use == use] for use in ("trained", "frozen", "sampled")}
    held: dict[str, int] = {}
    peaks: dict[str, int] = {}

    def book(group: list[RolePlan], names: tuple[str, ...]) -> None:
        for p in group:
            # Without turns no allocator gives back what it had at its most.
            now = sum_of(p, names)
            peaks[p.role.name] = max(peaks.get(p.role.name, 0), now)
            held[p.role.name] = now if turns else peaks[p.role.name]

    between = ASLEEP if turns else (*AWAKE_BETWEEN_TURNS, "kv_cache")
    # Generators are built first, alone, and sleep until the first sync.
    book(by_use["sampled"], WORKING)
    yield "generator built", dict(held)
    book(by_use["sampled"], between)
    # The others are built at the same time.
    others = [*by_use["trained"], *by_use["frozen"]]
    book(others, ("weights", "loading", "process"))
    yield "built", dict(held)
    book(others, AWAKE_BETWEEN_TURNS)
    for _ in range(2):
        if plan.workload.of_use("trained") and plan.workload.of_use("sampled"):
            book(by_use["sampled"], (*AWAKE_BETWEEN_TURNS, "syncing", *(() if turns else ("kv_cache",))))
            book(by_use["trained"], (*AWAKE_BETWEEN_TURNS, "syncing"))
            yield "sync", dict(held)
            book(by_use["trained"], AWAKE_BETWEEN_TURNS)
        if trainers_turn:
            book(by_use["trained"], ASLEEP)
        book(by_use["sampled"], WORKING)
        yield "generate", dict(held)
        book(by_use["sampled"], between)
        book(others, WORKING)
        yield "score and update", dict(held)
        book(others, AWAKE_BETWEEN_TURNS)

"""Candidate plans on CPU, in the order in which they are preferred.

All models share the devices. As many replicas of trained models are useful as a step has micro-batches; if that does
not fit, all devices may be used. A replica is whole, or split by tensor, or in pipeline stages as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from xray_runtime.planning.memory import Layout
from xray_runtime.planning.plan import Plan, plan_of
from xray_runtime.planning.roles import Use
from xray_runtime.planning.splits import MAX_RANKS, groups, least_zero_stage, splits, zero_stages
from xray_runtime.planning.workload import Machine, Workload


def plans(workload: Workload, machine: Machine) -> Iterator[Plan]:
    """All candidates; activations are kept before they are recomputed."""
    again = workload.with_options(checkpointing=True)
    for one in [workload, again] if again != workload else [workload]:
        yield from _plans(one, machine)


def _plans(workload: Workload, machine: Machine) -> Iterator[Plan]:
    generating, trained = Layout(dp=workload.generator_replicas), workload.of_use("trained")
    least, tokens = least_zero_stage(workload), workload.batch_size * workload.sequence_tokens

    def plan(layout: Layout) -> Plan:
        layouts: dict[Use, Layout] = {"trained": layout, "frozen": Layout(), "sampled": generating}
        return plan_of(workload, machine, "colocated", layouts)

    if not trained:
        yield plan(Layout())
    useful = min(math.ceil(tokens / workload.micro_batch_tokens), workload.batch_size)
    for tp, pp in splits(trained, machine):
        most = min(groups(machine, tp, []) // pp, workload.batch_size, MAX_RANKS // (tp * pp))
        # A single replica has the most memory per device and needs the fewest other resources.
        for dp in dict.fromkeys((min(useful, most), most, min(1, most))) if most else ():
            for stage in zero_stages(least, dp, split=tp * pp > 1):
                yield plan(Layout(zero_stage=stage, tp=tp, pp=pp, dp=dp))

"""The measurements of a canary for Prometheus, by arm: on the /metrics of each replica, and of the studio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from xray_runtime.kernel.evidence.kinds.canary import ArmResult

CANARY_METRICS = {
    "answers": "Answers",
    "judges": "People whose feedback counts",
    "feedback": "Mean feedback",
    "feedback_low": "Lower end of the interval of the feedback",
    "feedback_high": "Upper end of the interval of the feedback",
    "errors": "Share of users whose first answer failed",
    "errors_low": "Lower end of the interval of the errors",
    "errors_high": "Upper end of the interval of the errors",
    "latency_s": "Median seconds to the end of an answer",
}
"""Field of an `ArmResult` → its text; one gauge each, for each arm."""


@dataclass(frozen=True)
class CanaryState:
    """The last canary, as its records have it."""

    is_running: bool
    arms: Mapping[Literal["candidate", "champion"], ArmResult]
    """By side."""


def canary_gauges(canary: CanaryState) -> Iterator[GaugeMetricFamily]:
    """Every metric of a canary."""
    running = GaugeMetricFamily("xray_canary_running", "Whether the last canary still runs")
    running.add_metric([], float(canary.is_running))
    yield running
    for name, text in CANARY_METRICS.items():
        family = GaugeMetricFamily(f"xray_canary_{name}", f"{text} of the last canary", labels=["arm"])
        for side, arm in canary.arms.items():
            value = getattr(arm, name)
            family.add_metric([side], float("nan") if value is None else float(value))
        yield family


class CanaryCollector(Collector):
    """Shows the state that it was given last; nothing before the first."""

    def __init__(self) -> None:
        self.state: CanaryState | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every metric, with its value now."""
        if self.state is not None:
            yield from canary_gauges(self.state)

"""Changes to a graph that `xray plan` takes as options and suggests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xray_runtime.config.paths import section
from xray_runtime.planning.memory import Options
from xray_runtime.planning.roles import CHOSEN
from xray_runtime.planning.workload import Workload, from_parameters

if TYPE_CHECKING:
    from xray_runtime.graph.graph import StageCall


@dataclass(frozen=True, kw_only=True)
class Changes:
    """None and False keep the graph's value."""

    lora_rank: int | None = None
    offload: bool = False
    """Optimizer states in host memory."""
    micro_batch_tokens: int | None = None

    def of_call(self, call: StageCall) -> StageCall:
        """`call` with these changes to every trained model, and without layouts. Raises ConfigError."""
        data: dict[str, Any] = call.config.model_dump(mode="json")
        engine: dict[str, Any] = {"offload": "cpu", "nvme_path": None} if self.offload else {}
        if self.micro_batch_tokens is not None:
            engine["micro_batch_tokens"] = self.micro_batch_tokens
        for role in call.kind.models(call.config).values():
            layout = section(data, role.field)
            for field in CHOSEN:
                layout.pop(field, None)
            if role.use != "trained":
                continue
            layout.update(engine)
            if self.lora_rank is not None:
                section(data, role.field.rpartition(".")[0])["lora"] = {"rank": self.lora_rank}
        runtime = call.runtime.model_copy(update={"parallel": "auto"})
        return replace(call, config=call.kind.validated(data, where=call.name), runtime=runtime)

    def of_parameters(self, count: float, sequence_tokens: int) -> Workload:
        """The models of PPO with `count` parameters each, with these changes."""
        options = Options(lora_rank=self.lora_rank, offload=self.offload, least_zero_stage=int(self.offload))
        workload = from_parameters(count, sequence_tokens, options)
        if self.micro_batch_tokens is None:
            return workload
        others = workload.open_choices - {"micro_batch_tokens"}
        return replace(workload, micro_batch_tokens=self.micro_batch_tokens, open_choices=others)


UNCHANGED = Changes()

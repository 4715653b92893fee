"""The experts that vLLM's routers choose while it samples on a CPU.

vLLM's own `enable_return_routed_experts` brings ids without weights, and needs a model runner that CPUs do not have.
Here the choices of each layer's router are recorded, and split among the requests of a step. A request that vLLM
preempts is computed again from its first token: the routes that its tokens were sampled by are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from xray_runtime.data.routes import Routes, id_type

Choice = tuple[torch.Tensor, torch.Tensor]
"""Weights and ids [S, K] of S tokens."""


class RecordedRequests:
    """The routes of all requests so far, by the ids that callers know them by."""

    def __init__(self, routers: list[Any]) -> None:
        self._dtype = id_type(max(router.global_num_experts for router in routers))
        self._num_layers = len(routers)
        self._steps: dict[str, list[Routes]] = defaultdict(list)
        self._known: dict[str, int] = defaultdict(int)
        self.step: dict[int, Choice] = {}
        """Layer → what it chose in the step that is computed."""

    def split_step(self, rows: Iterator[tuple[str, int, int]]) -> None:
        """End a step; `rows` are (request, position of its first token, number of tokens), in the order of the tokens.

        Raises RuntimeError: a layer did not ask its router, or a request lacks tokens before those of the step.
        """
        step, self.step = self.step, {}
        if len(step) != self._num_layers:
            raise RuntimeError("vLLM chose experts where they cannot be recorded: set routing to 'own'")
        layers = [step[layer] for layer in range(self._num_layers)]
        weights, ids = (torch.stack([of[part] for of in layers], 1).numpy() for part in range(2))
        ids, weights, row = ids.astype(self._dtype), weights.astype(np.float32), 0
        for request, first, count in rows:
            if (new := self._known[request] - first) < 0:
                raise RuntimeError("vLLM took a prefix from its cache, so the experts of its tokens are not known")
            if new < count:
                self._steps[request].append(Routes(ids[row + new : row + count], weights[row + new : row + count]))
                self._known[request] = first + count
            row += count

    def of(self, request: str, count: int) -> Routes:
        """The routes of the first `count` tokens of a request."""
        ids, weights = (np.concatenate([step[part] for step in self._steps[request]]) for part in range(2))
        return Routes(ids, weights).first(count)


@contextmanager
def recorded_requests(runner: Any) -> Iterator[RecordedRequests]:
    """Record what the routers of a worker's model choose meanwhile. Raises ValueError: it has none."""
    modules = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
    routers: list[Any] = [module.router for module in modules if isinstance(module.router, BaseRouter)]
    if not routers or len(routers) < len(modules):
        raise ValueError("generator: vLLM's routers of this model cannot be recorded: set routing to 'own'")
    recorded, execute = RecordedRequests(routers), runner.execute_model

    def recording(layer: int, compute: Callable[..., Choice]) -> Callable[..., Choice]:
        def choose(*args: Any, **options: Any) -> Choice:
            weights, ids = compute(*args, **options)
            recorded.step[layer] = weights.clone(), ids.clone()
            return weights, ids

        return choose

    def execute_and_split(scheduled: Any, *args: Any, **options: Any) -> Any:
        output, counts = execute(scheduled, *args, **options), scheduled.num_scheduled_tokens
        if counts:
            batch = runner.input_batch
            firsts = batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist()
            # vLLM adds some characters to callers' ids, to make them unique.
            names = [name.rpartition("-")[0] for name in batch.req_ids]
            recorded.split_step(zip(names, firsts, map(counts.__getitem__, batch.req_ids), strict=True))
        return output

    for layer, router in enumerate(routers):
        router._compute_routing = recording(layer, router._compute_routing)
    runner.execute_model = execute_and_split
    try:
        yield recorded
    finally:
        del runner.execute_model
        for router in routers:
            del router._compute_routing

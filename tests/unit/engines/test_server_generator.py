"""Generation by servers elsewhere, as far as no server is needed: weights on their way, refusals, the key."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.message_texts import Messages
from xray.deployments.service import free_port
from xray.flows.lifecycle_graph import recorded_graph
from xray.tasks import preflight
from xray.tasks.preflight import check_run, check_services
from xray.tasks.stored_results import StoredStage
from xray_runtime.engines.generators.server.chunks import Assembler, Chunk, chunks
from xray_runtime.engines.generators.server.guard import KeyGuard
from xray_runtime.engines.generators.server.launch import KEY
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.loading import load_config

TENSORS = [
    ("small", torch.arange(3, dtype=torch.float32)),
    ("large", torch.linspace(-1, 1, 35).reshape(5, 7)),
    ("number", torch.tensor(2.5)),
    ("exact", torch.arange(8, dtype=torch.float32)),
]
SERVER = ["generator.engine=server", "generator.addresses=[http://127.0.0.1:9]"]


@pytest.mark.parametrize("size", [32, 40, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_in_bounded_chunks(size: int, dtype: torch.dtype) -> None:
    sent = list(chunks(TENSORS, dtype, size))
    lengths = [len(base64.b64decode(chunk["data"])) for chunk in sent]
    assert all(length == size for length in lengths[:-1])
    assert 0 < lengths[-1] <= size
    assert sum(lengths) == (3 + 35 + 1 + 8) * dtype.itemsize
    assembler = Assembler()
    arrived = [pair for chunk in json.loads(json.dumps(sent)) for pair in assembler.take(chunk)]
    assembler.close()
    assert [name for name, _ in arrived] == [name for name, _ in TENSORS]
    for (_, found), (_, tensor) in zip(arrived, TENSORS, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, tensor.to(dtype))


def _flipped(sent: list[Chunk]) -> None:
    data = bytearray(base64.b64decode(sent[1]["data"]))
    data[5] ^= 1
    sent[1]["data"] = base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "damage",
    [
        _flipped,
        lambda sent: sent.pop(1),
        lambda sent: sent.pop(),
        lambda sent: sent[0]["pieces"][0].update(dtype="int64"),
    ],
)
def test_damage_on_the_way_is_noticed(damage: Callable[[list[Any]], object], message_texts: Messages) -> None:
    sent, assembler = list(chunks(TENSORS, torch.float32, 64)), Assembler()
    damage(sent)
    with message_texts.raises(ValueError):
        [list(assembler.take(chunk)) for chunk in sent] and assembler.close()


@pytest.mark.parametrize(
    "changes",
    [
        ["generator.addresses=[]"],
        ["generator.addresses=[127.0.0.1:9]"],
        ["generator.addresses=[http://me:secret@host]"],
        ["generator.addresses=[http://a,http://a]"],
        ["generator.tensor_parallel=2"],
        ["runtime.generator_replicas=2"],
        ["runtime.weight_transfer=nccl"],
    ],
)
def test_what_servers_cannot_do_is_refused(changes: list[str], message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        recorded_graph(load_config(None, [*SERVER, *changes]))


def test_a_run_whose_servers_do_not_answer_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    graph = recorded_graph(load_config(None, [SERVER[0], f"generator.addresses=[{address}]"]))
    check_services(graph, [graph.calls["sft"]], "cpu", tmp_path)
    with pytest.raises(
        ConfigError, match=rf"^ppo-1\.generator\.addresses: no server can sample: {address}: ConnectError"
    ):
        check_services(graph, [graph.calls["ppo-1"]], "cpu", tmp_path)
    # A plan or an explanation asks nobody.
    check_run(graph, "cpu", None)
    found = StoredStage(None, {})  # type: ignore[arg-type]
    monkeypatch.setattr(preflight, "stored_stages", lambda *_: [(name, found) for name in graph.calls])
    check_services(graph, graph.calls.values(), "cpu", tmp_path)


def test_every_request_to_a_guarded_server_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    route = Route("/update_weights", lambda request: PlainTextResponse("taken"))
    monkeypatch.setenv(KEY, "sesame")
    guarded = TestClient(KeyGuard(Starlette(routes=[route])))
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer no"}, 401),
        ({"Authorization": "Bearer sesame"}, 200),
    ):
        assert guarded.get("/update_weights", headers=headers).status_code == status
    monkeypatch.delenv(KEY)
    assert TestClient(KeyGuard(Starlette(routes=[route]))).get("/update_weights").status_code == 200

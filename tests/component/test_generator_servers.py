"""`xray generator` as a process, and twice: the replies of a vLLM in this process, whatever happens to one of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.component.generator_process import GeneratorProcess, running
from tests.component.models import same
from xray.deployments.service import free_port
from xray_runtime.data.batch import ReplyBatch
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.generators.server.config import ServerConfig
from xray_runtime.engines.generators.server.servers import NoServersError
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.engines.sync.object_store import WeightUpdate, pack
from xray_runtime.engines.sync.shared_memory import SharedWriter
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.signs import parts_done

RUNTIME = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
SAMPLING = Sampling(max_new_tokens=12, temperature=0.7, stop_token_ids=(1,), pad_token_id=0)
MAX_LENGTH = 32
KEY = "sesame"
MEMORY = SharedWriter()
"""Holds the weights of all updates."""


@pytest.fixture(scope="module")
def processes(tiny_model: Path) -> Iterator[list[GeneratorProcess]]:
    """Two servers, of which the first is being started."""
    with running(tiny_model, MAX_LENGTH, KEY) as first:
        both = [first, GeneratorProcess(tiny_model, MAX_LENGTH, KEY)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XRAY_API_KEYS", ",".join(f"127.0.0.1:{server.port}={KEY}" for server in both))
            yield both


@pytest.fixture
def server(processes: list[GeneratorProcess]) -> GeneratorProcess:
    """One that answers, with the weights of its checkpoint or of the test before."""
    first = processes[0]
    if first.process.poll() is not None:
        first.start()
    first.wait()
    return first


@pytest.fixture(scope="module")
def local(tiny_model: Path) -> Generation:
    torch.set_num_threads(1)
    return opened(tiny_model, GeneratorConfig())


def config(*addresses: str, **fields: object) -> ServerConfig:
    return ServerConfig(addresses=list(addresses), **{"retry_s": 0.0, "concurrency": 2, "timeout_s": 60.0} | fields)


def opened(directory: Path, section: GeneratorConfig, max_length: int = MAX_LENGTH) -> Generation:
    return Generation(directory, max_length, section, RUNTIME, EngineRank("cpu"))


def replies(generation: Generation, version: int, num: int = 24, sampling: Sampling = SAMPLING) -> ReplyBatch:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(5, 280, size=3 + n % 7).tolist() for n in range(num)]
    return generation.generate(prompts, list(range(100, 100 + num)), sampling, version)


def weights(directory: Path, scale: float, version: int, names: Callable[[str], bool] = bool) -> WeightUpdate:
    held = load_file(directory / "model.safetensors").items()
    return pack([(name, tensor * scale) for name, tensor in sorted(held) if names(name)], version, MEMORY)


def test_servers_that_cannot_sample_for_a_run_are_refused(
    server: GeneratorProcess, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.address
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model.iterdir():
        (other / file.name).symlink_to(file)
    changed = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(changed))
    refused = {
        "rms_norm_eps of its config.json is 1e-06, and 0.5 of the stage's": lambda: opened(other, config(address)),
        "its --max-length is 32 tokens, and the stage needs 33": lambda: opened(tiny_model, config(address), 33),
        "it computes in float32": lambda: opened(tiny_model, config(address, dtype="bfloat16")),
    }
    for message, refusal in refused.items():
        with pytest.raises(ConfigError, match=f"generator.addresses: {address}: .*{message}"):
            refusal()
    more = RUNTIME.model_copy(update={"threads": 2})
    with pytest.raises(ValueError, match=f"^addresses: {address}: it rounds differently: it has 1 threads"):
        config(address).check_services(more)
    config(address).check_services(RUNTIME)
    monkeypatch.setenv("XRAY_API_KEYS", f"127.0.0.1:{server.port}=wrong")
    with pytest.raises(ValueError, match="status 401 the key in XRAY_API_KEY is needed"):
        config(address).check_services(RUNTIME)


PART = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight")
"""Names of weights that a partial update brings, of some layers."""


def test_the_life_of_a_server(server: GeneratorProcess, local: Generation, tiny_model: Path) -> None:
    """One story, since each start of vLLM takes seconds: sample, follow, refuse, lose it."""
    nobody = f"http://127.0.0.1:{free_port()}"
    remote = opened(tiny_model, config(server.address, nobody))
    before = replies(local, 0)
    same(replies(remote, 0), before)
    cut = replace(SAMPLING, top_p=0.7, top_k=64, kept=True, top_logprobs=5)
    same(replies(remote, 0, sampling=cut), replies(local, 0, sampling=cut))

    # A whole update, and a part of some layers; what did not change stays.
    for update in (weights(tiny_model, 1.5, 1), weights(tiny_model, 0.5, 2, PART.__contains__)):
        for generation in (local, remote):
            generation.weights.load(update)
        same(replies(remote, update.version), replies(local, update.version))
    assert not np.array_equal(replies(local, 2).rollout_logprobs.values, before.rollout_logprobs.values)

    # Weights that a server refuses change nothing.
    held = load_file(tiny_model / "model.safetensors")
    with pytest.raises(NoServersError, match="no server took version 3"):
        remote.weights.load(pack([("model.norm.weight", held["model.norm.weight"][:-1])], 3, MEMORY))
    same(replies(remote, 2), replies(local, 2))

    # Another run takes the server: its weights are never sampled from; then all of ours come again.
    other = opened(tiny_model, config(server.address))
    same(replies(other, 0), before)
    with pytest.raises(NoServersError, match="another run uses it"):
        replies(remote, 2)
    same(replies(remote, 2), replies(local, 2))

    server.kill()
    with pytest.raises(NoServersError, match="no server can sample") as lost:
        replies(remote, 2)
    assert all(f"{address}: ConnectError" in str(lost.value) for address in (server.address, nobody))


@pytest.mark.long
def test_of_two_servers_one_may_be_lost_and_regained(
    server: GeneratorProcess,
    processes: list[GeneratorProcess],
    local: Generation,
    tiny_model: Path,
    request: pytest.FixtureRequest,
) -> None:
    second = processes[1]
    second.start()
    request.addfinalizer(second.kill)
    second.wait()
    remote = opened(tiny_model, config(server.address, second.address))
    version = local.weights.version + 1

    def follow(update: WeightUpdate) -> None:
        for generation in (local, remote):
            generation.weights.load(update)
        same(replies(remote, update.version), replies(local, update.version))

    follow(weights(tiny_model, 1.1, version))

    # Another run takes one of them: its weights are never sampled from, nor changed in part.
    other = opened(tiny_model, config(server.address))
    before = replies(other, 0)
    same(replies(remote, version), replies(local, version))
    same(replies(other, 0), before)
    follow(weights(tiny_model, 0.7, version + 1, PART.__contains__))

    # One dies while it samples: the other samples its prompts again.
    expected, start = replies(local, version + 1, num=96), parts_done()
    killer = threading.Thread(target=_once, args=(lambda: parts_done() >= start + 8, second.kill))
    killer.start()
    same(replies(remote, version + 1, num=96), expected)
    killer.join()
    assert second.process.poll() is not None
    follow(weights(tiny_model, 1.2, version + 2, PART.__contains__))

    # It comes back with the weights of its checkpoint, catches up, and is alone.
    second.start()
    second.wait()
    same(replies(remote, version + 2), replies(local, version + 2))
    server.kill()
    same(replies(remote, version + 2), replies(local, version + 2))


def _once(condition: Callable[[], bool], do: Callable[[], None]) -> None:
    while not condition():
        time.sleep(0.001)
    do()

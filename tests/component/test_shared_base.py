"""Policies that are adapters of one base: evaluated and compared in one generator, with what their merged weights
would give."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.component.models import RUNTIME, learned
from tests.component.processes import open_models
from tests.unit.kernel.store.published import IDENTITY
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import HELDOUT, TRAIN, Example, write_pairs
from xray_runtime.kernel.graph.artifacts import ADAPTER, Dataset, Model
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.methods.common.sampling.shared_base import shared_base
from xray_runtime.methods.compare import body as compare
from xray_runtime.methods.compare.kind import CompareInputs
from xray_runtime.methods.evaluate import body as evaluate
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.evaluate.kind import EvaluateInputs
from xray_runtime.models.adapter_files import write_adapter
from xray_runtime.models.causal_lm import copy_model
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.weight_files import overwrite

LORA = LoRAConfig(rank=2, alpha=8.0, target_modules=["down_proj", "q_proj", "v_proj"])


def published(store: Store, stage: str, model: Path, base: CheckpointRef | None = None, seed: int = 0) -> CheckpointRef:
    """A checkpoint of `model`, or of the policy that an adapter of `seed` makes of it."""
    identity = IDENTITY.model_copy(update={"stage": stage, "seed": seed})
    with store.building(stage, identity.key) as built:
        copy_model(model, built)
        if base is not None:
            adapters = learned(model, LORA, seed)
            overwrite(built, adapters.merged(lambda name, parameter: parameter.detach()), 0, 1)
            tensors = dict(adapters.unmerged(lambda name, parameter: parameter.detach()))
            write_adapter(built / ADAPTER, LORA, tensors, base.path.name, base.sha256)
        return store.publish(built, identity, type="Model", step=1, dataset=None)


def without_adapter(store: Store, ref: CheckpointRef) -> Path:
    """The same model as merged weights alone."""
    return published(store, f"merged-{ref.sha256[:6]}", ref.path).path


@pytest.fixture(scope="module")
def store(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("shared")
    store = Store(root / "checkpoints")
    base = published(store, "sft", tiny_model)
    data = root / "data"
    data.mkdir()
    rows = [Example(str(i), "c", [{"role": "user", "content": f"how are {i}"}], "x") for i in range(10)]
    write_pairs(data / HELDOUT, Example, rows)
    write_pairs(data / TRAIN, Example, [])
    (data / "dataset.json").write_text('{"max_prompt_tokens": 24}')
    one, two = (published(store, "ppo", tiny_model, base, seed) for seed in (1, 2))
    for policy in (one, two):  # as `merging.full_model` leaves those that were published as adapters alone
        shutil.copytree(policy.path, root / "inputs" / policy.path.name)
    (root / "inputs" / base.path.name).symlink_to(base.path)
    return {"store": store, "base": base, "one": one, "two": two, "data": data, "root": root}


def run(store: dict[str, Any], body: Any, inputs: Any, engine: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what the body wrote, the specs that it opened)."""
    config = EvaluationConfig.model_validate(
        {"num_prompts": 8, "bootstrap_samples": 100, "temperature": 0.3, "max_new_tokens": 8}
        | {"generator": {"engine": engine}}
    )
    opened: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def opener(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        opened.append(dict(specs))
        with open_models(RUNTIME, store["root"] / "logs", specs) as models:
            yield models

    out = store["root"] / f"out-{len(list(store['root'].iterdir()))}"
    out.mkdir()
    stage: Stage[Any, Any] = Stage("compared", 7, config, inputs, RUNTIME, opener)
    body.run(stage, out, FakeRecorder(out))
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    return found, opened


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_an_evaluation_opens_the_base_once(store: dict[str, Any], engine: str) -> None:
    policy, base, data = store["one"].path, store["base"].path, Dataset(store["data"])
    found, [specs] = run(store, evaluate, EvaluateInputs(Model(policy), Model(base), data), engine)
    assert set(specs) == {"generator", "after"}
    assert {spec.directory for spec in specs.values()} == {base}
    merged = without_adapter(store["store"], store["one"])
    expected, [specs] = run(store, evaluate, EvaluateInputs(Model(merged), Model(base), data), engine)
    assert set(specs) == {"generator", "before", "after"}
    kl = expected["evaluation"]["kl"]
    assert abs(kl) > 0.01
    assert found["evaluation"]["kl"] == pytest.approx(kl, abs=1e-4)
    assert found["samples"] == expected["samples"]
    assert any(shown["before"] != shown["after"] for shown in found["samples"])


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_a_champion_and_a_candidate_share_one_generator(store: dict[str, Any], engine: str) -> None:
    champion, candidate = (store["root"] / "inputs" / store[name].path.name for name in ("one", "two"))
    data = Dataset(store["data"])
    found, opened = run(store, compare, CompareInputs(Model(candidate), Model(champion), data), engine)
    [generator, scoring] = opened
    assert (generator["generator"].directory, scoring) == (store["base"].path, {})
    two, one = (Model(without_adapter(store["store"], store[name])) for name in ("two", "one"))
    expected, opened = run(store, compare, CompareInputs(two, one, data), engine)
    assert [len(specs) for specs in opened] == [1, 1, 0]
    assert found["samples"] == expected["samples"]
    assert any(shown["champion"] != shown["candidate"] for shown in found["samples"])


def test_only_a_base_of_the_same_digest_is_shared(store: dict[str, Any], tiny_model: Path) -> None:
    one, two, base = (store[name].path for name in ("one", "two", "base"))
    linked = [store["root"] / "inputs" / path.name for path in (one, two)]
    shared = shared_base(linked)
    assert shared is not None
    assert (shared.directory, shared.lora) == (base, LORA)
    assert shared_base((base, base)) is None
    other = published(store["store"], "other", tiny_model).path
    assert shared_base((other, one)) is None
    # That their base lies in the store does not matter to policies that were published whole.
    assert shared_base((one, two)) is None
    assert shared_base((one, base)) == shared_base((linked[1], one)) == shared

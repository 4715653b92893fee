"""`xray run --explain`: why a stage is cached, or what changed since."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import xray
from tests.unit.trust.synthetic import evaluation_files
from xray.cli.explain import differences, explain, explained
from xray.flows.subject import Subject
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.statement import RunFacts
from xray_runtime.kernel.graph.graph import Graph, recording
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, Store
from xray_runtime.kernel.store.digest_memory import DigestMemory
from xray_runtime.kernel.store.identity import Identity
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.terminal import print_table
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.trust.attestation import attest
from xray_runtime.trust.signing import signing_key

RUNTIME = RuntimeConfig(device="cpu")

BEFORE = Identity(
    stage="ppo",
    kind="ppo",
    config={"lr": 0.1, "engine": {"zero_stage": 0}, "rewards": [{"model": "rewards.0", "weight": 1.0}], "gold": None},
    seed=0,
    parents={"policy": "ab" * 32, "prompts": "cd" * 32},
    functions={"mine:f": {"mine": "11" * 32, "mine.words": "22" * 32}},
    code={"xray_runtime.methods.ppo.body": "33" * 32, "xray_runtime.kernel.seeding": "44" * 32},
    versions={"torch": "2.13.0", "numpy": "2.3"},
)


def changed(**fields: Any) -> list[str]:
    return differences(BEFORE, BEFORE.model_copy(update=fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"seed": 7}, ["seed 0 → 7"]),
        ({"kind": "dpo"}, ["kind ppo → dpo"]),
        ({"config": BEFORE.config | {"lr": 0.2}}, ["lr 0.1 → 0.2"]),
        ({"config": BEFORE.config | {"gold": "vader"}}, ['gold null → "vader"']),
        ({"config": BEFORE.config | {"engine": {"zero_stage": 3}}}, ["engine.zero_stage 0 → 3"]),
        ({"config": BEFORE.config | {"new": True}}, ["new null → true"]),
        (
            {"config": BEFORE.config | {"rewards": [{"model": "rewards.0", "weight": 0.5}, {"function": "a:b"}]}},
            ["rewards.0.weight 1.0 → 0.5", 'rewards.1.function null → "a:b"'],
        ),
        (
            {"config": BEFORE.config | {"rewards": []}},
            ["rewards null → []", 'rewards.0.model "rewards.0" → null', "rewards.0.weight 1.0 → null"],
        ),
        ({"config": BEFORE.config | {"lr": "x" * 50}}, [f'lr 0.1 → "{"x" * 36}...']),
        ({"parents": BEFORE.parents | {"policy": "ef" * 32}}, ["parent policy abababababab → efefefefefef"]),
        ({"parents": {"policy": "ab" * 32}}, ["parent prompts cdcdcdcdcdcd → none"]),
        (
            {"functions": {"mine:f": BEFORE.functions["mine:f"] | {"mine.words": "99" * 32}}},
            ["function mine:f: module mine.words"],
        ),
        ({"functions": {}}, ["function mine:f: module mine", "function mine:f: module mine.words"]),
        ({"code": BEFORE.code | {"xray_runtime.kernel.seeding": "55" * 32}}, ["code xray_runtime.kernel.seeding"]),
        ({"code": {"xray_runtime.methods.ppo.body": "33" * 32}}, ["code xray_runtime.kernel.seeding"]),
        ({"versions": BEFORE.versions | {"torch": "2.14.0"}}, ["library torch 2.13.0 → 2.14.0"]),
        ({"versions": {"torch": "2.13.0"}}, ["library numpy 2.3 → None"]),
    ],
)
def test_each_sort_of_change_is_a_phrase(fields: dict[str, Any], said: list[str]) -> None:
    assert changed(**fields) == said


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (f"file:{'ab' * 32}", "file abababababab"),
        (f"directory:{'ab' * 32}", "directory abababababab"),
        (f"hub:{'ab' * 20}", "hub abababababab"),
        ("package:chitchat-dataset==0.9.0", "chitchat-dataset==0.9.0"),
        ("https://host/x", '"https://host/x"'),
    ],
)
def test_digests_are_shown_short(value: str, shown: str) -> None:
    assert changed(config=BEFORE.config | {"lr": value}) == [f"lr 0.1 → {shown}"]


def test_all_that_changed_is_named_in_an_order() -> None:
    after = {"seed": 1, "config": BEFORE.config | {"lr": 0.2}, "parents": {}, "functions": {}, "code": {}}
    kinds = [phrase.split()[0] for phrase in changed(**after, versions={})]
    assert kinds == ["seed", "lr", "parent", "parent", "function", "function", "code", "code", "library", "library"]


# Over a graph


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "hi", "completion": "hello"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def graph(files: Path, **sft: Any) -> Graph:
    with recording(runtime=RUNTIME) as recorded:
        data = xray.prepare(source=str(files / "chats.jsonl"))
        base = xray.base(model=str(files / "model"))
        policy = xray.sft(base, data, **sft)
        xray.evaluate(policy, base, data)
    return recorded


def signed(output: Path, parents: dict[str, CheckpointRef]) -> Any:
    """Writes the signed record of a checkpoint."""
    facts: dict[str, Any] = {"run": RunFacts(), "started": datetime.now(UTC), "private_key": signing_key(output)}
    return partial(attest, parents=parents, **facts)


def computed(recorded: Graph, output: Path) -> dict[str, CheckpointRef]:
    """As if the stages had run: a made-up checkpoint of each."""
    store, memory = Store(output / CHECKPOINTS), DigestMemory(output / "digests.sqlite")
    found: dict[str, CheckpointRef] = {}
    for call in recorded.calls.values():
        refs = {role: found[handle.name] for role, handle in call.parents.items()}
        parents = {role: ref.sha256 for role, ref in refs.items()}
        identity, _ = identify(call.kind, call.name, call.config, call.seed, RUNTIME, parents, call.functions, memory)
        with store.building(call.name, identity.key) as built:
            (built / "made").write_text(identity.key)
            type = call.kind.output.__name__
            if type == "Evaluation":
                for name, content in evaluation_files(["hi"], 0.5, 0.0).items():
                    (built / name).write_bytes(content)
            record = signed(output, refs)
            found[call.name] = store.publish(built, identity, type=type, step=0, dataset=None, attest=record)
    return found


def test_computed_stages_are_cached(files: Path, tmp_path: Path) -> None:
    made = computed(graph(files), tmp_path / "out")
    rows = explained(graph(files), tmp_path / "out")
    assert [(name, status) for name, status, _ in rows] == [
        (name, "cached") for name in ("prepare", "base", "sft", "evaluate")
    ]
    key = made["sft"].path.name.removeprefix("sft-")
    assert rows[2][2] == f"key {key}, checkpoint {made['sft'].sha256[:12]}"


def test_stages_never_computed_are_named(files: Path, tmp_path: Path) -> None:
    assert explained(graph(files), tmp_path / "out") == [
        ("prepare", "compute", "never computed in this directory"),
        ("base", "compute", "never computed in this directory"),
        ("sft", "compute", "parent base is computed again"),
        ("evaluate", "compute", "parent sft is computed again"),
    ]


def test_a_changed_field_and_what_is_downstream(files: Path, tmp_path: Path) -> None:
    computed(graph(files), tmp_path / "out")
    rows = explained(graph(files, steps=7, lr=0.5), tmp_path / "out")
    assert [status for _, status, _ in rows] == ["cached", "cached", "compute", "compute"]
    assert rows[2][2] == "lr 0.002 → 0.5; steps 300 → 7"
    assert rows[3][2] == "parent sft is computed again"


def test_a_changed_file_is_shown_by_its_digest(files: Path, tmp_path: Path) -> None:
    computed(graph(files), tmp_path / "out")
    (files / "chats.jsonl").write_text("{}\n")
    why = explained(graph(files), tmp_path / "out")[0][2]
    # sha256 of b"{}\n" begins so.
    assert why.startswith("source file ")
    assert why.endswith(" → file ca3d163bab05")


def test_many_changes_are_cut_short(files: Path, tmp_path: Path) -> None:
    computed(graph(files), tmp_path / "out")
    fields = {"steps": 7, "lr": 0.5, "batch_size": 8, "grad_clip": 2.0, "weight_decay": 0.5, "warmup_fraction": 0.5}
    why = explained(graph(files, **fields, schedule="linear", final_lr_ratio=0.5), tmp_path / "out")[2][2]
    assert why.startswith("batch_size 64 → 8; final_lr_ratio 0.1 → 0.5; ")
    assert why.endswith("; and 2 more")


def test_a_damaged_checkpoint_is_computed_again(files: Path, tmp_path: Path) -> None:
    made = computed(graph(files), tmp_path / "out")
    (made["sft"].path / "made").write_text("other bytes")
    assert explained(graph(files), tmp_path / "out")[2:] == [
        ("sft", "compute", "its checkpoint is missing or damaged"),
        ("evaluate", "compute", "parent sft is computed again"),
    ]
    (made["sft"].path / MANIFEST).write_text("no manifest")
    assert explained(graph(files), tmp_path / "out")[2][2] == "never computed in this directory"


def test_the_newest_checkpoint_is_what_is_compared(files: Path, tmp_path: Path) -> None:
    computed(graph(files, steps=5), tmp_path / "out")
    computed(graph(files, steps=6), tmp_path / "out")
    assert explained(graph(files, steps=7), tmp_path / "out")[2][2] == "steps 6 → 7"
    assert explained(graph(files, steps=5), tmp_path / "out")[2][1] == "cached"


def test_a_checkpoint_that_exists_already_is_an_input(files: Path, tmp_path: Path) -> None:
    made = computed(graph(files), tmp_path / "elsewhere")

    def written(ref: str) -> Graph:
        with recording(runtime=RUNTIME) as recorded:
            xray.sft(recorded.checkpoint(ref), xray.prepare(source=str(files / "chats.jsonl")), name="again")
        return recorded

    ref, output = f"{tmp_path / 'elsewhere'}#sft", tmp_path / "out"
    assert explained(written(ref), output)[1] == ("again", "compute", "parent prepare is computed again")
    store, memory = Store(output / CHECKPOINTS), DigestMemory(output / "digests.sqlite")
    data = computed(graph(files), output)["prepare"]
    call = written(ref).calls["again"]
    parents = {"base": made["sft"].sha256, "data": data.sha256}
    identity, _ = identify(call.kind, "again", call.config, 0, RUNTIME, parents, {}, memory)
    with store.building("again", identity.key) as built:
        refs = {"base": made["sft"], "data": data}
        store.publish(built, identity, type="Model", step=0, dataset=None, attest=signed(output, refs))
    assert explained(written(ref), output)[1][1] == "cached"
    said = explained(written(f"{tmp_path / 'elsewhere'}#base"), output)[1][2]
    assert said == f"parent base {made['sft'].sha256[:12]} → {made['base'].sha256[:12]}"
    with pytest.raises(ConfigError, match="matches nothing"):
        explained(written(f"{tmp_path / 'elsewhere'}#absent"), output)


def test_an_unreadable_source_is_one_line(files: Path, tmp_path: Path) -> None:
    (files / "chats.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"^prepare\.source: '.*chats\.jsonl' is neither a file nor a directory"):
        explained(graph(files), tmp_path / "out")


# The command


def printed(subject: Subject, output: Path, replace_output: bool = False) -> str:
    text = io.StringIO()
    graph = subject.recorded() if subject.config is not None else None
    explain(subject, graph, output, Console(file=text, width=200), replace_output=replace_output)
    return text.getvalue()


def test_a_table_of_the_shipped_lifecycle(tmp_path: Path) -> None:
    lines = printed(Subject(config=LifecycleConfig()), tmp_path / "out").splitlines()
    assert lines[0].split() == ["stage", "why"]
    assert [line.split()[0] for line in lines[1:]] == [
        *("prepare", "base", "sft", "preferences", "reward", "ppo-1", "evaluate")
    ]
    assert lines[1].rstrip().split(maxsplit=2)[1:] == ["compute", "never computed in this directory"]


FLOW = """
import xray

def mine(source, steps: int = 3):
    with xray.workspace({output!r}, runtime={{"device": "cpu"}}):
        data = xray.prepare(source=source)
        tuned = xray.sft(xray.base(model={model!r}), data, steps=steps)
        if tuned.result().metrics["sft/loss"] < 1:
            xray.evaluate(tuned, tuned, data)
"""


@pytest.fixture
def flow(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "explained_flow"
    text = FLOW.format(output=str(tmp_path / "own"), model=str(files / "model"))
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield f"{name}:mine"
    sys.modules.pop(name, None)


def test_a_users_flow_is_explained_as_far_as_it_can_be_planned(flow: str, files: Path, tmp_path: Path) -> None:
    subject = Subject(flow=flow, parameters={"source": str(files / "chats.jsonl")})
    lines = printed(subject, tmp_path / "runs" / "mine").splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["prepare", "base", "sft"]
    assert lines[-1] == "the flow reads the result of sft: stages that it calls afterwards are unknown until it runs"


def test_the_output_of_the_command_line_replaces_the_flows(flow: str, files: Path, tmp_path: Path) -> None:
    with recording(runtime=RUNTIME) as recorded:
        data = xray.prepare(source=str(files / "chats.jsonl"))
        xray.sft(xray.base(model=str(files / "model")), data, steps=3)
    computed(recorded, tmp_path / "own")
    subject = Subject(flow=flow, parameters={"source": str(files / "chats.jsonl")})
    own = printed(subject, tmp_path / "elsewhere")
    other = printed(subject, tmp_path / "elsewhere", replace_output=True)
    assert (own.count("cached"), other.count("cached")) == (3, 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "missing a required argument: 'source'"),
        ({"source": "x", "stepps": 1}, "got an unexpected keyword argument 'stepps'"),
    ],
)
def test_wrong_parameters_are_bad_input(parameters: dict[str, Any], message: str, flow: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        printed(Subject(flow=flow, parameters=parameters), tmp_path / "out")
    assert str(caught.value).removesuffix(". Did you mean 'steps'?") == f"{flow}: {message}"  # Python 3.13 adds it


def test_values_are_no_markup(files: Path, tmp_path: Path) -> None:
    computed(graph(files), tmp_path / "out")
    with recording(runtime=RUNTIME) as recorded:
        xray.prepare(source=str(files / "chats.jsonl"), split="[bold]test[/bold]")
    text = io.StringIO()
    print_table(Console(file=text, width=200), ("stage", "", "why"), explained(recorded, tmp_path / "out"))
    assert 'split "train" → "[bold]test[/bold]"' in text.getvalue()

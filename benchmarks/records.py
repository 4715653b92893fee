"""What deciding, registering, `lineage`, `status`, pruning and auditing take as an output directory grows.

`python -m benchmarks.records [--lifecycles N] [--no-audit]` makes N lifecycles of five checkpoints whose files hold a
few bytes, and measures at N/4, N/2 and N. Stores, statements, signatures and decisions are made by the functions that
runs call. To make them in minutes, nothing is brought to disk (no fsync), pools have one thread, and a statement lists
three packages. MLflow has one policy a lifecycle: the first recorded by the tracker, the others copies of its rows; so
the audit, which would miss the other checkpoints there, is measured without MLflow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.machine import line, machine
from xray.deployments.server_home import ServerHome
from xray.deployments.status import service_status
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.graph.artifacts import dataset_of
from xray_runtime.lineage import provenance
from xray_runtime.lineage.attestation import attest
from xray_runtime.lineage.audit.checkpoints import audit
from xray_runtime.lineage.audit.verified import RECORD
from xray_runtime.lineage.log import Published, append, decide
from xray_runtime.lineage.reference import LineageStore, open_lineage_store, resolve_history
from xray_runtime.lineage.render import lineage_text
from xray_runtime.lineage.retention import Prune, plan_prune, prune
from xray_runtime.lineage.signing import signing_key
from xray_runtime.lineage.statement import RunFacts
from xray_runtime.stages.kinds import find_kind
from xray_runtime.store.checkpoints import Store, load_manifest
from xray_runtime.store.digest_memory import SETTLED_S
from xray_runtime.store.identity import Identity
from xray_runtime.store.ref import CheckpointRef
from xray_runtime.tracking.mlflow_tracker import Tracker

NAME, ALIAS = "records-policy", "candidate"
STAGES: dict[str, tuple[str, dict[str, str]]] = {
    "prepare": ("prepare", {}),
    "base": ("fresh_base", {"data": "prepare"}),
    "sft": ("sft", {"base": "base", "data": "prepare"}),
    "ppo": ("ppo", {"policy": "sft", "prompts": "prepare", "reference": "sft"}),
    "evaluate": ("evaluate", {"policy": "ppo", "against": "sft", "prompts": "prepare"}),
}
"""Stage → kind, and role → stage of each parent."""
MODEL_TABLES = ("logged_models", "logged_model_params", "logged_model_tags", "runs", "params", "tags", "inputs")
VERSION_TABLES = ("model_versions", "model_version_tags")


class OneThread(ThreadPoolExecutor):
    """Does its work when it is handed in: starting threads takes longer than reading a few bytes."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def made_quickly() -> Iterator[None]:
    """Without waiting for the disk and for threads; see the module."""
    machine = provenance._machine() | {"packages": {"torch": "2", "vllm": "1", "ray": "2"}}
    with (
        patch("xray_runtime.store.checkpoints.sync", lambda path: None),
        patch("xray_runtime.store.checkpoints.ThreadPoolExecutor", OneThread),
        patch("concurrent.futures.ThreadPoolExecutor", OneThread),
        patch.object(provenance, "_machine", lambda: machine),
    ):
        yield


class Directory:
    """An output directory of cheap lifecycles."""

    def __init__(self, home: Path) -> None:
        self.output = home / "output"
        (self.output / "checkpoints").mkdir(parents=True)
        self.key = signing_key(self.output)
        self.store = Store(self.output / "checkpoints")
        self.uri = f"sqlite:///{self.output / 'mlflow.db'}"
        self.tracker = Tracker(self.uri, "records", self.output / "mlartifacts")
        self.policies: list[CheckpointRef] = []

    def grow(self, count: int) -> None:
        """Add lifecycles until there are `count`."""
        first = len(self.policies)
        with made_quickly():
            for number in range(first, count):
                self.policies.append(self.lifecycle(number)["ppo"])
        if first == 0:
            self.policies[0] = self.record(self.policies[0])
        self._copy_rows(range(max(first, 1), count))
        for number in range(first, count):
            # fsync is what makes a decision last; here it would measure the disk.
            with patch("os.fsync", lambda descriptor: None):
                self.decide(number, f"{number + 1}")

    def lifecycle(self, number: int) -> dict[str, CheckpointRef]:
        """Publish the five checkpoints of a lifecycle."""
        done: dict[str, CheckpointRef] = {}
        for stage, (kind, parents) in STAGES.items():
            refs = {role: done[name] for role, name in parents.items()}
            identity = Identity(
                stage=f"{stage}-{number}",
                kind=kind,
                config={"lr": 1e-3},
                seed=number,
                parents={role: ref.sha256 for role, ref in refs.items()},
                functions={},
                code={"xray_runtime.stages.made_up": "ab" * 32},
                versions={"torch": "2"},
            )
            facts = RunFacts(flow_run_id="flow")
            record = partial(attest, parents=refs, run=facts, started=datetime.now(UTC), private_key=self.key)
            known = find_kind(kind)
            assert known is not None
            with self.store.building(identity.stage, identity.key) as built:
                for name, content in files(stage, number).items():
                    (built / name).write_bytes(content)
                output, dataset = known.output.__name__, dataset_of(refs.values())
                ref = self.store.publish(built, identity, type=output, step=1, dataset=dataset, attest=record)
            entry = Published(action="publish", directory=ref.path.name, checkpoint=ref.sha256)
            append(self.output, self.key, entry)
            done[stage] = ref
        return done

    def record(self, ref: CheckpointRef) -> CheckpointRef:
        """A policy in MLflow, registered, through the tracker."""
        lifecycle = self.tracker.start_lifecycle(None, "records", {}, "", {})
        manifest = load_manifest(ref.path)
        run = self.tracker.stage_run(lifecycle, ref.stage, manifest.key, manifest.config)
        ref = run.log_checkpoint(ref, manifest, [])
        run.finish("FINISHED")
        self.tracker.registry.register(NAME, ref, run.run_id, ALIAS)
        return ref

    def decide(self, number: int, version: str) -> None:
        sha256 = self.policies[number].sha256
        decide(self.output, self.key, action="register", name=NAME, alias=ALIAS, version=version, checkpoint=sha256)

    def remove(self, number: int) -> None:
        """Take a lifecycle away, with a decision for each checkpoint."""
        graph = open_lineage_store(self.output, None).graph
        own = [node.sha256 for node in graph.nodes.values() if node.manifest.seed == number]
        order = [graph.nodes[sha] for sha in reversed(graph.ancestors(own))]
        prune(LineageStore(self.output, graph, None), Prune(order, []))

    def _copy_rows(self, numbers: range) -> None:
        """The rows of the first policy in MLflow, for others."""
        if not numbers:
            return
        first = self.policies[0]
        model = first.mlflow_model_id
        assert model is not None
        with contextlib.closing(sqlite3.connect(self.output / "mlflow.db")) as database, database:
            (run,) = database.execute("select source_run_id from logged_models where model_id = ?", (model,)).fetchone()
            templates: list[tuple[str, list[tuple[Any, ...]], int]] = []
            for name in (*MODEL_TABLES, *VERSION_TABLES):
                columns = [row[1] for row in database.execute(f"pragma table_info({name})")]
                rows = database.execute(f"select * from {name}").fetchall()
                rows = [row for row in rows if model in map(str, row) or run in row or name in VERSION_TABLES]
                rows = [row for row in rows if "version" not in columns or row[columns.index("version")] == 1]
                templates.append((name, rows, columns.index("version") if name in VERSION_TABLES else -1))
            for number in numbers:
                ref = self.policies[number]
                new = {model: f"m-{number:032}", run: f"{number:032}", first.sha256: ref.sha256, first.uri: ref.uri}
                for name, rows, version in templates:
                    for row in rows:
                        values = [_replaced(value, new) for value in row]
                        if version >= 0:
                            values[version] = number + 1
                        if name == "inputs":
                            values[0] = f"{number:032}{len(values)}"
                        marks = ", ".join("?" * len(values))
                        database.execute(f"insert or replace into {name} values ({marks})", values)


def _replaced(value: Any, new: dict[str, str]) -> Any:
    if isinstance(value, str):
        for old, other in new.items():
            value = value.replace(old, other)
    return value


def files(stage: str, number: int) -> dict[str, bytes]:
    """A few bytes for each stage."""

    def rows(side: str) -> bytes:
        prompts = [[{"role": "user", "content": f"{side} {number} {i}"}] for i in range(4)]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / f"{side}.arrow"
            write_pairs(path, Example, (Example(str(i), str(i), p, "yes") for i, p in enumerate(prompts)))
            return path.read_bytes()

    if stage == "prepare":
        return {"train.arrow": rows("train"), "heldout.arrow": rows("heldout"), "stats.json": b"{}"}
    if stage == "evaluate":
        asked = [f"heldout {number} {i}" for i in range(2)]
        numbers = {"samples": 2, "judge": "gold", "win_rate": 0.6, "win_rate_ci95": [0.5, 0.7], "kl": 1.0}
        content = {"evaluation": numbers, "samples": [{"prompt": asked[0]}], "prompts": asked}
        return {f"{name}.json": json.dumps(value).encode() for name, value in content.items()}
    return {"config.json": b"{}", "model.safetensors": f"{stage} {number}".encode()}


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of this process on a core, and on the clock: other work on the machine adds to the second alone."""
    used, start = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - used, time.perf_counter() - start


def measure(made: Directory, audits: bool) -> dict[str, tuple[float, float]]:
    """Operation → seconds; leaves one lifecycle more behind than it found, and removes one that is new."""
    output, rng = made.output, random.Random(0)
    count = len(made.policies)
    found: dict[str, tuple[float, float]] = {}

    with made_quickly():
        found["publish 5 checkpoints"] = seconds(lambda: made.policies.append(made.lifecycle(count)["ppo"]))
    new = made.policies[count]
    made._copy_rows(range(count, count + 1))
    with contextlib.closing(sqlite3.connect(output / "mlflow.db")) as database, database:
        for table in VERSION_TABLES:
            database.execute(f"delete from {table} where version = ?", (count + 1,))
    new = new.model_copy(update={"mlflow_model_id": f"m-{count:032}"})
    version = ""

    def register() -> None:
        nonlocal version
        version = made.tracker.registry.register(NAME, new, f"{count:032}", ALIAS)
        made.decide(count, version)

    found["register"] = seconds(register)
    assert version == str(count + 1)
    found["register the same again"] = seconds(register)
    found["decide"] = seconds(
        lambda: decide(
            output, made.key, action="promote", name=NAME, alias="champion", version="1", checkpoint=new.sha256
        )
    )
    some = made.policies[rng.randrange(count)].sha256

    def lineage(reference: str) -> None:
        place, node = resolve_history(reference, output, None)
        assert len(list(lineage_text(place.graph, node, False))) > 4

    found["lineage, which finds the new checkpoints"] = seconds(lambda: lineage(some))
    found["lineage SHA256"] = seconds(lambda: lineage(some))
    found["lineage NAME@ALIAS"] = seconds(lambda: lineage(f"{NAME}@{ALIAS}"))
    found["status"] = seconds(lambda: service_status(ServerHome(output.parent), None))
    store = open_lineage_store(output, None)
    found["read every manifest"] = seconds(lambda: open_lineage_store(output, None))

    others = [node for node in store.graph.nodes.values() if node.manifest.seed != count]
    found["plan a prune"] = seconds(lambda: plan_prune(store, others))
    found["read every manifest, prune 5 checkpoints"] = seconds(lambda: made.remove(count))
    made.policies.pop()
    if audits:
        alone = LineageStore(output, open_lineage_store(output, None).graph, None)
        (output / RECORD).unlink(missing_ok=True)
        # What changed within the last seconds is not recorded.
        time.sleep(SETTLED_S)
        found["audit, everything"] = seconds(lambda: _sound(audit(alone, since_verified=True)))
        with made_quickly():
            made.lifecycle(count)
        found["audit --since-verified, one lifecycle later"] = seconds(lambda: since(output))
        made.remove(count)
    return found


def since(output: Path) -> None:
    """With the manifests, as the command does it."""
    alone = LineageStore(output, open_lineage_store(output, None).graph, None)
    _sound(audit(alone, since_verified=True))


def _sound(result: Any) -> None:
    assert result.is_sound, result.broken[:5]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifecycles", type=int, default=1000)
    parser.add_argument("--no-audit", action="store_true", help="leave the audit out: it takes longest")
    options = parser.parse_args()
    print(machine())
    home = Path(tempfile.mkdtemp(prefix="xray-records-"))
    try:
        made = Directory(home)
        columns: dict[int, dict[str, tuple[float, float]]] = {}
        for count in (options.lifecycles // 4, options.lifecycles // 2, options.lifecycles):
            used, passed = seconds(partial(made.grow, count))
            print(f"{count} lifecycles: made in {used:.0f} s of a core, {passed:.0f} s", file=sys.stderr, flush=True)
            columns[count] = measure(made, not options.no_audit)
            print(columns[count], file=sys.stderr, flush=True)
        line(["seconds of a core (on the clock)", *(f"{count:,} lifecycles" for count in columns)])
        line(["---"] * (len(columns) + 1))
        for name in columns[options.lifecycles]:
            line([name, *("{:.3g} ({:.3g})".format(*values[name]) for values in columns.values())])
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()

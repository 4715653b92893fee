"""A lifecycle without training: the real store, records, signatures and MLflow around a few made-up bytes."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from xray_runtime.data.ledger import LedgerShard
from xray_runtime.data.pairs import Example, PreferenceExample, write_pairs
from xray_runtime.kernel.evidence.log import LOG, digests, view
from xray_runtime.kernel.evidence.statement import OutsideSource, RunFacts
from xray_runtime.kernel.evidence.view import RunBegan, RunEnded
from xray_runtime.kernel.graph.artifacts import dataset_of
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.kernel.store.checkpoints import Store, load_manifest
from xray_runtime.kernel.store.identity import Identity, digest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.tracking.mlflow_tracker import ARTIFACTS, Tracker, params_of
from xray_runtime.kernel.tracking.recorder import CURVES, METRICS, read_points, records_directory
from xray_runtime.kernel.tracking.registry import LOG_TAG
from xray_runtime.kernel.tracking.registry_view import RegistryView
from xray_runtime.live.feedback.session import Setup
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.rewards.config import reward_term
from xray_runtime.trust.attestation import attest, publish_card
from xray_runtime.trust.log import append, log_checkpoints
from xray_runtime.trust.model_page import register_policy
from xray_runtime.trust.signing import signing_key

CONFIG = {"seed": 0, "project": "synthetic"}
NAME, ALIAS = "synthetic-policy", "candidate"


def prompt(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number}"}]


def pair_file(of: type[Any], pairs: Iterable[Any] = ()) -> bytes:
    """What a file of these pairs holds."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "pairs"
        write_pairs(path, of, pairs)
        return path.read_bytes()


def examples(numbers: range) -> bytes:
    return pair_file(Example, (Example(str(i), str(i), prompt(i), f"answer {i}") for i in numbers))


def preferences(numbers: range) -> bytes:
    return pair_file(PreferenceExample, (PreferenceExample(str(i), prompt(i), "better", "worse") for i in numbers))


def weights(seed: str, size: int = 3000) -> bytes:
    return random.Random(seed).randbytes(size)


def rollouts(iteration: int) -> bytes:
    """A shard of a ledger."""
    replies = pa.array([[number, 7] for number in range(4)], pa.list_(pa.int32()))
    table = pa.table({"row": pa.array(range(4), pa.int32()), "reply_ids": replies})
    return LedgerShard(iteration, None, table).to_bytes()


def model(seed: str) -> dict[str, bytes]:
    """The files of one."""
    return {"config.json": b"{}", "model.safetensors": weights(seed)}


def ledger() -> dict[str, bytes]:
    """Two iterations of one."""
    return {f"ledger/{number:06d}.parquet": rollouts(number) for number in range(2)}


def comparison(a: str, b: str) -> Setup:
    """A comparison of two policies on typed prompts."""
    limits: dict[str, Any] = {"max_prompt_tokens": None, "max_new_tokens": 8}
    return Setup(a=a, b=b, prompts="typed", source=None, temperature=1.0, seed=0, **limits)


JUDGED = 40
"""Prompts that a judge of an evaluation says to have seen."""


def judged(win_rate: float, delta: float) -> dict[str, Any]:
    """What one judge of an evaluation says."""
    interval = [round(win_rate - 0.2, 6), round(win_rate + 0.2, 6)]
    won = round(JUDGED * win_rate) if win_rate == win_rate else None
    counts = {"samples": JUDGED, "won": won, "lost": JUDGED - (won or 0), "tied": 0}
    return {"judges": True, **counts, "win_rate": win_rate, "win_rate_ci95": interval, "delta": delta}


def evaluation_files(asked: list[str], win_rate: float, gold_delta: float) -> dict[str, bytes]:
    evaluation = {
        "judges": {"gold": judged(win_rate, gold_delta)},
        "samples": len(asked),
        "judge": "gold",
        "win_rate": win_rate,
        "win_rate_ci95": [round(win_rate - 0.2, 6), round(win_rate + 0.2, 6)],
        "kl": 1.25,
        "length_before": 8.0,
        "length_after": 10.0,
        "reward_before": 0.0,
        "reward_after": 1.0,
        "gold_delta": gold_delta,
    }
    samples = [{"prompt": text, "before": "a", "after": "b"} for text in asked[:2]]
    return {
        "evaluation.json": json.dumps(evaluation).encode(),
        "samples.json": json.dumps(samples).encode(),
        "lost.json": json.dumps([samples[0] | {"gold_before": 0.5, "gold_after": -0.25}]).encode(),
        "prompts.json": json.dumps(asked).encode(),
    }


def judged_by(asked: list[str], rewards: Sequence[str] = ("rewards.0",)) -> dict[str, Any]:
    """The config of an evaluation, as a manifest has it: another one for other prompts."""
    num_prompts = 8 + sum(int(text.split()[-1]) for text in asked)
    terms = [reward_term(model=role) for role in rewards]
    config = EvaluationConfig(num_prompts=num_prompts, rewards=terms, gold="vader")
    return config.model_dump(mode="json") | {"runtime": {"device": "cpu", "threads": 2}}


@dataclass
class Lifecycle:
    """Builds checkpoints into `output`; with `tracking` they are in MLflow too."""

    output: Path
    tracking: bool = True
    done: dict[str, CheckpointRef] = field(default_factory=dict)
    policy: str = "ppo-2"
    """The stage that made what is registered."""

    def __post_init__(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        self.key = signing_key(self.output)
        self.store = Store(self.output / "checkpoints")
        self.tracker = None
        self.run_id = None
        if self.tracking:
            uri = f"sqlite:///{self.output / 'mlflow.db'}"
            self.tracker = Tracker(uri, "synthetic", self.output / "mlartifacts")
            tags = {"xray.output": str(self.output)}
            self.run_id = self.tracker.start_lifecycle(None, "synthetic", CONFIG, "seed: 0\n", tags)
            began = RunBegan(
                run_id=self.run_id,
                run_directory="",
                facts=self.facts(),
                tracking="",
                experiment="synthetic",
                name="synthetic",
                params=digest(params_of(CONFIG)),
                tags=tags,
            )
            append(self.output, began)

    @classmethod
    def resumed(cls, output: Path) -> Lifecycle:
        """The lifecycle in `output`, for more stages; they name those there by stage."""
        life, there = cls(output), open_lineage_store(output, None)
        assert there.tracking_uri is not None
        model_of = RegistryView(there.tracking_uri).model_of
        life.done = {n.manifest.stage: n.reference(model_of(sha)) for sha, n in there.graph.nodes.items()}
        return life

    def facts(self) -> dict[str, Any]:
        return {"project": "synthetic", "seed": 0, "config_digest": digest(CONFIG)}

    def add(
        self,
        stage: str,
        kind: str,
        files: Mapping[str, bytes],
        parents: Mapping[str, str],
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        type: str | None = None,
        **facts: Any,
    ) -> CheckpointRef:
        """Publish `stage`; `parents` maps roles to stages already there. A kind that is not known needs its type."""
        refs = {role: self.done[name] for role, name in parents.items()}
        known = find_kind(kind)
        identity = Identity(
            stage=stage,
            kind=kind,
            config=dict(config or {"lr": 1e-3}),
            seed=seed,
            parents={role: ref.sha256 for role, ref in refs.items()},
            functions={},
            code={"xray_runtime.methods.common.made_up": "ab" * 32},
            versions={"torch": "2"},
        )
        key = identity.key
        run = self.tracker.stage_run(self.run_id, stage, key, identity.config) if self.tracker else None
        run_id = run.run_id if run else None
        facts = RunFacts(flow_run_id="flow", mlflow_run_id=run_id, mlflow_parent_run_id=self.run_id, **facts)
        record = partial(attest, parents=refs, run=facts, started=datetime.now(UTC), private_key=self.key)
        with self.store.building(stage, key) as built:
            for name, content in files.items():
                (built / name).parent.mkdir(exist_ok=True)
                (built / name).write_bytes(content)
            ref = self.store.publish(
                built,
                identity,
                type=type or known.output.__name__,
                step=1,
                dataset=dataset_of(refs.values()),
                attest=record,
            )
        numbers = json.loads(files[known.results]) if known is not None and known.sides else {"loss": 1.0, "lr": 0.5}
        values = {f"{kind}/{k}": float(v) for k, v in numbers.items() if isinstance(v, int | float)}
        records = records_directory(self.output, stage, key)
        records.mkdir(parents=True, exist_ok=True)
        lines = [{"step": step, "time_ms": step + 1, "metrics": values} for step in range(3)]
        (records / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (records / "training.svg").write_text(f"a picture of {stage}")
        (records / METRICS).with_suffix(CURVES).write_text(f"<svg>{stage}</svg>")
        if run is not None:
            ref = run.log_checkpoint(ref, load_manifest(ref.path), list(refs.values()))
            run.points(read_points(records / METRICS))
            run.picture(records / "training.svg")
            run.finish("FINISHED", 1)
        result = self.output / "results" / f"{ref.path.name}.json"
        result.parent.mkdir(exist_ok=True)
        result.write_text(json.dumps({"name": stage, "seconds": 1.5, "attempts": 1}))
        left = digests(self.output, [records, result, self.output / ARTIFACTS / str(run_id)])
        log_checkpoints(self.output, {ref.path.name: ref.sha256}, left, here=True, renew=True)
        self.done[stage] = ref
        return ref

    def whole(
        self,
        asked: list[str] | None = None,
        gold_delta: float = 0.2,
        graph: str = "ppo",
        gates: Mapping[str, Any] | None = None,
    ) -> Lifecycle:
        """One of GRAPHS, its policy evaluated and registered.

        With `ppo`: prepare → base → sft → preferences → reward → ppo-1 → ppo-2 → evaluate.
        """
        self.policy = GRAPHS[graph](self)
        asked = asked or [f"question {i}" for i in range(50, 56)]
        self.evaluate(asked, self.policy, gold_delta=gold_delta, gates=gates)
        self.register(self.policy)
        self.record()
        return self

    def data_and_sft(self) -> None:
        data = {
            "train.arrow": examples(range(50)),
            "heldout.arrow": examples(range(50, 60)),
            "stats.json": b'{"pairs": 60}',
        }
        own = OutsideSource(kind="file", name="own.jsonl", digest="ef" * 32, field="prepare.source")
        self.add("prepare", "prepare", data, {}, {"source": f"file:{own.digest}", "lr": 0.1}, outside=[own])
        self.add("base", "fresh_base", model("base"), {"data": "prepare"})
        self.add("sft", "sft", model("sft"), {"base": "base", "data": "prepare"})

    def pairs(self) -> None:
        files = {
            "train.arrow": preferences(range(20)),
            "heldout.arrow": preferences(range(20, 25)),
            "stats.json": b'{"pairs": 25}',
        }
        self.add("preferences", "preferences", files, {"policy": "sft", "data": "prepare"})

    def ppo(self) -> str:
        self.data_and_sft()
        self.pairs()
        head = {"reward_head/head.safetensors": weights("head", 100), "reward.json": b'{"mean": 0, "std": 1}'}
        self.add("reward", "reward_model", model("reward") | head, {"policy": "sft", "data": "preferences"})
        policy = "sft"
        for stage in ("ppo-1", "ppo-2"):
            roles = {"policy": policy, "prompts": "prepare", "reference": "sft", "rewards.0": "reward"}
            self.add(stage, "ppo", model(stage) | ledger(), roles)
            policy = stage
        return policy

    def grpo(self) -> str:
        """Groups and a function: no pairs, no reward model; the policy answers a benchmark too."""
        self.data_and_sft()
        self.add("grpo", "ppo", model("grpo") | ledger(), {"policy": "sft", "prompts": "prepare"})
        answered = evaluation_files(["question 56", "question 57"], 0.5, 0.0)
        answered["benchmark.json"] = answered.pop("evaluation.json")
        self.add("benchmark", "benchmark", answered, {"policy": "grpo", "prompts": "prepare"})
        return "grpo"

    def offline(self) -> str:
        """Pairs without a reward model, one stage after another."""
        self.data_and_sft()
        self.pairs()
        self.add("dpo", "dpo", model("dpo"), {"policy": "sft", "preferences": "preferences"})
        self.add("kto", "kto", model("kto"), {"policy": "dpo", "preferences": "preferences", "reference": "sft"})
        return "kto"

    def rejection_sampling(self) -> str:
        """A policy's best replies are what the next is trained on, twice."""
        self.data_and_sft()
        policy = "sft"
        for number in (1, 2):
            best, trained = f"best-{number}", f"sft-best-{number}"
            files = {"train.arrow": examples(range(number, 50)), "stats.json": b"{}"}
            self.add(best, "best_of_n", files, {"policy": policy, "prompts": "prepare"})
            self.add(trained, "sft", model(trained), {"base": policy, "data": best})
            policy = trained
        return policy

    def register(self, stage: str) -> None:
        if self.tracker is None:
            return
        ref = self.done[stage]
        run_id = self.tracker.client.get_logged_model(ref.mlflow_model_id).source_run_id
        judged = [r for r in self.done.values() if load_manifest(r.path).parents.get("policy") == ref.sha256]
        evaluation = next((r for r in reversed(judged) if r.type == "Evaluation"), None)
        register_policy(self.output, self.tracker.registry, NAME, ref, run_id, evaluation)

    def evaluate(
        self,
        asked: list[str],
        policy: str = "ppo-2",
        stage: str = "evaluate",
        win_rate: float = 0.6,
        gold_delta: float = 0.2,
        gates: Mapping[str, Any] | None = None,
        numbers: Mapping[str, Any] | None = None,
    ) -> CheckpointRef:
        """`numbers` replace those of evaluation.json."""
        rewards = {"rewards.0": "reward"} if "reward" in self.done else {}
        roles = {"policy": policy, "against": "sft", "prompts": "prepare"} | rewards
        files = evaluation_files(asked, win_rate, gold_delta)
        files["evaluation.json"] = json.dumps(json.loads(files["evaluation.json"]) | dict(numbers or {})).encode()
        ref = self.add(stage, "evaluate", files, roles, judged_by(asked, list(rewards)), gates=gates)
        publish_card(ref.path, self.done[policy].path)
        return ref

    def compare(
        self, policy: str, champion: str, asked: list[str], win_rate: float = 0.5, stage: str = "compare"
    ) -> CheckpointRef:
        roles = {"policy": policy, "champion": champion, "prompts": "prepare", "rewards.0": "reward"}
        files = evaluation_files(asked, win_rate, 0.0)
        files["comparison.json"] = files.pop("evaluation.json")
        return self.add(stage, "compare", files, roles, judged_by(asked))

    def record(self) -> None:
        """lifecycle.json, as far as an audit reads it."""
        stages = [
            {
                "name": name,
                "checkpoint": {"uri": ref.uri, "sha256": ref.sha256},
                "parents": sorted(set(load_manifest(ref.path).parents.values())),
            }
            for name, ref in self.done.items()
        ]
        evaluation = json.loads((self.done["evaluate"].path / "evaluation.json").read_text())
        run_id = self.run_id or "untracked"
        ended = {"run_id": run_id, "status": "completed", "seconds": 9.5}
        content = ended | self.facts() | {"stages": stages, "evaluation": evaluation}
        policy = self.done[self.policy]
        page = self.output / "lineage" / f"{policy.path.name}.html"
        page.parent.mkdir(exist_ok=True)
        files = [page, self.output / "report.html", self.output / "config.yaml"]
        for path in files:
            path.write_text(json.dumps(CONFIG) if path.suffix == ".yaml" else f"what {path.name} says")
        record = self.output / "lifecycle.json"
        record.write_text(json.dumps(content, indent=2))
        if self.tracker is not None:
            self.tracker.log_files(run_id, self.output / "report.html", record)
        self.end()

    def end(self) -> None:
        """Sign what the run left, and say that it ended."""
        run_id = self.run_id or "untracked"
        paths = [self.output / name for name in ("lineage", "report.html", "config.yaml", "lifecycle.json")]
        left = digests(self.output, [*paths, self.output / ARTIFACTS / run_id])
        append(self.output, RunEnded(run_id=run_id, status="completed"), left)
        if self.tracker is not None:
            self.tracker.log_datasets(run_id)
            self.tracker.tag(run_id, {LOG_TAG: view(self.output).mark})
            self.tracker.finish(run_id, "FINISHED")


def copied(source: Path, output: Path) -> Path:
    """A copy of an output directory."""
    shutil.copytree(source, output, symlinks=True)
    if not (output / "mlflow.db").exists():
        return output
    # MLflow keeps where an experiment's artifacts go: those of runs to come belong to the copy.
    with contextlib.closing(sqlite3.connect(output / "mlflow.db")) as connection, connection:
        move = "update experiments set artifact_location = replace(artifact_location, ?, ?)"
        connection.execute(move, (str(source), str(output)))
    return output


def decided(output: Path) -> list[dict[str, Any]]:
    """Every decision of the log, as it stands there."""
    payloads = [json.loads(line)["payload"] for line in (output / LOG).read_bytes().splitlines()]
    entries = [json.loads(base64.b64decode(payload))["predicate"] for payload in payloads]
    return [entry for entry in entries if "alias" in entry]


GRAPHS: dict[str, Callable[[Lifecycle], str]] = {
    build.__name__: build for build in (Lifecycle.ppo, Lifecycle.grpo, Lifecycle.offline, Lifecycle.rejection_sampling)
}
"""Each builds all up to its policy, and returns the name of that."""

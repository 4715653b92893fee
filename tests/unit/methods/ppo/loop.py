"""PPO's loop over WholeModels that live in this process and answer with arrays worked out by hand: no Ray, no engine.

Every reply is one word and the end token. The reference lies 1.1 nats below the policy at each token, so the KL of a
reply is 2.2; four replies an iteration, two a minibatch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import pytest

from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.protocols import ModelHandle, Ready
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model, RewardModel
from xray_runtime.kernel.store.shared import SharedFolder
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.ppo.body import run
from xray_runtime.methods.ppo.config import KLConfig, PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards.config import reward_term

P = ParamSpec("P")


T = TypeVar("T")


KL_PER_TOKEN = 1.1


REPLIES, MINIBATCH = 4, 2


MAX_NEW_TOKENS = 4


class Later(Ready[T]):
    """An answer that is there at a point of the world's time: whoever gets it before waits until then."""

    def __init__(self, world: World, at: float, answer: T) -> None:
        vars(self).update(world=world, at=at, answer=answer)

    @property
    def value(self) -> T:  # type: ignore[override]
        self.world.now = max(self.world.now, self.at)
        return self.answer


class Method(Generic[P, T]):
    """A method of one model, which runs its calls one after the other and takes `World.seconds` for each."""

    def __init__(self, model: PPOModel, name: str, function: Callable[P, T]) -> None:
        self._model, self._name, self._function = model, name, function

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Ready[T]:
        model, world = self._model, self._model.world
        answer = self._function(*args, **kwargs)
        work = len(args[0]) if self._name in ("score", "train", "generate") else 1
        if self._name == "generate":
            work *= args[1].max_new_tokens
        model.busy_until = max(model.busy_until, world.now) + work * world.seconds.get(self._name, 0.0)
        return Later(world, model.busy_until, answer)


@dataclass
class World:
    """What all models of one attempt share."""

    now: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Method → how long it takes for a row, `generate` for a token that may be sampled."""

    calls: list[str] = field(default_factory=list)
    """Role and method of each call, in order; of `follow` and `generate` also the version."""
    batches: list[tuple[str, TextBatch, dict[str, float], float]] = field(default_factory=list)
    """Role and arguments of each `train`."""
    value_head: bool = True
    """Whether the policy has one."""
    scored: Counter[str] = field(default_factory=Counter)
    """Role → how many rows it scored."""
    seeds: list[int] = field(default_factory=list)
    """Of the replies, in order."""
    shares: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each `score` and `train`: among how many models the threads are shared."""
    approx_kl: Callable[[int], float] = lambda update: 0.0
    """Number of the update → mean KL a token to the rollout's policy that the policy reports."""
    generator_off_by: float = 0.0
    """How much its log-probabilities differ from the policy's."""
    surer_by: float = 0.0
    """What a minibatch step adds to the policy's log-probabilities, and a sync to the generator's."""
    updates_in_files: int = 0
    """Number of updates of the policy that is read from files."""


def logprob(tokens: np.ndarray) -> np.ndarray:
    """What the policy gives a token: any function of it."""
    return (-0.25 * (tokens % 7) - 2.0).astype(np.float32)


def words(rows: TextBatch) -> np.ndarray:
    """The last token but one of each row [B]."""
    return np.array([ids[-2] for ids in rows.input_ids])


def plain(batch: tuple[str, TextBatch, dict[str, float], float]) -> tuple[Any, ...]:
    """What a model was asked to learn, in a form that can be compared."""
    role, rows, *rest = batch
    columns = {name: c if isinstance(c, np.ndarray) else [c.values, c.offsets] for name, c in rows.columns().items()}
    return role, columns, *rest


class PPOModel:
    """A WholeModel, as far as PPO's loop uses it."""

    def __init__(self, role: str, world: World, eos_token_id: int) -> None:
        self.role, self.world, self.eos_token_id = role, world, eos_token_id
        self.version = self.updates = 0
        self.busy_until = 0.0
        self.score, self.train = Method(self, "score", self._score), Method(self, "train", self._train)

        self.reference = Method(self, "reference", self._reference)
        self.generate, self.follow = Method(self, "generate", self._generate), Method(self, "follow", self._follow)
        self.save, self.save_state = Method(self, "save", self._save), Method(self, "save_state", self._save_state)
        self.check_state = Method(self, "check_state", lambda directory: None)
        self.load_state = Method(self, "load_state", self._load)
        self.load_checkpoint = Method(self, "load_checkpoint", self._load_checkpoint)
        self.sleep = Method(self, "sleep", lambda synced_next=False: self._note("drop" if synced_next else "sleep"))
        self.wake_up = Method(self, "wake_up", lambda: self._note("wake_up"))
        self.load_weights = Method(self, "load_weights", lambda update: pytest.fail("PPO syncs by `follow`"))

    @property
    def surer(self) -> float:
        return self.world.surer_by * self.updates

    def _note(self, what: str) -> None:
        self.world.calls.append(f"{self.role} {what}")

    def _follow(self, policy: ModelHandle, version: int) -> str:
        assert policy.role == "policy"  # type: ignore[attr-defined]
        self._note(f"follow {version}")
        self.version, self.updates = version, policy.updates  # type: ignore[attr-defined]
        return f"{self.updates} steps, {self.surer:g}"

    def _load_checkpoint(self, directory: Path, version: int) -> None:
        self._note(f"load_checkpoint {directory.name}")
        self.version, self.updates = version, self.world.updates_in_files

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        probe = len(rows) != REPLIES
        self._note(f"{'probe' if probe else 'generate'} {version}")
        assert version == self.version
        self.world.seeds += rows.seed.tolist()
        tokens = Ragged.of([20 + seed % 50, sampling.stop_token_ids[0]] for seed in rows.seed)
        logprobs = logprob(tokens.values) + np.float32(self.world.generator_off_by + self.surer)
        ended = np.ones(len(tokens), bool)
        return ReplyBatch(response_ids=tokens, rollout_logprobs=Ragged(logprobs, tokens.offsets), ended=ended)

    def _score(self, rows: TextBatch) -> Scores:
        self._note("score")
        self.world.scored[self.role] += len(rows)
        if self.role == "rewards.0":
            # The word decides; the last token is the end token.
            return Scores(scores=(words(rows) % 5).astype(np.float32))
        logprobs = self._logprobs(rows)
        if self.role == "reference":
            return self._of_reference(logprobs)
        zeros = Ragged(np.zeros_like(logprobs.values), logprobs.offsets)
        values = Scores(values=zeros, final_values=np.zeros(len(logprobs), np.float32))
        if self.role == "critic":
            return values
        return (values if self.world.value_head else Scores()).with_columns(logprobs=logprobs)

    def _reference(self, rows: TextBatch) -> Scores:
        self._note("with its adapters off")
        return self._of_reference(self._logprobs(rows))

    def _of_reference(self, logprobs: Ragged) -> Scores:
        return Scores(ref_logprobs=Ragged(logprobs.values - np.float32(KL_PER_TOKEN), logprobs.offsets))

    def _train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        self._note("train")
        self.world.batches.append((self.role, rows, totals, lr))
        kl = self.world.approx_kl(self.updates) * totals.tokens
        self.updates += 1
        values = {"value_loss": 1.0, "value_clip_count": 0.0}
        if self.role == "critic":
            return values | {"grad_norm": 3.0}
        counts = dict.fromkeys(("policy_loss", "entropy_sum", "clip_count", "dual_clip_count"), 1.0)
        return counts | values | {"approx_kl_sum": kl, "grad_norm": 2.0}

    def _logprobs(self, rows: TextBatch) -> Ragged:
        """The policy's."""
        replies = [ids[n:] for ids, n in zip(rows.input_ids, rows.prompt_lengths, strict=True)]
        return Ragged.of((logprob(reply) + np.float32(self.surer) for reply in replies), np.float32)

    def _save(self, directory: Path, head_file: str | None = None) -> None:
        self._note(f"save {directory.name}")

    def _save_state(self, directory: Path) -> None:
        directory.write_text(str(self.updates))

    def _load(self, directory: Path) -> None:
        self._note("load_state")
        self.updates = int(directory.read_text())


def make_inputs(root: Path) -> PPOInputs:
    """A tokenizer, ten prompts, and a reward model whose scores are taken as they are."""
    for name in ("model", "data", "reward"):
        (root / name).mkdir()
    prompts = [f"question number {number}" for number in range(10)]
    for name in ("model", "reward"):
        train_tokenizer([*prompts, "an answer"] * 5, 300).save_pretrained(root / name)
    examples = [
        Example(str(i), "c", [{"role": "user", "content": text}], "an answer") for i, text in enumerate(prompts)
    ]
    write_pairs(root / "data" / "train.arrow", Example, examples)
    (root / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    (root / "reward" / "reward.json").write_text('{"mean": 0.0, "std": 1.0}')
    return PPOInputs(Model(root / "model"), Dataset(root / "data"), rewards=[RewardModel(root / "reward")])


def attempt(
    inputs: PPOInputs,
    out: Path,
    world: World,
    *,
    newest: Snapshot | None = None,
    runtime: RuntimeConfig | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    kept: Path | None = None,
    kept_shared: SharedFolder | None = None,
    model: type[PPOModel] = PPOModel,
    updates: int | None = None,
    ends_with_last: bool = True,
    **fields: Any,
) -> FakeRecorder:
    """Run the stage over fake models. `updates`: iterations that the policy it ends with has learned from; all."""
    config = PPOConfig(
        **{
            "iterations": 2,
            "prompts_per_iteration": REPLIES,
            "minibatch_size": MINIBATCH,
            "epochs": 1,
            "max_new_tokens": MAX_NEW_TOKENS,
            "rewards": [reward_term(model="rewards.0")],
            "kl": KLConfig(coef=0.1, target=2.0, horizon=8.0),
            # Without models of its own, so that it need not read what was written.
            "generator": GeneratorConfig(engine="transformers"),
        }
        | fields
    )

    world.value_head = config.critic_in_use == "shared"

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
        for role, spec in specs.items():
            if role not in ("generator", "champion"):
                world.shares[role] = spec.scoring_at_once, spec.training_at_once
        yield {role: model(role, world, eos_token_id=1) for role in specs}  # type: ignore[misc]

    out.mkdir()
    recorder = FakeRecorder(out, newest)
    given = (runtime or RuntimeConfig(), open_models, functions or {}, kept, kept_shared)
    stage = Stage("ppo", 7, config, inputs, *given)
    done = run(stage, out, recorder)  # type: ignore[arg-type]
    assert done == (updates or config.iterations) or not ends_with_last
    return recorder

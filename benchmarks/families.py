"""Every family of models as a tiny random one, through what stages do with it: the table of families.

    python -m benchmarks.families [--only gemma2 mamba …] [--again] [--out docs/families-table.md]

Each row is a model of `family_recipes`, taken in by stage `base`, and then trained, sampled and published by the models
that stages open, without Ray (`local_models`). Results are kept in `families.json`, so an interrupted run goes on at
the row where it was; `--again` forgets the results of the rows that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.family_recipes import OMIT, RECIPES, SIZES, is_mixture, model_type
from benchmarks.local_models import LocalModels
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import get
from xray_runtime.data.batch import PairBatch, PolicyBatch, PromptBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import cause_line, root_cause
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD
from xray_runtime.methods.base.body import run as run_base
from xray_runtime.methods.base.config import HubBase
from xray_runtime.methods.common.mismatch import FLOAT32_MISMATCH
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.reward_model.config import RewardConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.pretrained_shapes import from_pretrained

RESULTS = Path(__file__).with_name("families.json")
RUNTIME = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
CELLS = ("base", "SFT", "GRPO", "files = transformers", "files = vLLM", "LoRA", "reward model", "plan")
YES, NOT_RUN = "●", ""
VOCABULARY = 320
STEPS, ITERATIONS, NEW_TOKENS, MAX_LENGTH = 4, 2, 8, 64
LR = 1e-3
CONSTANT = 0.2
"""Deviation of elements that a new model has all alike."""


class TrainingDiffers(RuntimeError):
    """Two sides that should be equal are not."""


@dataclass
class FamilyRow:
    """One family on its way through the cells."""

    name: str
    directory: Path
    opener: LocalModels
    results: dict[str, str] = field(default_factory=dict)
    """Cell → `YES`, or the one line in its place."""
    engine: str = "vllm"
    """The generator, once `base` has tried it."""

    @property
    def base(self) -> Path:
        return self.directory / "base"

    @property
    def published(self) -> Path:
        return self.directory / "published"

    def models(self, **specs: ModelSpec | GeneratorSpec) -> AbstractContextManager[dict[str, Any]]:
        """Open the models that a stage would open."""
        return self.opener(specs)


def make_source(row: FamilyRow) -> Path:
    """The random model of a row, with a tokenizer, as somebody would publish it."""
    import torch
    import transformers

    from xray_runtime.data.tokenizing import train_tokenizer

    tokenizer = train_tokenizer(["hello there", "how are you today", "fine thanks"] * 20, VOCABULARY)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    fields = SIZES | ends | {"vocab_size": len(tokenizer)} | RECIPES[row.name]
    fields = {name: value for name, value in fields.items() if value is not OMIT}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type(row.name), **fields)
    source = row.directory / "source"
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in lm.state_dict().values():
            # Biases, those by which routers select too, norms: what ignores one shows.
            if tensor.is_floating_point() and tensor.numel() > 1 and (tensor == tensor.flatten()[0]).all():
                tensor += CONSTANT * torch.randn_like(tensor)
    lm.save_pretrained(source)
    tokenizer.save_pretrained(source)
    return source


def base(row: FamilyRow) -> str:
    """Stage `base`, with vLLM and, where that is refused, with transformers' generator, or without one."""
    source = make_source(row)
    for engine, cell in (("vllm", "files = vLLM"), ("transformers", "GRPO")):
        row.engine = engine
        try:
            _base_stage(row, source, GeneratorConfig(engine=engine))
            return YES
        except ValueError as error:
            refusal = cause_line(error)
            if ".generator:" not in refusal:
                raise
            row.results[cell] = _plain(refusal, row)
            shutil.rmtree(row.base)
            row.opener.close()  # transformers cannot build some models where vLLM failed to
    _base_stage(row, source, None)
    return YES


def _base_stage(row: FamilyRow, source: Path, generator: GeneratorConfig | None) -> None:
    row.base.mkdir()
    config = HubBase(model=str(source), generator=generator)
    stage: Any = SimpleNamespace(name="base", seed=3, config=config, runtime=RUNTIME, open_models=row.opener)
    recorder: Any = SimpleNamespace(progress=lambda *_: None, metrics=lambda *_, **__: None)
    run_base(stage, row.base, recorder)


def texts(seed: int, count: int = 6, prompts: int = 3) -> TextBatch:
    """Random rows, some with the same prompt."""
    rng = np.random.default_rng(seed)
    asked = [rng.integers(5, 270, size=rng.integers(3, 9)) for _ in range(prompts)]
    return TextBatch.of(
        [asked[n % prompts] for n in range(count)],
        [rng.integers(5, 270, size=rng.integers(2, 8)) for _ in range(count)],
    )


def sft(row: FamilyRow) -> str:
    """A few steps on the same rows, whose loss must fall; saving compares the files with the model."""
    from xray_runtime.models.objectives import SFTObjective

    policy = ModelSpec(row.base, SFTObjective(), training=SFTConfig(lr=LR))
    with row.models(policy=policy) as models:
        _check_falls([_step(models["policy"], texts(0), "nll", lambda t: t.tokens) for _ in range(STEPS)])
        get(models["policy"].save.remote(row.directory / "sft"))
    return YES


def grpo(row: FamilyRow) -> str:
    """Iterations of GRPO; the generator's log-probabilities are the trainer's, before and after each sync."""
    from xray_runtime.methods.ppo.objectives import PPOObjective

    config = PPOStageConfig(method="grpo", lr=LR, temperature=1.0)
    specs: dict[str, ModelSpec | GeneratorSpec] = {
        "policy": ModelSpec(row.directory / "sft", PPOObjective(config), training=config),
        "generator": GeneratorSpec(row.directory / "sft", MAX_LENGTH, GeneratorConfig(engine=row.engine)),
    }
    with row.models(**specs) as models:
        for version in range(ITERATIONS + 1):
            rows, sampled = _rollout(models["generator"], version)
            found = get(models["policy"].score.remote(rows)).logprobs
            _check_same(found.values, sampled, f"generator and trainer (version {version})")
            if version < ITERATIONS:
                rng = np.random.default_rng(version)
                advantages = found.like(np.repeat(rng.normal(size=len(rows)), found.lengths).astype(np.float32))
                ones = found.like(np.ones(len(found.values), np.float32))
                batch = rows.as_kind(
                    PolicyBatch, old_logprobs=found, ref_logprobs=found, advantages=advantages, weights=ones
                )
                _step(models["policy"], batch, "policy_loss", lambda t: t.tokens)
                get(models["generator"].follow.remote(models["policy"], version + 1))
        get(models["policy"].save.remote(row.published))
        np.savez(row.directory / "rows.npz", ids=rows.input_ids.values, offsets=rows.input_ids.offsets,
                 prompts=rows.prompt_lengths, logprobs=found.values)  # fmt: skip
    return YES if row.engine == "vllm" else f"{YES} ({row.engine})"


def by_transformers(row: FamilyRow) -> str:
    """Plain transformers, with the attention of the model's authors, computes from the files what was trained."""
    import torch
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(
        row.published, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    kept = np.load(row.directory / "rows.npz", allow_pickle=False)
    ids = np.split(kept["ids"], kept["offsets"][1:-1])
    found = []
    for tokens, prompt in zip(ids, kept["prompts"], strict=True):
        with torch.no_grad():
            logprobs = lm(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].log_softmax(-1)
        found.append(logprobs[prompt - 1 : -1].gather(1, torch.from_numpy(tokens[prompt:])[:, None])[:, 0].numpy())
    _check_same(np.concatenate(found), kept["logprobs"], "transformers and trainer")
    return YES


def by_vllm(row: FamilyRow) -> str:
    """A new engine on the published files samples what their trainer computes."""
    from xray_runtime.models.objectives import ReferenceObjective

    specs: dict[str, ModelSpec | GeneratorSpec] = {
        "scorer": ModelSpec(row.published, ReferenceObjective(1.0)),
        # Another length: no engine that was opened before is reloaded.
        "generator": GeneratorSpec(row.published, MAX_LENGTH + 32),
    }
    with row.models(**specs) as models:
        rows, sampled = _rollout(models["generator"], 0)
        _check_same(get(models["scorer"].score.remote(rows)).ref_logprobs.values, sampled, "vLLM and trainer")
    return YES


def lora(row: FamilyRow) -> str:
    """Steps of adapters; saving compares the merged files with the model."""
    from xray_runtime.models.objectives import SFTObjective

    training = SFTConfig(lr=10 * LR, lora=LoRAConfig(rank=4))
    with row.models(policy=ModelSpec(row.base, SFTObjective(), training=training)) as models:
        _check_falls([_step(models["policy"], texts(0), "nll", lambda t: t.tokens) for _ in range(STEPS)])
        get(models["policy"].save.remote(row.directory / "lora"))
    return YES


def reward_model(row: FamilyRow) -> str:
    """Steps on pairs; saving compares model and head with the files."""
    from xray_runtime.models.reward_objective import RewardObjective

    chosen, rejected = texts(1), texts(2)
    pairs = chosen.as_kind(PairBatch, rejected_ids=rejected.input_ids)
    spec = ModelSpec(row.base, RewardObjective(), training=RewardConfig(lr=LR), new_head=True)
    with row.models(reward=spec) as models:
        _check_falls([_step(models["reward"], pairs, "loss", lambda t: t.rows) for _ in range(STEPS)])
        get(models["reward"].save.remote(row.directory / "reward", REWARD_HEAD))
    return YES


def plan(row: FamilyRow) -> str:
    """The planner counts the model's parameters to the last one."""
    from xray_runtime.models.causal_lm import skeleton

    counted = from_pretrained(PretrainedBase(model=str(row.base))).num_parameters
    lm: Any = skeleton(str(row.base))
    built = sum(parameter.numel() for parameter in lm.parameters())
    if counted != built:
        raise TrainingDiffers(f"the planner counts {counted:,} parameters, the model has {built:,}")
    return YES


def _step(model: Any, rows: TextBatch, loss: str, count: Callable[[StepTotals], float]) -> float:
    totals = StepTotals.of(rows)
    return float(get(model.train.remote(rows, totals, LR))[loss]) / count(totals)


def _check_falls(losses: list[float]) -> None:
    if not losses[-1] < losses[0]:
        raise TrainingDiffers(f"the loss does not fall: {losses[0]:.4g}, then {losses[-1]:.4g}")


def _rollout(generator: Any, version: int) -> tuple[TextBatch, np.ndarray]:
    """(prompts and sampled replies, their log-probabilities by the generator)."""
    asked = texts(version, count=4, prompts=4)
    prompts = [ids[:length].tolist() for ids, length in zip(asked.input_ids, asked.prompt_lengths, strict=True)]
    batch = PromptBatch(input_ids=Ragged.of(prompts), seed=np.arange(len(prompts)))
    answer = get(generator.generate.remote(batch, Sampling(NEW_TOKENS, 1.0, (1,), 0), version))
    return TextBatch.of(prompts, answer.response_ids), answer.rollout_logprobs.values


def _check_same(found: Any, expected: Any, who: str) -> None:
    off = float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).mean())
    if not off <= FLOAT32_MISMATCH:
        raise TrainingDiffers(f"{who} differ by {off:.2g} nats a token (at most {FLOAT32_MISMATCH:g})")


RUN: dict[str, Callable[[FamilyRow], str]] = dict(
    zip(CELLS, (base, sft, grpo, by_transformers, by_vllm, lora, reward_model, plan), strict=True)
)
NEEDS = {"GRPO": "SFT", "files = transformers": "GRPO", "files = vLLM": "GRPO"}
"""Cell → the one whose files it reads; all need `base`."""


def run_row(row: FamilyRow) -> None:
    """Fill the cells of a row; a cell whose files were not written has the reason of the cell that should have."""
    for cell, task in RUN.items():
        needed = NEEDS.get(cell, "base")
        if cell in row.results:
            continue
        if cell != "base" and not row.results[needed].startswith(YES):
            row.results[cell] = f"as {needed}" if needed != "base" else "as base"
            continue
        try:
            row.results[cell] = task(row)
        except Exception as error:
            kind = type(root_cause(error)).__name__
            line = _plain(cause_line(error), row)
            row.results[cell] = line if isinstance(error, ValueError) else f"**{kind}**: {line}"


def _plain(line: str, row: FamilyRow) -> str:
    """A message without the paths of this run."""
    return line.replace(str(row.directory), "DIR").replace("|", "\\|")


def read_results(path: Path) -> dict[str, dict[str, str]]:
    """Row → cell → result, and `date`."""
    found: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def table(results: dict[str, dict[str, str]]) -> str:
    """The results in Markdown: long lines are notes below."""
    notes: dict[str, int] = {}
    lines = [f"| family | {' | '.join(CELLS)} | run on |", f"|{'---|' * (len(CELLS) + 2)}"]
    for name in RECIPES:
        found = results.get(name, {})
        cells = []
        for cell in CELLS:
            text = found.get(cell, NOT_RUN)
            if not text.startswith((YES, "as ")) and text:
                text = f"[{notes.setdefault(text, len(notes) + 1)}]"
            cells.append(text)
        lines.append(f"| {name} | {' | '.join(cells)} | {found.get('date', 'not run')} |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join(lines)


TEXT = """# Model families, tried

Made by `python -m benchmarks.families --out docs/families-table.md` from small random models (float32, two CPU cores),
each through the code of the stages. *base* is stage `base` with vLLM as the generator; *SFT*, *GRPO*, *LoRA* and
*reward model* are steps whose loss falls and whose files are those of the trainer; under *GRPO* generator and trainer
also agree to {limit:g} nats a token after every sync. *files =* compares the published files, read by plain
transformers and by a new vLLM engine, with the trainer. *plan* is the number of parameters, exactly. ● holds; a number
is the line below that refuses it; **bold** there is a failure.

{table}
"""


def page(results: dict[str, dict[str, str]]) -> str:
    """The table, with its explanation."""
    return TEXT.format(limit=FLOAT32_MISMATCH, table=table(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=RECIPES, metavar="ROW", help="these rows alone")
    parser.add_argument("--again", action="store_true", help="run them again, and keep nothing of before")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the table, with its explanation, to this file")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    results = read_results(options.results)
    wanted = [name for name in options.only or RECIPES if options.again or name not in results]
    wanted.sort(key=is_mixture)
    if wanted:
        with tempfile.TemporaryDirectory() as root, contextlib.closing(LocalModels(RUNTIME, Path(root))) as models:
            last = wanted[0]
            for name in wanted:
                if time.monotonic() > end:
                    break
                if is_mixture(name) and not is_mixture(last):
                    models.close()  # vLLM makes a process's groups for experts with its first model
                start, last = time.monotonic(), name
                row = FamilyRow(name, Path(root) / model_type(name), models)
                run_row(row)
                today = datetime.datetime.now(datetime.UTC).date().isoformat()
                results = read_results(options.results) | {name: row.results | {"date": today}}
                write_atomic(options.results, json.dumps(results, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
                print(f"{name} ({time.monotonic() - start:.0f} s): {row.results}", flush=True)
                shutil.rmtree(row.directory)
    if options.out:
        options.out.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()

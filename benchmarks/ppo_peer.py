"""PPO beside TRL's: the same model, critic, reward model, prompts and amounts of work, in turns.

    python -m benchmarks.ppo_peer [--updates 12] [--repeats 3] [--config configs/quickstart.yaml]

TRL 1.11.0 is the last with PPO. It gets a virtual environment (`runs/ppo-peer/trl`) with the torch and transformers of
this one. X-ray runs its real stage: a lifecycle makes the SFT and reward models once, and `xray.ppo` goes on from them.
TRL always has a critic of its own. The first update of each run does not count: caches are cold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import xray
from benchmarks.machine import line, machine, ratio, spread, table, times
from xray_runtime.config.base import FreshBase, PretrainedBase
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import load_config
from xray_runtime.data.pairs import TRAIN
from xray_runtime.graph.artifacts import REWARD_HEAD
from xray_runtime.planning.shapes import ModelShape, from_pretrained
from xray_runtime.report.figures import read_metrics
from xray_runtime.store.seal import process_seal
from xray_runtime.tracking.recorder import METRICS, records_directory
from xray_runtime.training.dataset import max_prompt_tokens
from xray_runtime.training.prompts import UniquePrompts

TRL = "trl==1.11.0"
WORK: dict[str, Any] = {
    "prompts_per_iteration": 32,
    "minibatch_size": 16,
    "epochs": 4,
    "max_new_tokens": 16,
    "lr": 3e-4,
    "truncation_penalty": 1.0,
}
ALIKE: dict[str, Any] = {"warmup_fraction": 0.0, "grad_clip": 1e6, "betas": (0.9, 0.999), "dual_clip": None}
"""What X-ray does otherwise by default: TRL neither warms up nor clips gradients or losses so."""
KL = 0.05
THREADS = 2


def environment(root: Path) -> Path:
    """The Python of TRL's environment, made where there is none."""
    python = root / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", root], check=True)
        # The same torch and transformers on both sides: a difference is then TRL's and X-ray's.
        shared = root / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "shared.pth"
        shared.write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", TRL], check=True)
    return python


def as_classifier(trunk: Path, head: Path | None, into: Path) -> Path:
    """A model with a head to one number, as transformers has them: X-ray's reward model, or a new critic."""
    if not into.exists():
        model = AutoModelForSequenceClassification.from_pretrained(
            trunk, num_labels=1, dtype=torch.float32, trust_remote_code=False
        )
        with torch.no_grad():
            # X-ray's head begins at zero too. A bias is the same for every reply; transformers' head has none.
            model.score.weight.copy_(load_file(head)["weight"] if head else torch.zeros_like(model.score.weight))
        lm = AutoModelForCausalLM.from_pretrained(trunk, dtype=torch.float32, trust_remote_code=False)
        model.model.load_state_dict(lm.model.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(trunk, trust_remote_code=False)
        model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    return into


def start(config: LifecycleConfig) -> tuple[xray.Handle, xray.Handle, xray.Handle]:
    """(prompts, SFT model, reward model) of a config, as its lifecycle makes them."""
    assert config.sft is not None
    assert config.reward is not None
    assert config.preferences is not None
    chats = xray.prepare(**fields(config.data))
    if isinstance(config.base, FreshBase):
        base, trained = xray.fresh_base(chats, **fields(config.base)), {}
    else:
        assert isinstance(config.base, PretrainedBase)
        base, trained = xray.base(model=config.base.model), {"trainable_layers": config.base.trainable_layers}
    sft = xray.sft(base, data=chats, **fields(config.sft) | trained)
    pairs = xray.preferences(policy=sft, data=chats, gold=config.gold, **fields(config.preferences))
    return chats, sft, xray.reward_model(sft, pairs, **fields(config.reward) | trained)


def fields(section: BaseModel) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields if name != "kind"}


Series = dict[str, list[float]]


def series(result: xray.Result, output: Path) -> Series:
    """Metric → its value at each iteration."""
    found = read_metrics(records_directory(output, result.stage.name, result.stage.key) / METRICS)
    return {name: [value for _, value in points] for name, points in found.items()}


NAMES = {"seconds/total": "seconds", "reward/mean": "reward", "kl/reference_k1": "kl", "rollout/length": "length"}


def xray_updates(result: xray.Result, output: Path) -> list[dict[str, float]]:
    """Seconds (in all and by phase), mean reward, KL and length of each update."""
    found = series(result, output)
    columns = {NAMES.get(name, name.removeprefix("seconds/")): values for name, values in found.items()}
    wanted = {*NAMES.values(), "sync", "generate", "score", "update"} & columns.keys()
    return [{name: columns[name][number] for name in sorted(wanted)} for number in range(len(found["seconds/total"]))]


def trl_updates(python: Path, task: Path) -> list[dict[str, float]]:
    done = subprocess.run([python, Path(__file__).with_name("trl_ppo.py"), task], capture_output=True, text=True)
    found = [json.loads(text.removeprefix("UPDATE ")) for text in done.stdout.splitlines() if "UPDATE " in text]
    if done.returncode or not found:
        raise RuntimeError(done.stderr[-2000:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/ppo-peer"))
    options = parser.parse_args()
    config = load_config(options.config)
    output = (options.output / options.config.stem).absolute()
    layers = getattr(config.base, "trainable_layers", None)
    python = environment(options.output.absolute() / "trl")
    about = machine()
    runs: dict[str, list[list[dict[str, float]]]] = {
        "TRL": [],
        "X-ray, separate critic": [],
        "X-ray, shared critic": [],
    }
    with xray.workspace(output, project="ppo-peer", seed=config.seed, runtime=config.runtime):
        chats, sft_model, judge_model = start(config)
        sft, judge, dataset = sft_model.result().path, judge_model.result().path, chats.result().path
        tokenizer = AutoTokenizer.from_pretrained(sft, trust_remote_code=False)
        limit = max_prompt_tokens(dataset, sft, int(WORK["max_new_tokens"]))
        prompts = UniquePrompts(tokenizer, dataset / TRAIN, limit, process_seal())
        for repeat in range(options.repeats):
            for critic in ("separate", "shared"):
                policy = xray.ppo(
                    sft_model,
                    prompts=chats,
                    rewards=[judge_model],
                    name=f"ppo-{critic}-{repeat}",
                    critic=critic,
                    critic_lr=WORK["lr"],
                    iterations=options.updates,
                    kl={"controller": "fixed", "coef": KL},
                    reward_scaling="none",
                    reward_clip=None,
                    truncated="penalize",
                    schedule="constant",
                    stop_kl=None,
                    trainable_layers=layers,
                    **ALIKE,
                    **WORK,
                )
                runs[f"X-ray, {critic} critic"].append(xray_updates(policy.result(), output))
            task = output / "trl.json"
            task.write_text(
                json.dumps(
                    WORK
                    | {
                        "policy": str(sft),
                        "reward": str(as_classifier(judge, judge / REWARD_HEAD, output / "trl-reward")),
                        "critic": str(as_classifier(sft, None, output / "trl-critic")),
                        "prompts": [ids for _, ids in prompts],
                        "iterations": options.updates,
                        "kl_coef": KL,
                        "threads": THREADS,
                        "seed": repeat,
                        "trainable_layers": layers,
                        "output": str(output / "trl-output"),
                    }
                )
            )
            runs["TRL"].append(trl_updates(python, task))
        prompt_tokens = statistics.mean(len(ids) for _, ids in prompts)
        shape = from_pretrained(PretrainedBase(model=str(sft)))
    report(about, options, runs)
    length = statistics.mean(u["length"] for run in runs["X-ray, shared critic"] for u in run)
    gflop, speed = gflop_of_updates(shape, layers, prompt_tokens, length), gflop_per_second(shape)
    print(
        f"\nThe matrix products of an iteration's optimizer steps are {gflop:.0f} GFLOP; one of the model's size runs "
        f"at {speed:.0f} GFLOP/s here with {THREADS} threads: {gflop / speed:.2f} s, with nothing else done."
    )


def gflop_of_updates(shape: ModelShape, layers: int | None, prompt_tokens: float, reply_tokens: float) -> float:
    """Matrix products of a shared critic's updates: 6 a parameter and token, logits at reply tokens alone."""
    trained = shape.num_layers if layers is None else layers
    tokens = trained * shape.layer_parameters() * (prompt_tokens + reply_tokens)
    # The gradient of a frozen output layer is not computed.
    logits = shape.vocab_size * shape.hidden_size * reply_tokens * (1 if layers is None else 2 / 3)
    return 6e-9 * WORK["epochs"] * WORK["prompts_per_iteration"] * (tokens + logits)


def gflop_per_second(shape: ModelShape) -> float:
    """Of a float32 product of 1,024 tokens with a matrix of the model's."""
    torch.set_num_threads(THREADS)
    states, matrix = torch.randn(1024, shape.hidden_size), torch.randn(shape.intermediate_size, shape.hidden_size)
    seconds = times(lambda: [torch.nn.functional.linear(states, matrix) for _ in range(50)])
    return 50 * 2e-9 * states.numel() * shape.intermediate_size / min(seconds)


def report(about: str, options: argparse.Namespace, runs: dict[str, list[list[dict[str, float]]]]) -> None:
    work = f"{WORK['prompts_per_iteration']} prompts, {WORK['max_new_tokens']} new tokens, {WORK['epochs']} epochs"
    print(f"{about}; {options.config}; {work}, minibatches of {WORK['minibatch_size']}\n")
    seconds = {name: [u["seconds"] for run in found for u in run[1:]] for name, found in runs.items()}
    table(
        ("", "seconds an update", "TRL ÷ it", "sync, generate, score, update", "first reward", "last reward", "KL"), []
    )
    for name, found in runs.items():
        phases = [
            f"{statistics.median(u[phase] for run in found for u in run[1:]):.2f}"
            for phase in ("sync", "generate", "score", "update")
            if phase in found[0][0]
        ]
        last = max(len(found[0]) // 4, 1)
        line(
            (
                name,
                spread(seconds[name], " s"),
                ratio(seconds["TRL"], seconds[name]),
                ", ".join(phases),
                spread([run[0]["reward"] for run in found]),
                spread([statistics.mean(u["reward"] for u in run[-last:]) for run in found]),
                spread([statistics.mean(u["kl"] for u in run[-last:]) for run in found]),
            )
        )


if __name__ == "__main__":
    main()

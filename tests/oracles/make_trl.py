"""TRL's own losses and advantages on seeded inputs, for `tests/unit/algorithms/test_trl.py` to compare with.

    python -m tests.oracles.make_trl          # writes tests/oracles/trl.json

TRL runs in an environment of its own (`runs/peers/trl-1.11.0`, as for `benchmarks.peers`), in float64. Its trainers are
real and so are the methods that are called; only what a model would answer is replaced by seeded numbers. PPO's
formulas stand in the middle of `PPOTrainer.train`: a small training runs, and its local variables are read.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

COMMAND = "python -m tests.oracles.make_trl"
ROOT = Path(__file__).parents[2]
FIXTURE = Path(__file__).with_name("trl.json")
WORDS = ["<pad>", "<eos>", "<unk>", *"abcde"]
EOS = 1
EPSILON, EPSILON_HIGH, DELTA, BETA, MAX_TOKENS = 0.2, 0.28, 3.0, 0.04, 6


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def shape() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
        num_labels=1,
    )


def causal_lm() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(shape()).double()


def arguments(folder: str, **fields: Any) -> dict[str, Any]:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False, "use_cpu": True}
    return {"output_dir": folder, "gradient_checkpointing": False, **quiet, **fields}


class Draw:
    """Seeded numbers. Everything is float64."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, deviation: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64) * deviation

    def ids(self, *shape: int) -> Tensor:
        return torch.randint(3, len(WORDS), shape, generator=self._generator)


def masks(lengths: list[int]) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def differentiated(loss: Tensor, leaf: Tensor) -> dict[str, Any]:
    [gradient] = torch.autograd.grad(loss, leaf)
    return {"loss": loss.detach(), "gradient": gradient}


# GRPO and RLOO


def policy_inputs() -> dict[str, Tensor]:
    """Replies of several lengths; log-ratios beyond every clip range, advantages of both signs."""
    draw, mask = Draw(1), masks([5, 1, 3, 5, 2, 4])
    logprobs = -draw.normal(6, 5).abs() - 0.1
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs - draw.normal(6, 5, deviation=0.7),
        "ref_logprobs": logprobs - draw.normal(6, 5, deviation=0.5),
        "advantages": draw.normal(6),
        "mask": mask,
    }


GRPO_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "two_sided": {"loss_type": "bnpo", "delta": DELTA},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + EPSILON_HIGH},
    "k3": {"loss_type": "grpo", "beta": BETA, "use_bias_correction_kl": False},
    "weighted_k3": {"loss_type": "grpo", "beta": BETA, "use_bias_correction_kl": True},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "gmpo": {"epsilon_high": EPSILON},
}


def grpo_trainer(folder: str, rewards: Callable[..., list[float | None]], name: str = "grpo", **fields: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer  # type: ignore[import-not-found]

    configs, trainer_class = (GMPOConfig, GMPOTrainer) if name == "gmpo" else (GRPOConfig, GRPOTrainer)
    settings = {"epsilon": EPSILON, "epsilon_high": EPSILON_HIGH, "max_completion_length": MAX_TOKENS} | fields
    config = configs(**arguments(folder, num_generations=4, per_device_train_batch_size=12, **settings))
    trainer = trainer_class(
        model=causal_lm(),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a b"}] * 4),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def no_rewards(completions: list[str], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def grpo_losses(folder: str) -> dict[str, Any]:
    given = policy_inputs()
    rows, length = given["mask"].shape
    inputs = {
        "prompt_ids": torch.full((rows, 1), 3),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.int64),
        "completion_ids": torch.full((rows, length), 4),
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": given["old_logprobs"],
        "ref_per_token_logps": given["ref_logprobs"],
        "num_items_in_batch": given["mask"].sum(),
    }
    cases = {}
    for name, settings in GRPO_CASES.items():
        # A reference would be loaded by name from a hub; its log-probabilities are given.
        trainer = grpo_trainer(folder, no_rewards, name, **{k: v for k, v in settings.items() if k != "beta"})
        trainer.beta = settings.get("beta", 0.0)
        leaf = given["logprobs"].clone().requires_grad_()
        entropies = torch.zeros_like(leaf)
        trainer._get_per_token_logps_and_entropies = lambda *_, leaf=leaf, entropies=entropies, **__: (
            leaf,
            entropies,
            None,
        )
        cases[name] = differentiated(trainer._compute_loss(trainer.model, inputs), leaf)
    return {"inputs": given, "cases": cases}


REWARDS = [[1.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 6.0], [0.5, None, -1.5, 0.25]]
"""Three groups of four; one reply has no score."""


def scores(completions: list[str], **_: Any) -> list[float | None]:
    return [score for group in REWARDS for score in group]


def generated(trainer: Any) -> list[float]:
    """Advantages of REWARDS, by all of TRL's method but the sampling."""
    prompts, replies = [{"prompt": "a b"}] * 12, [[5, 6, EOS]] * 12
    # GRPO's answers with log-probabilities of the sampler too.
    answer = replies if "RLOO" in type(trainer).__name__ else (replies, None)
    trainer._generate_single_turn = lambda *_, **__: answer
    found: list[float] = trainer._generate_and_score_completions(prompts)["advantages"].double().tolist()
    return found


def grpo_advantages(folder: str) -> dict[str, Any]:
    cases = {}
    for name, scale in {"grpo": "group", "dr_grpo": "none"}.items():
        trainer = grpo_trainer(folder, scores, scale_rewards=scale)
        trainer.reward_weights = trainer.reward_weights.double()
        cases[name] = generated(trainer)
    return cases


def divergences() -> dict[str, Any]:
    """GKD's divergence of two distributions at each of six tokens, with the gradient of the student's logits."""
    from trl.experimental.gkd import GKDTrainer  # type: ignore[import-not-found]

    draw = Draw(7)
    student, teacher = draw.normal(1, 6, len(WORDS), deviation=2.0), draw.normal(1, 6, len(WORDS), deviation=2.0)
    found = {}
    for beta in (0.0, 0.3, 1.0):
        leaf = student.clone().requires_grad_()
        summed = GKDTrainer.generalized_jsd_loss(leaf, teacher, beta=beta, temperature=0.7, reduction="sum")
        found[str(beta)] = differentiated(summed, leaf)
    return {"student": student, "teacher": teacher, "temperature": 0.7, "by_beta": found}


def rloo_trainer(folder: str) -> Any:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    config = RLOOConfig(
        **arguments(folder, num_generations=4, per_device_train_batch_size=12, beta=0.0, epsilon=EPSILON)
    )
    return RLOOTrainer(
        model=causal_lm(),
        reward_funcs=scores,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a b"}] * 4),
        processing_class=tokenizer(),
    )


def rloo(folder: str) -> dict[str, Any]:
    """RLOO's loss where the policy has not moved yet, and its advantages."""
    given, trainer = policy_inputs(), rloo_trainer(folder)
    leaf = given["logprobs"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    rows, length = given["mask"].shape
    inputs = {
        "prompt_ids": torch.full((rows, 1), 3),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.int64),
        "completion_ids": torch.full((rows, length), 4),
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_logps": (given["logprobs"] * given["mask"]).sum(1),
    }
    found = differentiated(trainer._compute_loss(trainer.model, inputs), leaf)
    return {"unmoved": found, "advantages": generated(rloo_trainer(folder))}


# DPO, SimPO and KTO


def answering(logits: dict[int, Tensor]) -> Callable[..., Any]:
    """A model that answers known token ids with known logits."""

    def forward(input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=logits[id(input_ids)])

    return forward


def pair_inputs() -> dict[str, Tensor]:
    """Three pairs, chosen ones first; the first two tokens are the prompt."""
    draw, lengths = Draw(2), [6, 4, 5, 5, 6, 3]
    attention = masks(lengths)
    return {
        "input_ids": draw.ids(6, 6) * attention,
        "attention_mask": attention,
        "completion_mask": attention * (torch.arange(6) >= 2),
        "logits": draw.normal(6, 6, len(WORDS)),
        "ref_logprobs": -draw.normal(6).abs() * 3 - 3,
    }


def dpo_losses(folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    given, cases = pair_inputs(), {}
    for name in ("sigmoid", "sigmoid_norm", "ipo", "hinge"):
        trainer = DPOTrainer(
            model=causal_lm(),
            ref_model=causal_lm(),
            args=DPOConfig(**arguments(folder, loss_type=[name], beta=0.3)),
            train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
            processing_class=tokenizer(),
        )
        trainer.precompute_ref_logps = True
        leaf = given["logits"].clone().requires_grad_()
        chosen, rejected = given["ref_logprobs"].chunk(2)
        inputs = {k: given[k] for k in ("input_ids", "attention_mask", "completion_mask")}
        inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        loss = trainer._compute_loss(answering({id(given["input_ids"]): leaf}), inputs, False)
        cases[name] = differentiated(loss, leaf)
    return {"inputs": given, "beta": 0.3, "cases": cases}


def cpo_losses() -> dict[str, Any]:
    """SimPO, and smoothed labels, which TRL's DPO does not have."""
    from trl.experimental.cpo import CPOTrainer  # type: ignore[import-not-found]

    given, cases = pair_inputs(), {}
    labels = given["input_ids"].masked_fill(given["completion_mask"] == 0, -100)
    for name, (loss_type, smoothing) in {
        "simpo": ("simpo", 0.0),
        "simpo_smoothed": ("simpo", 0.1),
        "sigmoid_smoothed": ("sigmoid", 0.1),
    }.items():
        settings = {"alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": smoothing, "loss_type": loss_type}
        trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **settings)
        leaf = given["logits"].clone().requires_grad_()
        logprobs = CPOTrainer.get_batch_logps(leaf, labels, average_log_prob=loss_type == "simpo")
        losses = CPOTrainer.cpo_loss(trainer, *logprobs.chunk(2))[0]
        cases[name] = differentiated(losses.mean(), leaf)
    return {"beta": 2.0, "gamma": 1.0, "cases": cases}


def kto_losses(folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    draw, given = Draw(3), pair_inputs()
    label = torch.tensor([True, False, False, True, False, True])
    mismatched = draw.ids(6, 6) * given["attention_mask"]
    mismatched_logits = draw.normal(6, 6, len(WORDS))
    cases = {}
    for name, offset in {"baseline": -9.0, "no_baseline": 9.0}.items():
        trainer = KTOTrainer(
            model=causal_lm(),
            ref_model=causal_lm(),
            args=KTOConfig(
                **arguments(folder, beta=0.3, desirable_weight=1.25, undesirable_weight=0.75),
                per_device_train_batch_size=6,
            ),
            train_dataset=Dataset.from_list([{"prompt": "a", "completion": w, "label": w < "c"} for w in "bcdbcd"]),
            processing_class=tokenizer(),
        )
        trainer.precompute_ref_logps = True
        leaf = given["logits"].clone().requires_grad_()
        inputs = {k: given[k] for k in ("input_ids", "attention_mask", "completion_mask")} | {
            "label": label,
            "ref_logps": given["ref_logprobs"],
            "ref_KL_logps": given["ref_logprobs"] + offset,
            "KL_input_ids": mismatched,
            "KL_attention_mask": given["attention_mask"],
            "KL_completion_mask": given["completion_mask"],
        }
        model = answering({id(given["input_ids"]): leaf, id(mismatched): mismatched_logits})
        found = differentiated(trainer._compute_loss(model, inputs, False), leaf)
        cases[name] = found | {"mismatched_ref_logprobs": inputs["ref_KL_logps"]}
    mismatch = {"mismatched_ids": mismatched, "mismatched_logits": mismatched_logits, "desirable": label}
    return {"beta": 0.3, "weights": [1.25, 0.75], "inputs": mismatch, "cases": cases}


# PPO


def ppo(folder: str) -> dict[str, Any]:
    """What stands in `PPOTrainer.train`: the rollout's numbers, and the last minibatch of its last epoch."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer as module  # type: ignore[import-not-found]

    torch.manual_seed(4)
    classifier = AutoModelForSequenceClassification.from_config
    settings = {"gamma": 0.97, "lam": 0.9, "cliprange": 0.1, "cliprange_value": 0.05, "kl_coef": 0.1}
    config = PPOConfig(
        **arguments(folder),
        **settings,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=3,
        local_rollout_forward_batch_size=4,
        total_episodes=4,
        response_length=MAX_TOKENS,
        stop_token="eos",
        temperature=1.0,
        learning_rate=0.02,
        num_sample_generations=0,
        whiten_rewards=False,
    )
    prompts = Dataset.from_list([{"input_ids": [3 + i, 4, 5]} for i in range(4)])
    models = {"reward_model": classifier(shape()).double(), "value_model": classifier(shape()).double()}
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer(),
        model=causal_lm(),
        ref_model=causal_lm(),
        train_dataset=prompts,
        **models,
    )
    found: dict[str, Any] = {}
    whiten, backward = module.masked_whiten, trainer.accelerator.backward

    def locals_of_train(*names: str) -> Iterator[tuple[str, Tensor]]:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not PPOTrainer.train.__code__:
            frame = frame.f_back
        assert frame is not None
        for name in names:
            yield name, frame.f_locals[name]

    def watched_whiten(values: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        names = ("logprobs", "ref_logprobs", "values", "scores", "rewards", "returns", "padding_mask")
        rollout = {name: x.detach().clone() for name, x in locals_of_train(*names, "padding_mask_p1")}
        white: Tensor = whiten(values, *arguments, **keywords)
        found["rollout"] = rollout | {"advantages": values.clone(), "whitened": white.clone()}
        return white

    def watched_backward(loss: Tensor) -> None:
        names = ("new_logprobs", "mb_logprobs", "mb_advantage", "vpred", "mb_values", "mb_return", "pg_loss", "vf_loss")
        seen = dict(locals_of_train(*names, "micro_batch_inds"))
        seen["policy_gradient"] = torch.autograd.grad(seen["pg_loss"], seen["new_logprobs"], retain_graph=True)[0]
        seen["value_gradient"] = torch.autograd.grad(seen["vf_loss"], seen["vpred"], retain_graph=True)[0]
        found["minibatch"] = {name: torch.as_tensor(x).detach().clone() for name, x in seen.items()}
        backward(loss)

    module.masked_whiten, trainer.accelerator.backward = watched_whiten, watched_backward
    try:
        trainer.train()
    finally:
        module.masked_whiten = whiten
    return {"settings": settings, **found}


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def main() -> None:
    if importlib.util.find_spec("trl") is None:
        from benchmarks.peers_measure import environment
        from benchmarks.peers_work import LAST_WITH_PPO

        python = environment(ROOT / "runs" / "peers" / f"trl-{LAST_WITH_PPO}", LAST_WITH_PPO)
        subprocess.run([python, __file__], check=True, cwd=ROOT)
        return
    import trl

    # X-ray's vLLM is another than TRL knows, and nothing is sampled here.
    importlib.import_module("trl.import_utils").is_vllm_available = lambda *_, **__: False
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "made_by": COMMAND,
            "trl": trl.__version__,
            "settings": {"epsilon": EPSILON, "epsilon_high": EPSILON_HIGH, "delta": DELTA, "beta": BETA}
            | {"max_tokens": MAX_TOKENS},
            "policy": grpo_losses(folder),
            "rewards": REWARDS,
            "advantages": grpo_advantages(folder),
            "divergences": divergences(),
            "rloo": rloo(folder),
            "dpo": dpo_losses(folder),
            "cpo": cpo_losses(),
            "kto": kto_losses(folder),
            "ppo": ppo(folder),
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(plain(value))}" for name, value in values.items())
    FIXTURE.write_text("{\n" + lines + "\n}\n")
    print(f"{FIXTURE}: TRL {trl.__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()

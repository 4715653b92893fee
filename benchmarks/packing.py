"""Updates on packed sequences against padded rows, on shared prompts against separate rows; logits in chunks.

    python -m benchmarks.packing [--repeats 5]

One thread; CPU seconds, which others on the machine disturb less than wall time. Lengths are those of the `chitchat`
conversations (single exchanges; whole conversations, many of which are cut at the limit) and the quickstart's. Prompts
are shared by the replies of a group (GRPO) or of a pair (DPO).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.machine import line, machine, ratio, spread, table
from xray_runtime.algorithms.logprobs import MAX_LOGITS, chunked_logprobs_and_entropy
from xray_runtime.config.dpo import DPOConfig
from xray_runtime.config.ppo import PPOStageConfig
from xray_runtime.data.batching import micro_batches
from xray_runtime.data.rows import Ragged, Rows, num_response_tokens, take, text_rows
from xray_runtime.data.sources import chitchat_conversations
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Objective, num_computed_tokens
from xray_runtime.models.ppo_objectives import PPOObjective
from xray_runtime.models.preference_objectives import DPOObjective
from xray_runtime.workers.micro_batches import as_tensors, row_groups

NUM_ROWS = 32
"""The quickstart's minibatch."""
MICRO_BATCH_TOKENS = 4096
"""The default."""
CHARACTERS_A_TOKEN = 4
MAX_LENGTH = 1024
POLICY, PAIRS = PPOObjective(PPOStageConfig()), DPOObjective(DPOConfig())
MODELS = {
    "1.6M": {"hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 5, "intermediate_size": 448},
    "18M": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1408},
}


def conversation_lengths(rng: np.random.Generator) -> list[tuple[int, int]]:
    """(prompt, reply) tokens of conversations drawn at random: all turns but the last, and the last."""
    return _drawn(rng, lambda tokens: (sum(tokens[:-1]), tokens[-1]))


def exchange_lengths(rng: np.random.Generator) -> list[tuple[int, int]]:
    """The same of their first two turns alone."""
    return _drawn(rng, lambda tokens: (tokens[0], tokens[1]))


def _drawn(rng: np.random.Generator, sides: Callable[[list[int]], tuple[int, int]]) -> list[tuple[int, int]]:
    conversations = [c for c in chitchat_conversations() if len(c.turns) > 1]
    lengths = []
    for i in rng.choice(len(conversations), NUM_ROWS, replace=False):
        prompt, reply = sides([max(len(turn) // CHARACTERS_A_TOKEN, 1) for turn in conversations[i].turns])
        reply = min(reply, MAX_LENGTH // 2)
        lengths.append((min(prompt, MAX_LENGTH - reply), reply))
    return lengths


def quickstart_lengths(rng: np.random.Generator) -> list[tuple[int, int]]:
    """Prompts of 8 to 32 tokens, replies of 4 to 32."""
    return list(zip(rng.integers(8, 33, NUM_ROWS).tolist(), rng.integers(4, 33, NUM_ROWS).tolist(), strict=True))


def ppo_rows(lengths: list[tuple[int, int]], rng: np.random.Generator) -> Rows:
    prompts, replies = ([rng.integers(5, 2000, size=pair[side]).tolist() for pair in lengths] for side in (0, 1))
    return with_noise(prompts, replies, rng)


def with_noise(prompts: list[list[int]], replies: list[list[int]], rng: np.random.Generator) -> Rows:
    """Rows with everything that the loss of PPO reads."""
    rows, offsets = text_rows(prompts, replies), Ragged.of(replies).offsets
    noise = rng.normal(size=(5, offsets[-1])).astype(np.float32)
    names = ("old_logprobs", "advantages", "weights", "values", "returns")
    return rows | {name: Ragged(column, offsets) for name, column in zip(names, noise, strict=True)}


def group_rows(prompt_tokens: int, reply_tokens: int, rng: np.random.Generator) -> Rows:
    """PPO rows of 16 prompts with 8 replies each, of half to all of `reply_tokens`."""
    prompts = [prompt for prompt in rng.integers(5, 2000, size=(16, prompt_tokens)).tolist() for _ in range(8)]
    lengths = rng.integers(reply_tokens // 2, reply_tokens + 1, size=len(prompts)).tolist()
    return with_noise(prompts, [rng.integers(5, 2000, size=length).tolist() for length in lengths], rng)


def pair_rows(prompt_tokens: int, reply_tokens: int, rng: np.random.Generator) -> Rows:
    """DPO rows of 32 pairs."""
    prompts = rng.integers(5, 2000, size=(32, prompt_tokens)).tolist()
    chosen, rejected = rng.integers(5, 2000, size=(2, 32, reply_tokens)).tolist()
    rows = text_rows(prompts, chosen) | {"rejected_ids": text_rows(prompts, rejected)["input_ids"]}
    return rows | dict(zip(("ref_chosen", "ref_rejected"), rng.normal(size=(2, 32)).astype(np.float32), strict=True))


def update(module: HeadedLM, rows: Rows, packed: bool, objective: Objective = POLICY, shared: bool = True) -> None:
    """Forward and backward passes of one step. `shared`: packed rows' shared prompts are computed once."""
    module.packs = packed
    module.zero_grad()
    totals = {"tokens": float(num_response_tokens(rows)), "pairs": float(len(rows["input_ids"]))}
    told_apart = rows if shared else {name: column for name, column in rows.items() if name != "prompt_lengths"}
    for index in row_groups(told_apart, MICRO_BATCH_TOKENS, packed=packed):
        tensors = as_tensors(take(rows, index))
        if not shared:
            del tensors["alike"]
        loss, _ = objective.loss(module, tensors, totals)
        loss.backward()


def logprobs(layer: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, max_logits: int) -> None:
    """Forward and backward pass of the output layer."""
    layer.weight.grad = hidden.grad = None
    found, entropy = chunked_logprobs_and_entropy(
        layer, hidden, targets, vocab_size=layer.out_features, max_logits=max_logits
    )
    (found.sum() + entropy.sum()).backward()


def compared(works: Sequence[Callable[[], None]], repeats: int) -> list[list[float]]:
    """CPU seconds of each, in turns, after one that does not count."""
    seconds: list[list[float]] = [[] for _ in works]
    for number in range(repeats + 1):
        for work, found in zip(works, seconds, strict=True):
            start = time.process_time()
            work()
            if number:
                found.append(time.process_time() - start)
    return seconds


def compare_shared(repeats: int) -> None:
    """Print what a step of the 1.6M model takes on separate rows and on shared prompts."""
    columns = ["rows", "prompt + reply", "tokens", "computed", "separate, CPU-s", "shared, CPU-s", "separate ÷ shared"]
    table([*columns, "largest difference ÷ largest gradient"], [])
    module = make_model("1.6M")
    makers: dict[str, tuple[Objective, Callable[[int, int, np.random.Generator], Rows]]] = {
        "16 × 8 replies": (POLICY, group_rows),
        "32 pairs": (PAIRS, pair_rows),
    }
    for name, (objective, make) in makers.items():
        for lengths in ((45, 16), (400, 60)):
            rows = make(*lengths, np.random.default_rng(0))
            computed = num_computed_tokens(module, as_tensors(rows))
            works = [partial(update, module, rows, True, objective, shared) for shared in (False, True)]
            separate, shared = compared(works, repeats)
            gradients = []
            for work in works:
                work()
                gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
            largest = max(float(gradient.abs().max()) for gradient in gradients[0])
            apart = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
            tokens = sum(len(rows[side].values) for side in ("input_ids", "rejected_ids") if side in rows)
            cells = [name, "{} + {}".format(*lengths), tokens, computed, spread(separate), spread(shared)]
            line([*cells, ratio(separate, shared), f"{apart / largest:.0e}"])


def make_model(name: str) -> HeadedLM:
    options: dict[str, Any] = {"vocab_size": 2048, "tie_word_embeddings": True, "use_cache": False, **MODELS[name]}
    torch.manual_seed(0)
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, attn_implementation="sdpa"))
    return HeadedLM(lm.eval(), scalar_head=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; {NUM_ROWS} rows, micro-batches of {MICRO_BATCH_TOKENS} tokens\n")
    table(["model", "lengths", "tokens", "padded tokens", "padded, CPU-s", "packed, CPU-s", "padded ÷ packed"], [])
    sampled: dict[str, Callable[[np.random.Generator], list[tuple[int, int]]]] = {
        "exchanges": exchange_lengths,
        "quickstart": quickstart_lengths,
        "conversations": conversation_lengths,
    }
    for model in MODELS:
        module = make_model(model)
        for name, draw in sampled.items():
            if name == "conversations" and model != "1.6M":
                continue  # minutes a pass
            rng = np.random.default_rng(0)
            rows = ppo_rows(draw(rng), rng)
            lengths = rows["input_ids"].lengths.tolist()
            padded_tokens = sum(len(b) * lengths[b[0]] for b in micro_batches(lengths, MICRO_BATCH_TOKENS))
            runs = [partial(update, module, rows, packed) for packed in (False, True)]
            padded, packed = compared(runs, args.repeats)
            cells = [model, name, sum(lengths), padded_tokens, spread(padded), spread(packed), ratio(padded, packed)]
            line(cells)
    print()
    compare_shared(args.repeats)
    print()
    table(["vocabulary", "hidden", "tokens", "all at once, CPU-s", "in chunks, CPU-s", "chunks ÷ all"], [])
    for vocabulary, hidden_size, tokens in ((2048, 160, 1024), (32_000, 128, 1024), (150_000, 64, 256)):
        layer = torch.nn.Linear(hidden_size, vocabulary, bias=False)
        hidden = torch.randn(tokens, hidden_size, requires_grad=True)
        targets = torch.randint(vocabulary, (tokens,))
        passes = [partial(logprobs, layer, hidden, targets, most) for most in (2**62, MAX_LOGITS)]
        whole, chunks = compared(passes, args.repeats)
        cells = [vocabulary, hidden_size, tokens, spread(whole), spread(chunks), ratio(chunks, whole)]
        line(cells)


if __name__ == "__main__":
    main()

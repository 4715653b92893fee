"""Stage `lm_eval`: a task, or a group, of EleutherAI's lm-evaluation-harness from a directory.

The harness makes prompts and metrics; this module is its model, which uses the policy's engines. Greedy replies are
sampled with `top_k` 1.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import PromptBatch, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.reasoning import answers_of
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.results import plain_numbers, write_results
from xray_runtime.methods.common.sampling.turns import sampling_turn
from xray_runtime.methods.lm_eval.harness_files import HarnessTasks, read_tasks
from xray_runtime.models.causal_lm import load_tokenizer, stops_of
from xray_runtime.models.likelihood_objective import LikelihoodObjective

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.lm_eval.config import LMEvalConfig
    from xray_runtime.methods.lm_eval.kind import LMEvalInputs

BATCH = 512
NUM_SAMPLES_SHOWN = 24
Z = 1.959964
"""Standard errors in half a 95% interval."""


def run(stage: Stage[LMEvalConfig, LMEvalInputs], out: Path, recorder: Recorder) -> int:
    """Writes benchmark.json, prompts.json and samples.json, as `benchmark` does.

    Raises:
        ValueError: the task's files are not complete in its directory.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    config, policy = stage.config, stage.inputs.policy.path
    tokenizer = load_tokenizer(policy)
    tasks = read_tasks(Path(config.task), f"{stage.name}.task")
    specs: dict[str, ModelSpec | GeneratorSpec] = {}
    if tasks.samples_replies:
        specs["generator"] = GeneratorSpec(policy, config.max_length, config.generator)
    if tasks.scores:
        specs["policy"] = ModelSpec(policy, LikelihoodObjective(), frozen=config.frozen)
    with stage.open_models(specs) as models, tempfile.TemporaryDirectory() as files:
        tasks.write(Path(files), Path(files) / "cache")
        seed = derive_seed(stage.seed, stage.name)
        output = simple_evaluate(
            _harness_model(_Model(stage, models, recorder, tokenizer, stops_of(policy, tokenizer))),
            tasks=[tasks.name],
            task_manager=TaskManager(include_path=files, include_defaults=False),
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.chat,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    content, prompts, shown = results_of(output, tasks)
    write_results(out, recorder, "benchmark.json", content, prompts, shown)
    numbers = plain_numbers(content, "lm_eval")
    for name, of_part in content.get("parts", {}).items():
        numbers |= plain_numbers(of_part, f"lm_eval/{name}")
    recorder.metrics(numbers, step=0)
    recorder.progress(content["samples"], content["samples"], "documents", tasks.name)
    return 0


def results_of(
    output: Mapping[str, Any], tasks: HarnessTasks
) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    """(content of benchmark.json, distinct prompts, readable documents) from the harness's results.

    A group's numbers come from its `aggregate_metric_list`; `parts` has the numbers of its members.
    """
    each = {name: _documents(output["samples"][name]) for name in sorted(output["samples"])}
    content: dict[str, Any] = {
        "suite": "lm_eval",
        "task": tasks.name,
        "samples": sum(len({row["doc_id"] for row in rows}) for rows in output["samples"].values()),
        **numbers_of(output["results"][tasks.name]),
    }
    if tasks.groups:
        content["parts"] = {
            name: numbers_of(results) for name, results in sorted(output["results"].items()) if name != tasks.name
        }
    prompts = list(dict.fromkeys(prompt for task_prompts, _ in each.values() for prompt in task_prompts))
    of_each = max(NUM_SAMPLES_SHOWN // len(each), 1)
    return content, prompts, [row for _, rows in each.values() for row in rows[:of_each]][:NUM_SAMPLES_SHOWN]


def numbers_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Metric → its value, with a 95% interval if the harness has a standard error.

    A metric is named after its filter too, but for the plain one: `exact_match_strict`.
    """
    numbers: dict[str, Any] = {}
    for key, value in results.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name = metric if chosen == "none" else f"{metric}_{chosen}"
        numbers[name] = float(value)
        error = results.get(f"{metric}_stderr,{chosen}")
        if isinstance(error, int | float) and math.isfinite(error):
            numbers[f"{name}_ci95"] = [value - Z * error, value + Z * error]
    return numbers


def _documents(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """(prompts, readable documents), in the task's order."""
    ordered = sorted(rows, key=lambda row: row["doc_id"])
    prompts = [str(row["arguments"][0][0]) for row in ordered]
    shown = [
        {"prompt": prompt, "answer": json.dumps(row["filtered_resps"], default=str), "target": str(row["target"])}
        for prompt, row in zip(prompts, ordered, strict=True)
    ]
    return prompts, shown


@dataclass(frozen=True)
class _Model:
    """The harness's model, computed by the stage's models."""

    stage: Stage[LMEvalConfig, LMEvalInputs]
    models: Mapping[str, ModelHandle]
    recorder: Recorder
    tokenizer: Tokenizer
    stops: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether it is the likeliest) for (context, continuation)."""
        fitting = [self._fitting(context, continuation) for context, continuation in pairs]
        answers: list[tuple[float, bool]] = []
        for start in range(0, len(fitting), BATCH):
            prompts, replies = zip(*fitting[start : start + BATCH], strict=True)
            scores = get(self.models["policy"].score.remote(TextBatch.of(prompts, replies)))
            found = zip(scores.loglikelihood.tolist(), scores.greedy.tolist(), strict=True)
            answers += [(value, greedy == 1.0) for value, greedy in found]
            self.recorder.progress(len(answers), len(fitting), "continuations", "scored")
        return answers

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The end of the context, at least one token of it, and the continuation."""
        longest = self.stage.config.max_length
        continuation = continuation[-(longest - 1) :]
        return context[-(longest - len(continuation)) :], continuation

    def reply(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Replies to prompts, each under its own options; requests with equal options are sampled together."""
        alike: dict[Sampling, list[int]] = {}
        for number, (_, options) in enumerate(requests):
            alike.setdefault(self._sampling(options), []).append(number)
        replies: dict[int, str] = {}
        with sampling_turn(self.stage.runtime, self.models["generator"]):
            for sampling, numbers in alike.items():
                for start in range(0, len(numbers), BATCH):
                    batch = numbers[start : start + BATCH]
                    replies |= zip(batch, self._sample([requests[n][0] for n in batch], batch, sampling), strict=True)
                    self.recorder.progress(len(replies), len(requests), "replies", "sampled")
        return [replies[number] for number in range(len(requests))]

    def _sample(self, texts: Sequence[str], numbers: Sequence[int], sampling: Sampling) -> list[str]:
        longest = self.stage.config.max_length - sampling.max_new_tokens
        seeds = np.array([derive_seed(self.stage.seed, self.stage.name, number) for number in numbers])
        rows = PromptBatch(input_ids=Ragged.of(self.encode(text)[-longest:] for text in texts), seed=seeds)
        answer = get(self.models["generator"].generate.remote(rows, sampling, 0))
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in answer.response_ids]
        replies = answers_of(texts)
        # The harness expects the text before the stop text.
        return [min((text.split(stop)[0] for stop in sampling.stop if stop), key=len, default=text) for text in replies]

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        config, until = self.stage.config, options.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(until)
        longest = min(int(options.get("max_gen_toks", config.max_new_tokens)), config.max_length - 1)
        return Sampling(longest, 1.0, self.stops, self.tokenizer.pad_token_id, top_k=1, stop=stop)


def _harness_model(model: _Model) -> Any:
    """`model` as a subclass of the harness's class."""
    from lm_eval.api.model import TemplateLM

    class HarnessModel(TemplateLM):
        backend = "causal"

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = model.tokenizer

        @property
        def eot_token_id(self) -> int:
            return model.stops[0]

        @property
        def tokenizer_name(self) -> str:
            return ""  # only used for a cache of prompts

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return model.encode(string)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
            text: str = model.tokenizer.apply_chat_template(chat_history, **options)
            return text

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return model.score([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            sums = []
            for request in requests:
                ids, longest = model.encode(request.args[0]), model.stage.config.max_length - 1
                windows = get_rolling_token_windows(ids, self.prefix_token_id, longest, 1)
                scores = model.score([make_disjoint_window(window) for window in windows])
                sums.append(sum(value for value, _ in scores))
            return sums

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return model.reply([request.args[:2] for request in requests])

    return HarnessModel()

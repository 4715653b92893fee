"""Memory that really runs out, in torch's allocator on one of two ranks: the cause is named, and the stage goes on."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from xray.tasks.stage_job import run_in_memory
from xray_runtime.cluster.opening import model_opener
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import StageOutOfMemoryError
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.kernel.tracking.recorder import StageRecorder
from xray_runtime.methods.sft.kind import SFT, SFTInputs

ROWS, STEPS = 3072, 2
MICRO_BATCH_TOKENS = 98304
"""All rows of a rank: some 77,000 tokens, and over a gigabyte."""
LETTERS = np.array(list("bdfgjkmpqvxz0123456789"))


class Limited(StageRecorder):
    """Leaves rank 1 `spare` bytes of address space beyond what it has when it is to begin; None: all there are."""

    def __init__(self, output: Path, spare: int | None) -> None:
        super().__init__(output, "sft", "k" * 64, None, lambda *_: None, every=STEPS, seal=process_seal())
        self._spare = spare
        self.used: list[int] = []
        """Memory that rank 1 came to use in its first step, in each attempt so far; 0: that step did not end."""

    def resume(self) -> Snapshot | None:
        self._rank = _writer_of(self.log_dir / "policy-1.log")
        Path(f"/proc/{self._rank}/clear_refs").write_text("5")  # what it used at most is counted anew
        self._had = self._memory("VmRSS")
        if self._spare is not None:
            limit = self._memory("VmSize") + self._spare
            psutil.Process(self._rank).rlimit(psutil.RLIMIT_AS, (limit, psutil.RLIM_INFINITY))
        self.used.append(0)
        return super().resume()

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        # Before its first step the stage only tells how far the data are tokenized.
        if unit == "steps":
            self.used[-1] = self.used[-1] or self._memory("VmHWM") - self._had

    def _memory(self, field: str) -> int:
        lines = Path(f"/proc/{self._rank}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _writer_of(log: Path) -> int:
    """The Workhorse whose output goes to `log`."""
    mine = psutil.Process().children(recursive=True)
    [pid] = [p.pid for p in mine if "ray::Learner" in p.name() and Path(f"/proc/{p.pid}/fd/1").resolve() == log]
    return pid


def dataset(root: Path) -> Path:
    """Pairs of which each rank's share is one micro-batch."""
    rng = np.random.default_rng(0)
    data = root / "data"
    data.mkdir(parents=True)

    def text(size: int) -> str:
        return "".join(rng.choice(LETTERS, size))

    for name, count in (("train", ROWS), ("heldout", 8)):
        prompts = [[{"role": "user", "content": text(20)}] for _ in range(count)]
        examples = [Example(str(i), str(i), p, text(int(rng.integers(10, 28)))) for i, p in enumerate(prompts)]
        write_pairs(data / f"{name}.arrow", Example, examples)
    (data / "dataset.json").write_text(json.dumps({"max_prompt_tokens": 32}))
    return data


def run(model: Path, root: Path, spare: int | None = None) -> tuple[dict[str, torch.Tensor], Limited]:
    """SFT of `model` on two ranks: (final weights, the recorder)."""
    engine = {"num_workhorses": 2, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    config = SFT.validated({"steps": STEPS, "batch_size": ROWS, "engine": engine})
    inputs = SFTInputs(Model(model), Dataset(dataset(root)))
    recorder, out = Limited(root, spare), root / "out"

    def body(runtime: RuntimeConfig) -> int:
        opener = model_opener(runtime, recorder.log_dir, "test")
        return SFT.run(Stage("sft", 0, config, inputs, runtime, opener), out, recorder)

    recorder.begin()
    out.mkdir()
    run_in_memory("sft", RuntimeConfig(threads=1, device="cpu"), out, recorder, body)
    return load_file(out / "model.safetensors"), recorder


@pytest.mark.long
def test_a_stage_that_runs_out_of_memory_goes_on_with_smaller_micro_batches(
    cluster: None, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed, recorder = run(tiny_model, tmp_path / "undisturbed")
    [needed] = recorder.used
    assert needed > 800e6  # much more than threads and libraries may add to a process
    spare = int(0.75 * needed)
    with caplog.at_level(logging.WARNING, logger="xray.tasks.stage_job"):
        weights, recorder = run(tiny_model, tmp_path / "limited", spare)
    # Each attempt had the same limit; how often it takes halving is for the allocator to say.
    *failed, went_on = recorder.used
    assert failed
    assert not failed[0]  # a later attempt may fit its first step, and fail where a second one finds memory in pieces
    assert 0 < went_on < 0.75 * needed
    said = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(said) == len(failed)
    for number, line in enumerate(said, start=1):
        assert "can't allocate memory" in line
        assert f" in Workhorse 1 of 2 of 'policy' ({socket.gethostname()}, pid " in line
        assert line.endswith(f"; continuing with micro-batches 1/{2**number} as large")
    before = load_file(tiny_model / "model.safetensors")
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=2e-5)
        assert not torch.equal(before[name], tensor)


@pytest.mark.parametrize(("choice", "divisor"), [("fail", 1), ("halve", 64)])
def test_where_smaller_micro_batches_do_not_help_the_message_says_what_does(
    tmp_path: Path, choice: Literal["fail", "halve"], divisor: int
) -> None:
    tried: list[int] = []

    def body(runtime: RuntimeConfig) -> int:
        tried.append(runtime.micro_batch_divisor)
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    says = rf"sft: out of memory \(CUDA out of memory.*\); lower engine.micro_batch_tokens.*\(now {divisor}\)"
    recorder, out = (
        StageRecorder(tmp_path, "sft", "k" * 64, None, lambda *_: None, every=1, seal=process_seal()),
        tmp_path / "out",
    )
    out.mkdir()
    with pytest.raises(StageOutOfMemoryError, match=says):
        run_in_memory("sft", RuntimeConfig(on_out_of_memory=choice), out, recorder, body)
    assert tried == [2**i for i in range(divisor.bit_length())]

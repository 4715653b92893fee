"""An output directory for the studio: a lifecycle, rollouts that can be read, a comparison, and recorded answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
from fastapi.testclient import TestClient

from tests.unit.live.serving.recording import exchange, keep
from tests.unit.trust.synthetic import Lifecycle, comparison, weights
from xray.studio.access import COOKIE, Access
from xray.studio.app import make_app
from xray.studio.studio import Studio
from xray_runtime.data.ledger import LedgerShard
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.evidence.view import RunBegan
from xray_runtime.kernel.history.reference import find, open_lineage_store
from xray_runtime.live.feedback.judgements import Question
from xray_runtime.live.feedback.session import Session, session_directory
from xray_runtime.trust.log import append

HOSTILE = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }} <img src=x onerror=alert(1)>"


def shard(tokenizer: Any, iteration: int, size: int) -> bytes:
    """Rollouts whose rewards are scattered from -size/2 to size/2; prompt n is in every iteration."""
    ids = [tokenizer(f"question {n}")["input_ids"] for n in range(size)]
    replies = [tokenizer(f"{HOSTILE if n == 0 else 'reply'} {iteration} {n}")["input_ids"] for n in range(size)]
    rewards = [float((n * 7 + iteration) % size - size // 2) for n in range(size)]
    lists, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    # Token k of row n: log-probability -(k + 1) / 2; the reference's is lower by n / 100, the generator's by 0.25.
    logprobs = [[-(k + 1) / 2 for k in range(len(reply))] for reply in replies]
    columns = {
        "iteration": pa.array([iteration] * size, pa.int32()),
        "row": pa.array(range(size), pa.int32()),
        "round": pa.array([0] * size, pa.int32()),
        "prompt": pa.array(range(size), pa.int32()),
        "prompt_ids": pa.array(ids, lists),
        "reply_ids": pa.array(replies, lists),
        "rollout_logprobs": pa.array([[value - 0.25 for value in of] for of in logprobs], floats),
        "logprobs": pa.array(logprobs, floats),
        "entropy": pa.array([[0.75] * len(of) for of in logprobs], floats),
        "ref_logprobs": pa.array([[value - n / 100 for value in of] for n, of in enumerate(logprobs)], floats),
        "advantages": pa.array([[0.5] * len(of) for of in logprobs], floats),
        "weights": pa.array([[1.0] * len(of) for of in logprobs], floats),
        "score/rewards.0": pa.array(rewards, pa.float32()),
        "reward": pa.array(rewards, pa.float32()),
        "scaled_reward": pa.array(rewards, pa.float32()),
        "times_trained": pa.array([n % 2 for n in range(size)], pa.int32()),
        "version": pa.array([iteration] * size, pa.int32()),
        "seed": pa.array(range(size), pa.int64()),
        "ended": pa.array([True] * size),
    }
    return LedgerShard(iteration, None, pa.table(columns)).to_bytes()


def with_rollouts(output: Path, scratch: Path, num_iterations: int = 3, size: int = 40, stage: str = "ppo-read") -> str:
    """Publish a policy with a tokenizer and a ledger; returns its sha256."""
    life, tokenizer = Lifecycle(output), train_tokenizer([HOSTILE, "question 0 reply 1"] * 5, 300)
    tokenizer.save_pretrained(scratch)
    files = {path.name: path.read_bytes() for path in scratch.iterdir()}
    files |= {"config.json": b"{}", "model.safetensors": weights("read")}
    files |= {f"ledger/{n:06d}.parquet": shard(tokenizer, n, size) for n in range(num_iterations)}
    return life.add(stage, "ppo", files, {}).sha256


def run_at_work(output: Path, stage: str, metrics: Sequence[Mapping[str, float]]) -> Path:
    """Begin the run `live-1`, which a test must lock; returns the directory of its stage's records."""
    empty = {"run_directory": "", "facts": {}, "tracking": "", "params": "0" * 64, "tags": {}}
    append(output, RunBegan(run_id="live-1", experiment="e", name="tonight", **empty))
    (output / "lifecycle.json").write_text(json.dumps({"run_id": "live-1", "status": "running", "stages": []}))
    records = output / "records" / f"{stage}-0123456789ab"
    records.mkdir()
    points = [{"step": step, "time_ms": step, "metrics": dict(values)} for step, values in enumerate(metrics)]
    (records / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    return records


def compared(output: Path, count: int = 3) -> Session:
    """A comparison of sft and ppo-2 that nobody has judged; the replies of one are hostile."""
    store = open_lineage_store(output, None)
    setup = comparison(find("sft", store).sha256, find("ppo-2", store).sha256)
    session = Session.read(session_directory(output, setup))
    prompts = [[{"role": "user", "content": f"asked {n} {HOSTILE if n == 0 else ''}"}] for n in range(count)]
    session.add_questions(
        [Question(number=n, prompt=p, a=f"from a {n} {HOSTILE}", b=f"from b {n}") for n, p in enumerate(prompts)]
    )
    return session


def recorded(output: Path) -> None:
    """Three answers: two to one prompt, by two models, and one to another prompt."""
    store = open_lineage_store(output, None)
    a, b = (find(stage, store).sha256 for stage in ("sft", "ppo-2"))
    keep(output, exchange(1, "ann", "shared question", model=a), exchange(2, "bob", "shared question", model=b))
    keep(output, exchange(3, "ann", f"alone {HOSTILE}", model=a))


def studio(output: Path, token: str | None = None, **fields: Any) -> TestClient:
    """A browser without scripts, on loopback."""
    access = Access(token)
    app = make_app(Studio(output, "ada", **fields), access)
    app.state.access = access
    return TestClient(app, base_url="http://127.0.0.1:8100", follow_redirects=False)


def post(client: TestClient, path: str, **fields: str) -> httpx.Response:
    """Send a form of the client's session."""
    if COOKIE not in client.cookies:
        client.get("/")
    csrf = client.app.state.access.csrf(client.cookies[COOKIE])  # type: ignore[attr-defined]
    return client.post(path, data=fields | {"csrf": csrf})

"""Nothing in X-ray unpickles, evaluates or imports what came from outside: each call that could is here, with a reason.

The source is read, not run. Beside `test_layering.py`, which says who may import whom.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.source_trees import nodes

ROOT = Path(__file__).parents[2]
FILES = (
    "xray/*.py",
    *(f"{folder}/**/*.py" for folder in ("xray/cli", "deployments", "flows", "tasks", "xray_runtime", "benchmarks")),
)

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""Modules whose import alone is refused."""

UNPICKLING = ("diskcache", "optuna.storages", "prefect.results", "ray.cloudpickle", "ray.train", "ray.tune")
"""Modules that unpickle what they themselves once wrote to a disk: an intruder may have written it since."""

ALWAYS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "importlib.import_module",
    "mlflow.pyfunc.load_model",
    "os.popen",
    "os.system",
    "pandas.read_pickle",
    "tempfile.mktemp",
    "yaml.full_load",
    "yaml.load",
    "yaml.unsafe_load",
}

UNLESS = {
    "numpy.load": ("allow_pickle", False),
    "torch.load": ("weights_only", True),
    "extract": ("filter", "data"),
    "extractall": ("filter", "data"),
    "from_pretrained": ("trust_remote_code", False),
    "from_config": ("trust_remote_code", False),
}
"""Call (or method) → the argument that makes it harmless. `**NO_CODE`, `**(options | NO_CODE)` and `**options`, which
holds it, count."""

METHODS = {"load_checkpoint", "load_from_checkpoint", "read_pickle", "unpickle"}
"""DeepSpeed's, Lightning's, pandas': whatever they are called on."""

NEVER = {
    "shell": True,
    "trust_remote_code": True,
    "allow_pickle": True,
    "weights_only": False,
    "verify": False,
    "typ": "unsafe",
}
"""Arguments no call may have."""

ALLOWED = {
    ("xray_runtime/data/gold.py", "importlib.import_module"): "what XRAY_ALLOWED_IMPORTS names, asked just before",
    ("xray_runtime/kernel/graph/kind.py", "importlib.import_module"): "a kind's body, named in code that registered it",
    ("xray_runtime/kernel/graph/stage_identity.py", "importlib.import_module"): "a table that stands beside it",
    ("xray_runtime/kernel/plugs.py", "importlib.import_module"): "a plug of this package, or of an installed one",
    (
        "xray_runtime/kernel/graph/kinds.py",
        "importlib.import_module",
    ): "what the process that wrote a graph had imported, through Ray from there (see test_kind.py)",
    ("xray_runtime/rewards/code/reply.py", "compile"): "a reply's code, in a process that may compute and nothing else",
    ("xray_runtime/rewards/code/reply.py", "exec"): "as above",
    ("xray_runtime/rewards/code/judge.py", "compile"): "tests of a data set, in a process as of a reply's code",
    ("xray_runtime/rewards/code/judge.py", "exec"): "as above",
    ("xray_runtime/rewards/code/judge.py", "importlib.import_module"): "Python's own modules, in that process",
    ("xray_runtime/rewards/code/server.py", "importlib.import_module"): "Python's own modules",
    (
        "xray_runtime/agents/environments/worker.py",
        "importlib.import_module",
    ): "as in data/gold.py: a graph asks for every function that a kind names (see test_episodes.py)",
    ("xray_runtime/agents/worker.py", "importlib.import_module"): "as for environments",
    ("xray_runtime/agents/sandboxes/call.py", "importlib.import_module"): "an agent's function, in its sandbox",
    ("xray/__init__.py", "importlib.import_module"): "a table of its own",
    ("deployments/fork_server.py", "importlib.import_module"): "a list that stands beside it",
    ("deployments/local_services.py", "importlib.import_module"): "modules that a command names in its own code",
    ("flows/study.py", "optuna.storages"): "a journal in a file is JSON; that of Redis has pickled snapshots",
    ("flows/subject.py", "importlib.import_module"): "the flow that a person names on the command line",
    ("benchmarks/families.py", "from_config"): "a config that it makes itself",
    ("benchmarks/families.py", "from_pretrained"): "a model that it wrote itself",
    (
        "xray_runtime/models/adapter_files.py",
        "from_pretrained",
    ): "peft's, of local files: a config in JSON and safetensors",
    ("benchmarks/learning.py", "importlib.import_module"): "a lesson, whose file name begins with a digit",
    ("benchmarks/cluster_sim/controller.py", "ray.cloudpickle"): "counts bytes, and reads none",
}


def findings(tree: Sequence[ast.AST]) -> Iterator[str]:
    """Names of the calls and imports among the nodes of a file that need a reason."""
    names: dict[str, str] = {}
    for node in tree:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            whole = [f"{module}{alias.name}" for alias in node.names]
            yield from (name for name in UNPICKLING if any(f"{w}.".startswith(f"{name}.") for w in whole))
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if node.module.split(".")[0] in PICKLES:
                yield node.module
    for node in tree:
        if not isinstance(node, ast.Call):
            continue
        first, *rest = ast.unparse(node.func).split(".")
        whole = ".".join([names.get(first, first), *rest])
        keywords = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
        if whole in ALWAYS:
            yield whole
        yield from (name for name in UNPICKLING if whole.startswith(f"{name}."))
        if rest and rest[-1] in METHODS:
            yield rest[-1]
        for name in {whole, rest[-1] if rest else ""} & UNLESS.keys():
            argument, wanted = UNLESS[name]
            spread = {ast.unparse(k.value) for k in node.keywords if k.arg is None}
            if keywords.get(argument) != wanted and not spread & {"NO_CODE", "options | NO_CODE", "options"}:
                yield name
        yield from (name for name, value in NEVER.items() if keywords.get(name) == value)


def found() -> set[tuple[str, str]]:
    files = [path for pattern in FILES for path in ROOT.glob(pattern)]
    assert len(files) > 150
    return {(path.relative_to(ROOT).as_posix(), name) for path in files for name in findings(nodes(path))}


def test_every_unsafe_call_has_a_reason_and_every_reason_a_call() -> None:
    assert found() == ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from ray import tune as t\nt.Tuner.restore(p, f)", "ray.tune"),
        ("from ray.tune.search.optuna import OptunaSearch", "ray.tune"),
        ("import ray\nray.cloudpickle.loads(b)", "ray.cloudpickle"),
        ("import ray.tune.schedulers", "ray.tune"),
        ("engine.load_checkpoint(d)", "load_checkpoint"),
        ("def f():\n    from cloudpickle import loads", "cloudpickle"),
        ("import torch\ntorch.load(p)", "torch.load"),
        ("from torch import load as get\nget(p, map_location='cpu')", "torch.load"),
        ("import torch\ntorch.load(p, weights_only=False)", "torch.load"),
        ("import numpy as np\nnp.load(p, allow_pickle=True)", "numpy.load"),
        ("import yaml\nyaml.load(t, Loader=yaml.Loader)", "yaml.load"),
        ("from ruamel.yaml import YAML\nYAML(typ='unsafe').load(t)", "typ"),
        ("import mlflow\nmlflow.pyfunc.load_model(u)", "mlflow.pyfunc.load_model"),
        ("from transformers import AutoModel\nAutoModel.from_pretrained(n)", "from_pretrained"),
        ("archive.extractall(p)", "extractall"),
        ("import subprocess\nsubprocess.run(c, shell=True)", "shell"),
        ("LLM(d, trust_remote_code=True)", "trust_remote_code"),
        ("eval(text)", "eval"),
    ],
)
def test_it_sees_what_it_looks_for(source: str, name: str) -> None:
    assert name in set(findings([*ast.walk(ast.parse(source))]))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(p, weights_only=True)",
        "import numpy as np\nnp.load(p, allow_pickle=False)",
        "archive.extract(m, p, filter='data')",
        "AutoConfig.from_pretrained(n, **NO_CODE)",
        "module.eval()",
        "import yaml\nyaml.safe_load(t)",
    ],
)
def test_and_nothing_else(source: str) -> None:
    assert set(findings([*ast.walk(ast.parse(source))])) == set()

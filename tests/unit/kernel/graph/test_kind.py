"""Stage kinds: registering one, what of it is refused, who may have its module imported, what `xray` shows of it."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import Field

import xray
from tests.unit.kernel.graph.calls import refused
from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.graph import artifacts, kind as kinds_module, kinds as shipped_kinds
from xray_runtime.kernel.graph.artifacts import Artifact, Dataset, Model, RewardModel
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.graph.kind import KINDS, Role, StageKind, config_of, register, stage_kind
from xray_runtime.kernel.graph.kind_help import meaning
from xray_runtime.kernel.graph.kinds import find_kind, import_kind
from xray_runtime.methods.compare.kind import COMPARE
from xray_runtime.methods.evaluate.kind import EVALUATE
from xray_runtime.methods.ppo.kind import PPO
from xray_runtime.methods.preferences.kind import PREFERENCES
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.methods.sft.kind import SFT

ROOT = Path(__file__).parents[4]


class Fields(Section):
    share: float = 0.5


@dataclasses.dataclass(frozen=True)
class OneModel:
    policy: Model


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    find_kind("")
    monkeypatch.setattr(kinds_module, "KINDS", kinds := dict(KINDS))
    monkeypatch.setattr(shipped_kinds, "KINDS", kinds)
    monkeypatch.setattr(kinds_module, "_REGISTERED_IN", dict(kinds_module._REGISTERED_IN))
    monkeypatch.setattr(kinds_module, "TYPES", dict(artifacts.TYPES))
    monkeypatch.setitem(globals(), "KINDS", kinds)


def body(stage: Any, out: Path, recorder: Any) -> int:
    return 0


def test_a_decorated_body_is_a_kind() -> None:
    made = stage_kind("own", config=Fields, inputs=OneModel, output=Model, title="a student")(body)
    assert isinstance(made, StageKind)
    assert find_kind("own") is made
    assert made.run is body
    assert made.module == made.registered_in == __name__
    assert (made.name, made.config, made.inputs, made.output, made.title) == (
        "own",
        Fields,
        OneModel,
        Model,
        "a student",
    )
    with recording() as graph:
        base = xray.base(model="x")
        assert graph.calls[made(base, share=0.25).name].config == Fields(share=0.25)


def test_a_body_may_be_named() -> None:
    """Then whoever writes a graph does not import what it needs."""
    made = register(StageKind("named", Fields, kinds_module.NoInputs, Model, "xray_runtime.methods.base.body:run"))
    assert made.module == "xray_runtime.methods.base.body"
    # Where it is registered is neither where its body is nor where its (shared) inputs are.
    assert made.registered_in == __name__
    assert made.run.__module__ == "xray_runtime.methods.base.body"


def test_every_kind_of_ours_has_a_body_and_typed_inputs() -> None:
    expected = {"base", "compare", "evaluate", "fresh_base", "ppo", "preferences", "prepare", "sft"}
    expected |= {"best_of_n", "dpo", "kto", "reward_base", "reward_model", "split_preferences", "benchmark", "lm_eval"}
    expected |= {"curate", "demonstrations", "distill", "distill_replies", "recorded_prompts"}
    assert {name for name, kind in KINDS.items() if kind.registered_in.startswith("xray_runtime.methods.")} == expected
    for name in expected:
        kind = KINDS[name]
        assert callable(kind.run)
        assert all(issubclass(role.type, Artifact) for role in kind.roles.values())


def test_roles_in_order() -> None:
    assert list(PPO.roles.values()) == [
        Role("policy", Model, optional=False, many=False),
        Role("prompts", Dataset, optional=False, many=False),
        Role("reference", Model, optional=True, many=False),
        Role("rewards", RewardModel, optional=True, many=True),
        Role("judges", RewardModel, optional=True, many=True),
        Role("champion", Model, optional=True, many=False),
        Role("teacher", Model, optional=True, many=True),
    ]


@pytest.mark.parametrize(
    ("hint", "role"),
    [
        (Model, Role("x", Model, optional=False, many=False)),
        (Model | None, Role("x", Model, optional=True, many=False)),
        (Optional[Model], Role("x", Model, optional=True, many=False)),  # noqa: UP045
        (None | Model, Role("x", Model, optional=True, many=False)),
        (list[RewardModel], Role("x", RewardModel, optional=True, many=True)),
    ],
)
def test_roles_of_annotations(hint: Any, role: Role) -> None:
    assert Role.of("x", hint) == role


@pytest.mark.parametrize(
    "hint", [int, str | None, list[int], Model | Dataset, Model | Dataset | None, dict[str, Model]]
)
def test_an_annotation_of_another_form_is_refused(hint: Any) -> None:
    said = refused(lambda: Role.of("x", hint))
    assert said == f"input 'x': {hint} is not allowed: must be an artifact, A, A | None or list[A]"
    inputs = dataclasses.make_dataclass("Inputs", [("x", hint)])
    assert refused(lambda: register(StageKind("odd", Fields, inputs, Model, body))) == f"stage kind 'odd': {said}"
    assert find_kind("odd") is None


# Names


def test_inputs_are_opened_in_the_order_of_their_numbers() -> None:
    paths = {f"rewards.{n}": Path(f"reward-{n}") for n in (10, 2, 0)} | {"policy": Path("p"), "prompts": Path("d")}
    inputs = PPO.inputs_at(paths)
    assert inputs.policy == Model(Path("p"))
    assert inputs.prompts == Dataset(Path("d"))
    assert inputs.reference is None
    assert inputs.rewards == [RewardModel(Path(f"reward-{n}")) for n in (0, 2, 10)]


def test_a_name_stands_for_one_kind() -> None:
    before = find_kind("sft")
    said = refused(lambda: stage_kind("sft", config=Fields, inputs=OneModel, output=Model)(body))
    assert said == f"stage kind 'sft' is registered twice: in xray_runtime.methods.sft.body and in {__name__}"
    assert find_kind("sft") is before

    def other(stage: Any, out: Path, recorder: Any) -> int:
        return 1

    stage_kind("mine", config=Fields)(body)
    assert "registered twice" in refused(lambda: stage_kind("mine", config=Fields)(other))


def test_a_module_that_is_loaded_again_registers_its_kinds_again() -> None:
    stage_kind("mine", config=Fields)(body)
    again = stage_kind("mine", config=Section)(body)
    assert find_kind("mine") is again


@pytest.mark.parametrize("name", ["", "Mine", "two words", "a-b", "_hidden", "1st", "../x"])
def test_a_name_is_one_that_python_and_a_path_can_have(name: str) -> None:
    said = refused(lambda: stage_kind(name, config=Fields)(body))
    assert said == f"stage kind {name!r} is not allowed: must match [a-z][a-z0-9_]*"


def test_a_type_has_one_meaning() -> None:
    """Manifests know types by their names."""
    other = type("Model", (Artifact,), {"__module__": "somewhere.else"})
    said = refused(lambda: stage_kind("mine", config=Fields, output=other)(body))
    assert said == (
        "stage kind 'mine': the type Model of somewhere.else is not allowed: "
        "xray_runtime.kernel.graph.artifacts has a type of this name"
    )
    own = type("Outline", (Artifact,), {})
    stage_kind("mine", config=Fields, output=own)(body)
    assert kinds_module.TYPES["Outline"] is own
    read = type("Sketch", (Artifact,), {})
    stage_kind("yours", config=Fields, inputs=dataclasses.make_dataclass("Inputs", [("sketch", read)]))(body)
    assert kinds_module.TYPES["Sketch"] is read


def test_a_name_is_an_input_or_a_field() -> None:
    inputs = dataclasses.make_dataclass("Inputs", [("share", Model)])
    said = refused(lambda: stage_kind("mine", config=Fields, inputs=inputs)(body))
    assert said == "stage kind 'mine': 'share' is both an input and a field of its config"


def test_a_field_that_cannot_be_checked_is_refused_before_any_stage_is_called() -> None:
    class Wrong(Section):
        lock: threading.Event

    said = refused(lambda: stage_kind("mine", config=Wrong)(body))
    assert said.startswith(
        "stage kind 'mine': Wrong: Unable to generate pydantic-core schema for <class 'threading.Event'>."
    )


def test_help_shows_the_text_below_a_field_or_its_description() -> None:
    class Told(Section):
        below: int = 1
        """Below it."""
        beside: Annotated[int, Field(description="Beside it.")] = 2

    assert (meaning(Told, "below"), meaning(Told, "beside")) == ("Below it.", "Beside it.")


# Configs


class Small(Section):
    size: Literal["small"] = "small"
    width: int = 8


class Large(Section):
    size: Literal["large", "huge"] = "large"
    layers: int = 8


SIZES = StageKind("sized", Annotated[Small | Large, Field(discriminator="size")], OneModel, Model, body)


def test_a_config_may_be_a_choice() -> None:
    assert SIZES.validated({}) == Small()
    assert SIZES.validated({"width": 9}) == Small(width=9)
    assert SIZES.validated({"size": "huge", "layers": 2}) == Large(size="huge", layers=2)
    assert set(SIZES.section({"size": "large"}).model_fields) == {"size", "layers"}
    assert set(SIZES.section({}).model_fields) == {"size", "width"}
    assert SIZES.all_field_names == {"size", "width", "layers"}
    for config in (Small(width=3), Large(size="huge")):
        assert config_of(SIZES, config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "tiny"}, "mine.size: \"tiny\" is not allowed: must be one of 'small', 'large', 'huge'"),
        ({"size": None}, "mine.size: null is not allowed: must be one of 'small', 'large', 'huge'"),
        ({"size": ["small"]}, "mine.size: [\"small\"] is not allowed: must be one of 'small', 'large', 'huge'"),
        ({"size": "small", "layers": 1}, "mine.layers: unknown field; allowed here: size, width"),
        ({"width": "8"}, 'mine.width: "8" is not allowed: must be a whole number'),
    ],
)
def test_a_choice_is_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    assert refused(lambda: SIZES.validated(values, where="mine")) == message


def test_a_config_comes_back_from_json() -> None:
    config = SFTConfig(steps=7, betas=(0.8, 0.9))
    assert config_of(SFT, config.model_dump(mode="json")) == config


def test_shortened_configs_are_still_allowed() -> None:
    values: dict[str, dict[str, Any]] = {
        "base": {"model": "x"},
        "preferences": {"gold": "vader"},
        "ppo": {"rewards": [{"function": "x:y"}]},
        "reward_base": {"model": "x"},
        "split_preferences": {"part": "heldout"},
        "lm_eval": {"task": "task"},
    }
    for name, kind in KINDS.items():
        config = kind.validated(values.get(name, {}))
        short = kind.shorten(config)
        assert config_of(kind, short.model_dump(mode="json")) == short
    assert PPO.shorten(PPO.validated({"iterations": 50})).iterations == 2
    assert PREFERENCES.shorten(PREFERENCES.validated({"gold": "vader", "num_pairs": 9})).num_pairs == 9


def test_sides_are_inputs() -> None:
    for kind in (EVALUATE, COMPARE):
        assert kind.sides is not None
        assert set(kind.sides) <= set(kind.roles)


# A user's own


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a kind, which nothing has imported."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "halve.py").write_text(
        "from dataclasses import dataclass\n"
        "from pathlib import Path\n"
        "import xray\n"
        "class HalveConfig(xray.Section):\n"
        "    share: float = 0.5\n"
        "@dataclass(frozen=True)\n"
        "class HalveInputs:\n"
        "    data: xray.Dataset\n"
        f"@xray.stage_kind('{name}', config=HalveConfig, inputs=HalveInputs, output=xray.Dataset)\n"
        "def halve(stage, out, recorder):\n"
        "    return 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_name_imports_nothing(package: str) -> None:
    """It may stand in a manifest, a bundle or a parameter that anybody made."""
    assert find_kind(package) is None
    assert find_kind(f"{package}.halve") is None
    assert not hasattr(xray, package)
    assert not any(module.startswith(package) for module in sys.modules)


def test_a_graph_at_work_names_the_module_too(package: str) -> None:
    kind = import_kind(package, f"{package}.halve")
    assert kind is not None
    assert (kind.name, kind.registered_in) == (package, f"{package}.halve")
    assert find_kind(package) is kind
    assert getattr(xray, package) is kind
    assert package in dir(xray)
    # Known already: the module that is named is not looked at.
    assert import_kind(package, "no.such.module") is kind
    assert import_kind("sft", "no.such.module") is SFT
    assert import_kind("absent", f"{package}.halve") is None


def test_only_the_task_of_a_stage_has_a_kinds_module_imported() -> None:
    """What names a module there came through Ray from the process that wrote the graph; everywhere else it may not."""
    callers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("xray/cli", "deployments", "flows", "tasks", "xray_runtime", "benchmarks", "examples")
        for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / "xray").glob("*.py"))
        if "import_kind" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias)
        and "import_kind" in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    }
    assert callers == {"tasks/stage.py"}


# The front door


def test_names_of_xray() -> None:
    names = dir(xray)
    assert {"workspace", "checkpoint", "register", "reward", "Handle", "Section", "stage_kind", "ppo", "sft"} <= set(
        names
    )
    assert names == sorted(names)
    assert xray.ppo is PPO
    # What runs a graph imports Prefect and Ray; the rest is at hand.
    for name in set(names) - {"Result", "Workspace", "task_runner"}:
        assert getattr(xray, name) is not None
    with pytest.raises(AttributeError, match=r"^module 'xray' has no attribute 'orpo'$"):
        xray.orpo  # noqa: B018
    with pytest.raises(AttributeError, match="_private"):
        xray._private  # noqa: B018


WRITTEN = """
import xray; dir(xray)
xray.ppo; xray.Section; xray.reward; xray.stage_kind; xray.Model; xray.workspace
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.methods.lifecycle import LifecycleConfig
assert recorded_graph(LifecycleConfig()).calls
import xray_runtime.kernel.graph.stage_identity, sys
print(*{"torch", "ray", "prefect", "mlflow", "transformers", "vllm", "numpy"} & set(sys.modules))
"""


def test_writing_a_graph_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", WRITTEN], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

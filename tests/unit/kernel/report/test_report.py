"""The report: figures from small metrics, one file that needs nothing else, and no text that becomes markup."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from xray_runtime.kernel.graph.kind import KINDS
from xray_runtime.kernel.report.figures import (
    StageRecord,
    drawn_panels,
    panels_of,
    read_metrics,
    sheet,
    training_figure,
)
from xray_runtime.kernel.report.html import write_report
from xray_runtime.kernel.report.layout import lineage_graph
from xray_runtime.kernel.report.names import NAMES, title as named
from xray_runtime.methods.ppo.kind import PPO
from xray_runtime.methods.prepare.kind import PREPARE
from xray_runtime.methods.sft.kind import SFT

PANELS = {name: kind.panels for name, kind in KINDS.items() if kind.panels}

HOSTILE = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }} {% raw %} 日本 ]]> --> &amp; <svg onload=x>"
SHAS = {name: digit * 64 for name, digit in zip(("prepare", "base", "sft", "ppo-1"), "abcd", strict=True)}


class Page(HTMLParser):
    """What a browser would make of it: elements with their attributes, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def stage(name: str, parents: list[str], cached: bool = False) -> dict[str, Any]:
    checkpoint = {"uri": f"/out/{name}", "sha256": SHAS[name]}
    parents = [SHAS[parent] for parent in parents]
    return {
        "name": name,
        "checkpoint": checkpoint,
        "parents": parents,
        "cached": cached,
        "findings": [],
        "seconds": 0.2 if cached else 12.34,
        "computed_seconds": 48.0 if cached else 12.34,
        "computed_at": "2026-11-23T08:00:00+00:00",
    }


def lifecycle(**evaluation: Any) -> dict[str, Any]:
    return {
        "project": "demo",
        "seed": 3,
        "status": "completed",
        "seconds": 61.6,
        "run_id": "run-1",
        "mlflow_page": "#/experiments/1/runs/run-1",
        "registered": {"name": "demo-policy", "version": "4", "alias": "candidate"},
        "stages": [
            stage("prepare", []),
            stage("base", []),
            stage("sft", ["base", "prepare"], cached=True),
            stage("ppo-1", ["sft", "prepare"]),
        ],
        "evaluation": {
            "gold_before": 0.1,
            "gold_after": 0.25,
            "gold_delta": 0.15,
            "gold_delta_ci95": [0.05, 0.25],
            "judge": "gold",
            "judges": {},
            "win_rate": 0.625,
            "win_rate_ci95": [0.55, 0.7],
            "samples": 64,
            "reward_before": -0.2,
            "reward_after": 0.9,
            "kl": 3.5,
            "length_before": 8.25,
            "length_after": 9.75,
            "distinct_2_before": 0.5,
            "distinct_2_after": 0.4,
        }
        | evaluation,
    }


def test_a_cached_stage_keeps_its_own_seconds(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, lifecycle() | {"mlflow_page": "http://host/#/experiments/1/runs/run-1"}, [], [], "")
    text = path.read_text(encoding="utf-8")
    assert "cached; computed in 48.0 s on 2026-11-23" in text
    assert "completed in 62 s, 1 of 4 stages cached, which took 48 s to compute" in text
    assert 'href="http://host/#/experiments/1/runs/run-1"' in text


def sample(**changes: Any) -> dict[str, Any]:
    texts = {"prompt": "how are you?", "before": "fine", "after": "very well, thanks"}
    numbers = {"gold_before": 0.0, "gold_after": 0.5, "reward_before": -1.0, "reward_after": 1.25}
    return texts | numbers | changes


def records(directory: Path) -> list[StageRecord]:
    """Records of one stage of each kind; a base has no curves, nor has a kind that nobody registered here."""
    made = []
    for kind in ("base", "somebody's", *PANELS):
        path = directory / f"{kind}.jsonl"
        names = [name for _, panel in PANELS.get(kind, []) for name in panel] or ["base/parameters"]
        lines = [{"step": step, "metrics": dict.fromkeys(names, step + 0.5)} for step in range(3)]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        made.append(StageRecord(f"{kind} curves", kind, path))
    return made


def write(
    tmp_path: Path,
    samples: list[dict[str, Any]] | None = None,
    config: str = "",
    curves: bool = False,
    **evaluation: Any,
) -> str:
    path = tmp_path / "report.html"
    shown = records(tmp_path) if curves else []
    write_report(path, lifecycle(**evaluation), shown, samples or [sample()], config)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", list(PANELS))
def test_a_figure_has_a_panel_for_each_subject(kind: str) -> None:
    series = {name: [(0, 1.0), (1, 2.0)] for _, names in PANELS[kind] for name in names}
    figure = training_figure(PANELS[kind], series)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == [title for title, _ in PANELS[kind]]
    for axes, (title, names) in zip(figure.axes, PANELS[kind], strict=True):
        drawn = axes.containers if title.startswith("seconds") else axes.lines
        assert len(drawn) == len(names)
        # Where there are several, each has its name and its colour.
        legend = axes.get_legend()
        assert (legend is not None) == (len(names) > 1)
        if legend is not None:
            labels = [text.get_text() for text in legend.get_texts()]
            assert len(set(labels)) == len(names)
            for label, name in zip(labels, names, strict=True):
                assert label.endswith(name.split("/")[1].replace("_", " "))


def test_a_curve_has_the_points_that_were_recorded() -> None:
    series = {"sft/loss": [(0, 4.0), (10, 2.5), (20, 2.0)], "sft/heldout_loss": [(20, 2.25)]}
    figure = training_figure(SFT.panels, series)
    assert figure is not None
    [axes] = figure.axes
    points = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    assert points == [[(0, 4.0), (10, 2.5), (20, 2.0)], [(20, 2.25)]]
    # One point alone is no line: it needs a marker to be seen.
    assert axes.lines[1].get_marker() == "o"


def test_a_few_rollouts_are_shown_as_text(tmp_path: Path) -> None:
    [first] = [record for record in records(tmp_path) if record.kind == "ppo"]
    columns = ["iteration", "prompt", "reply", "reward", "used", "judge", "length"]
    rows = [[0, HOSTILE, "fine", -1.25, "yes", "failed", None], [3, "how?", HOSTILE, None, "no: no reward", 0.5, 2.0]]
    kept = first.metrics_path.with_name("rollouts.json")
    kept.write_text(json.dumps({"columns": columns, "rows": rows}))
    path = tmp_path / "report.html"
    write_report(path, lifecycle(), [first], [], "")
    page = Page(path.read_text(encoding="utf-8"))
    assert "Rollouts that policies learned from" in page.text
    assert page.text.count(HOSTILE) == 2
    assert "script" not in {name for name, _ in page.elements}
    for shown in (*columns, "-1.250", "failed", "+2.000", "no: no reward"):
        assert shown in page.text
    assert "None" not in page.text
    kept.write_text("torn {")
    write_report(path, lifecycle(), [first], [], "")
    assert "Rollouts that policies learned from" not in path.read_text(encoding="utf-8")


def test_curves_are_kept_until_the_metrics_change(tmp_path: Path) -> None:
    [first] = [record for record in records(tmp_path) if record.kind == "sft"]
    path = tmp_path / "report.html"
    write_report(path, lifecycle(), [first], [sample()], "")
    kept = first.metrics_path.with_suffix(".svg")
    before = kept.stat().st_mtime_ns
    write_report(path, lifecycle(), [first], [sample()], "")
    assert kept.stat().st_mtime_ns == before
    with first.metrics_path.open("a") as file:
        file.write('{"step": 900, "metrics": {"sft/loss": 0.5}}\n')
    os.utime(first.metrics_path, ns=(before + 10**9, before + 10**9))
    write_report(path, lifecycle(), [first], [sample()], "")
    assert kept.stat().st_mtime_ns != before


def test_a_sheet_has_the_panels_three_in_a_row() -> None:
    series = {f"group{n}/loss": [(0, 2.0), (1, 1.0)] for n in range(4)}
    panels = drawn_panels([(f"panel {n}", [f"group{n}/loss"]) for n in range(4)], series)
    assert panels_of("".join(panels)) == [panel.rstrip() for panel in panels]
    root = ElementTree.fromstring(sheet(panels))
    # A panel is 3.9 x 2.5 inches of 96 pixels.
    assert (root.get("width"), root.get("height")) == ("1123.2", "480")
    assert [(panel.get("x"), panel.get("y")) for panel in root] == [
        ("0", "0"),
        ("374.4", "0"),
        ("748.8", "0"),
        ("0", "240"),
    ]
    assert {(panel.get("width"), panel.get("height")) for panel in root} == {("280.8pt", "180pt")}


def test_the_report_shows_the_curves_that_the_stage_drew(tmp_path: Path) -> None:
    [first] = [record for record in records(tmp_path) if record.kind == "sft"]
    kept = first.metrics_path.with_suffix(".svg")
    kept.write_text("<svg>drawn by the stage</svg>")
    path = tmp_path / "report.html"
    assert set(write_report(path, lifecycle(), [first], [sample()], "")) == {path}
    assert "<svg>drawn by the stage</svg>" in path.read_text(encoding="utf-8")


def test_phases_are_stacked() -> None:
    # Step 1 has no sync: what comes above it starts at the bottom there.
    series = {"seconds/sync": [(0, 2.0)], "seconds/generate": [(0, 3.0), (1, 4.0)], "seconds/update": [(1, 0.5)]}
    figure = training_figure(PPO.panels, series)
    assert figure is not None
    [axes] = figure.axes
    bars = [[(b.get_x() + b.get_width() / 2, b.get_y(), b.get_height()) for b in c] for c in axes.containers]
    assert [[tuple(round(x, 9) for x in bar) for bar in group] for group in bars] == [
        [(0, 0, 2)],
        [(0, 2, 3), (1, 0, 4)],
        [(1, 4, 0.5)],
    ]


def test_nothing_recorded_is_no_figure() -> None:
    for kind in (PREPARE, SFT):
        assert training_figure(kind.panels, {"other/metric": [(0, 1.0)]}) is None


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "metrics": {"sft/loss": 2.0}}'
    cut = '{"step": 2, "metrics": {"sft/lo'
    odd = ["", "3", "null", "[]", '{"step": 4}', '{"metrics": {"sft/loss": 9.0}}', '{"step": 5, "metrics": [1]}', cut]
    path.write_text("\n".join([good, *odd, '{"step": 6, "metrics": {"sft/loss": 1.0, "sft/lr": 0.5}}', cut]))
    assert read_metrics(path) == {"sft/loss": [(1, 2.0), (6, 1.0)], "sft/lr": [(6, 0.5)]}
    assert read_metrics(tmp_path / "nowhere.jsonl") == {}


def test_the_report_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    html = write(tmp_path, curves=True)
    page = Page(html)
    fetching = {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "image",
        "video",
        "audio",
        "source",
    }
    assert fetching.isdisjoint(tag for tag, _ in page.elements)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            # References within the file alone: glyphs, clips, arrow heads.
            assert name not in ("src", "href", "srcset", "data"), (tag, name)
            if name == "xlink:href" or "url(" in (value or ""):
                assert re.search(r"(^|url\()#", value or ""), (tag, value)
    assert "@import" not in html
    # A figure's own heads, of XML and of SVG, have no place inside a page.
    assert "<?xml" not in html
    assert html.lower().count("<!doctype") == 1
    assert not re.search(r"url\((?!#)", html)
    # Written beside its place and moved there whole; curves are kept beside the metrics.
    assert {p.suffix for p in tmp_path.iterdir()} == {".html", ".jsonl", ".svg"}


def test_the_report_says_what_happened(tmp_path: Path) -> None:
    page = Page(write(tmp_path, config="seed: 3\n", curves=True))
    text = " ".join(page.text.split())
    assert "demo seed 3" in text
    ended = "completed in 62 s, 1 of 4 stages cached, which took 48 s to compute"
    assert f"{ended} · demo-policy version 4 @candidate · MLflow run run-1" in text
    assert "+0.100 → +0.250" in text
    assert "difference +0.150, 95% +0.050 to +0.250" in text
    assert "62.5%" in text
    assert "95% 55.0 to 70.0%, 64 held-out prompts" in text
    assert "-0.20 → +0.90" in text
    assert "how are you?" in text
    assert "seed: 3" in text
    for name, sha in SHAS.items():
        assert name in text
        assert sha in text
    assert "cached; computed in 48.0 s" in text
    # Beside the lineage a figure for each panel of a stage that has curves.
    assert [tag for tag, _ in page.elements].count("svg") == 1 + sum(map(len, PANELS.values()))
    assert [name for name in ("base", "somebody's", *PANELS) if f"{name} curves" in text] == list(PANELS)


@pytest.mark.parametrize(
    ("interval", "verdict"), [([0.1, 0.2], "good"), ([-0.2, -0.1], "bad"), ([-0.1, 0.2], ""), ([0.0, 0.2], "")]
)
def test_only_what_is_certain_is_coloured(tmp_path: Path, interval: list[float], verdict: str) -> None:
    page = Page(write(tmp_path, gold_delta_ci95=interval))
    classes = [a.get("class") for tag, a in page.elements if tag == "span" and "class" in a]
    # The win rate's interval is above one half; of reward and KL nothing is certain.
    assert classes == ["quiet", verdict, "good", "", ""]


def test_without_a_gold_score_there_is_none(tmp_path: Path) -> None:
    none = dict.fromkeys(("gold_before", "gold_after", "gold_delta", "gold_delta_ci95"))
    html = write(tmp_path, [sample(gold_before=None, gold_after=None)], judge="judges.0", **none)
    text = Page(html).text
    assert "gold score" not in text
    assert "None" not in text
    assert "win rate over the baseline (by judges.0)" in text


def test_results_without_a_judge_are_left_out(tmp_path: Path) -> None:
    null = ("win_rate", "win_rate_ci95", "judge", "reward_before", "reward_after", "gold_before", "gold_after")
    text = Page(write(tmp_path, [sample(**dict.fromkeys(null[3:]))], **dict.fromkeys(null))).text
    assert "KL to the baseline" in text
    assert "no judge: every source was trained against" in text
    assert not any(word in text for word in ("trained against, does not judge", "gold score", "None"))
    write_report(tmp_path / "bare.html", lifecycle() | {"evaluation": None, "registered": None}, [], [], "")
    text = Page((tmp_path / "bare.html").read_text(encoding="utf-8")).text
    assert not any(word in text for word in ("KL", "Replies", "None"))


@pytest.mark.parametrize("field", ["prompt", "before", "after"])
def test_text_of_a_model_stays_text(tmp_path: Path, field: str) -> None:
    page, plain = Page(write(tmp_path, [sample(**{field: HOSTILE})])), Page(write(tmp_path))
    # The reader sees exactly what the model wrote…
    assert page.text.count(HOSTILE) == 1
    # …and the browser nothing of it: not an element, not an attribute more.
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]


def test_text_of_a_config_stays_text(tmp_path: Path) -> None:
    page, plain = Page(write(tmp_path, config=f"source: '</pre>{HOSTILE}'\n")), Page(write(tmp_path))
    assert f"</pre>{HOSTILE}" in page.text
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]


def test_lineage_stands_in_order_and_apart() -> None:
    graph = lineage_graph(lifecycle()["stages"])
    place = {node["name"]: (node["x"], node["y"]) for node in graph["nodes"]}
    # Each below its parents; those of one layer beside each other.
    assert place["prepare"][1] == place["base"][1] < place["sft"][1] < place["ppo-1"][1]
    assert abs(place["base"][0] - place["prepare"][0]) > graph["node_width"]
    assert place["sft"][1] - place["base"][1] > graph["node_height"]
    assert [node["cached"] for node in graph["nodes"]] == [False, False, True, False]
    assert graph["nodes"][0]["sha"] == "a" * 12
    # prepare → sft, base → sft, prepare → ppo-1, sft → ppo-1: from a lower edge to an upper edge.
    assert len(graph["edges"]) == 4
    ends = [[float(x) for x in re.findall(r"-?[\d.]+", edge)] for edge in graph["edges"]]
    assert ends[1][:2] == [place["base"][0] + graph["node_width"] / 2, place["base"][1] + graph["node_height"]]
    assert ends[1][-2:] == [place["sft"][0] + graph["node_width"] / 2, place["sft"][1]]
    # The third passes the layer of sft outside of its box.
    [line] = graph["lines"]
    beside = float(re.findall(r"([-\d.]+),[-\d.]+ v46$", line)[0])
    assert ends[2][0] == beside
    assert not place["sft"][0] <= beside <= place["sft"][0] + graph["node_width"]
    # Everything is inside the picture.
    assert all(x + graph["node_width"] <= graph["width"] for x, _ in place.values())
    assert all(y + graph["node_height"] <= graph["height"] for _, y in place.values())


def test_boxes_of_a_wide_graph_do_not_overlap() -> None:
    shas = {name: f"{number:064x}" for number, name in enumerate(f"s{n}" for n in range(40))}
    stages = []
    for number, (name, sha) in enumerate(shas.items()):
        parents = [shas[f"s{p}"] for p in {number // 3, number // 5, number - 7} if 0 <= p < number]
        stages.append({"name": name, "checkpoint": {"sha256": sha}, "parents": parents, "cached": False})
    graph = lineage_graph(stages)
    rows: dict[float, list[float]] = {}
    for node in graph["nodes"]:
        rows.setdefault(node["y"], []).append(node["x"])
    for found in map(sorted, rows.values()):
        assert all(b - a >= graph["node_width"] for a, b in pairwise(found))


def test_every_curve_and_result_has_a_name_for_people() -> None:
    shown = {name for kind in KINDS.values() for _, names in kind.panels for name in names if "*" not in name}
    assert all(named(name) != name for name in shown)
    assert named("win_rate by gold") == "win rate by gold"
    assert named("gold_delta, evaluate") == "change of the gold score, evaluate"
    assert named("reward/source/gold/mean") == "reward source gold: mean"
    assert named("two words") == "two words"
    assert len(set(NAMES)) == len(NAMES)


def test_long_names_stay_in_their_boxes_and_apart() -> None:
    names = [f"a-stage-with-a-name-that-is-longer-than-its-box-{number}" for number in range(3)]
    stages = [stage("prepare", []) | {"name": name} for name in names]
    graph = lineage_graph(stages)
    shown = [node["name"] for node in graph["nodes"]]
    assert len(set(shown)) == 3
    # A letter of this size is 8 wide; there are 12 on either side.
    assert all(24 + 8 * len(name) <= graph["node_width"] for name in shown)
    assert [node["title"] for node in graph["nodes"]] == names


def test_a_parent_from_elsewhere_has_no_arrow() -> None:
    alone = {**stage("sft", ["base"]), "parents": ["f" * 64]}
    assert lineage_graph([alone])["edges"] == []
    assert lineage_graph([])["nodes"] == []

// Curves of a run, drawn by uPlot: axes, values under the pointer, zoom, smoothing, logarithm, another run beside it.
"use strict";

const curves = document.getElementById("curves");
if (curves) {
  const controls = document.getElementById("curve-controls"), address = new URLSearchParams(location.search);
  const HEIGHT = 210, POLL_MS = 3000, drawn = [];
  let own = null, beside = null;

  for (const name of ["smooth", "with"]) if (address.has(name) && controls.elements[name]) controls.elements[name].value = address.get(name);
  controls.elements.log.checked = address.has("log");

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (number) => style(`--curve-${(number % 4) + 1}`);
  const load = async (id) => {
    const reply = await fetch(`/runs/${encodeURIComponent(id)}/curves`);
    return reply.ok ? reply.json() : null;
  };
  // Exponential moving average, started without bias (as Adam's).
  const smoothed = (values, factor) => {
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = factor * mean + (1 - factor) * value;
      weight = factor * weight + (1 - factor);
      return mean / weight;
    });
  };
  const shown = (value) => (value == null ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? (+value.toPrecision(3)).toExponential() : +value.toPrecision(4) + "");
  // Steps are counted: there is none between two.
  const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  // A line that does not move has some room around it.
  const around = (low, high) => (low == null || (!low && !high) ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true));

  const lines = (stage, title, names) => {
    // The title has the unit already.
    const unit = title.match(/\((.+)\)$/)?.[1], named = (name) => stage.names[name].replace(`, ${unit}`, "");
    const found = names.map((name, number) => ({ label: names.length > 1 ? named(name) : "value", color: color(number), data: stage.series[name] }));
    const other = beside?.stages.find((one) => one.stage === stage.stage);
    names.forEach((name, number) => {
      if (other?.series[name]) found.push({ label: `${names.length > 1 ? named(name) + ", " : ""}${beside.run}`, color: color(number + (names.length > 1 ? 0 : 1)), dash: [6, 4], data: other.series[name] });
    });
    return found;
  };

  const draw = (box, stage, title, names) => {
    const factor = Number(controls.elements.smooth.value), series = [{ label: "step" }], data = [];
    const found = lines(stage, title, names);
    // Rollouts may have no value at a step that another line has: such steps are joined over.
    const steps = [...new Set(found.flatMap((line) => line.data[0]))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, number) => [step, number]));
    const log = controls.elements.log.checked && found.every((line) => line.data[1].every((v) => v === null || v > 0));
    for (const line of found) {
      const values = new Array(steps.length).fill(undefined), of = factor ? smoothed(line.data[1], factor) : line.data[1];
      const write = (numbers) => { const made = values.slice(); line.data[0].forEach((step, n) => { made[place.get(step)] = numbers[n]; }); return made; };
      const look = { label: line.label, stroke: line.color, width: 1.8, spanGaps: true, points: { show: steps.length < 25 }, value: (_, value) => shown(value) };
      if (line.dash) look.dash = line.dash;
      if (factor) { series.push({ ...look, label: `${line.label}, unsmoothed`, stroke: line.color + "55", width: 1, points: { show: false } }); data.push(write(line.data[1])); }
      series.push(look);
      data.push(write(of));
    }
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") }, font: "12px system-ui" };
    const options = {
      width: Math.max(box.clientWidth - 2, 200), height: HEIGHT, series,
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => around(low, high) } },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick))) }],
      cursor: { sync: { key: stage.stage }, drag: { x: true, y: false } }, legend: { live: true },
    };
    const plot = new uPlot(options, [steps, ...data], box);
    box.setAttribute("role", "figure");
    const first = found[0].data[1], of = `${shown(first[0])} to ${shown(first.at(-1))} at step ${found[0].data[0].at(-1)}`;
    box.setAttribute("aria-label", `${title}, ${stage.stage}: ${of}`);
    drawn.push({ plot, box });
  };

  const figure = (parent, stage, title, names) => {
    const box = document.createElement("div"), head = document.createElement("h4");
    box.className = "curve";
    head.textContent = title;
    box.append(head);
    parent.append(box);
    draw(box, stage, title, names);
  };

  const show = () => {
    const open = new Set([...curves.querySelectorAll("details[open]")].map((each) => each.dataset.stage));
    for (const { plot } of drawn.splice(0)) plot.destroy();
    curves.replaceChildren();
    for (const stage of own.stages) {
      const head = document.createElement("h3"), grid = document.createElement("div");
      head.textContent = stage.stage;
      grid.className = "curve-grid";
      curves.append(head, grid);
      for (const [title, names] of stage.panels) figure(grid, stage, title, names);
      if (stage.more.length) {
        const more = document.createElement("details"), summary = document.createElement("summary"), inside = document.createElement("div");
        summary.textContent = `${stage.more.length} more curves of ${stage.stage}`;
        more.dataset.stage = stage.stage;
        inside.className = "curve-grid";
        more.append(summary, inside);
        curves.append(more);
        more.addEventListener("toggle", () => { if (more.open && !inside.childElementCount) for (const [title, names] of stage.more) figure(inside, stage, title, names); });
        more.open = open.has(stage.stage);
      }
    }
    if (!own.stages.length) curves.textContent = "No stage has recorded a curve yet.";
  };

  const refresh = async () => {
    const id = controls.elements.with?.value;
    beside = id ? await load(id) : null;
    const words = new URLSearchParams();
    if (Number(controls.elements.smooth.value)) words.set("smooth", controls.elements.smooth.value);
    if (controls.elements.log.checked) words.set("log", "1");
    if (id) words.set("with", id);
    history.replaceState(null, "", words.size ? `?${words}` : location.pathname);
    show();
  };
  const poll = async () => {
    // A person who reads or zooms a curve keeps it as it is.
    const found = curves.matches(":hover") ? null : await load(curves.dataset.run);
    if (found && JSON.stringify(found) !== JSON.stringify(own)) { own = found; show(); }
    if (own?.live) setTimeout(poll, POLL_MS);
  };

  controls.addEventListener("input", refresh);
  controls.addEventListener("submit", (event) => event.preventDefault());
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => { for (const { plot, box } of drawn) plot.setSize({ width: Math.max(box.clientWidth - 2, 200), height: HEIGHT }); }, 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  load(curves.dataset.run).then((found) => { own = found ?? { stages: [] }; refresh(); if (own.live) setTimeout(poll, POLL_MS); });
}

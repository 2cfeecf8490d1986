"use strict";
// Draws the curves and the load of experts with plotly, as the reader chooses. plotly takes a text for markup: what
// comes from a run goes through `plain`.
// Shape suffixes: L MoE layers, E experts, S stretches of steps.

const page = JSON.parse(document.getElementById("run").textContent);
const form = document.getElementById("choices").elements;
const CONFIG = { responsive: true, displaylogo: false, doubleClick: false, modeBarButtons: [["toImage"]] };
const MANY_POINTS = 40; // beyond which points have no dots
const ROOM = 0.06; // above and below the values, in heights of a chart
const UNITS = { days: 86400, hours: 3600, minutes: 60, seconds: 1 };
const MARKS = {
  save: { symbol: "triangle-up", y: 0.03 }, warning: { symbol: "triangle-down", y: 0.97 },
  resume: { symbol: "line-ns", y: 0.5, dash: "dot" }, stop: { symbol: "line-ns", y: 0.5, dash: "solid" },
};
const percent = (share) => `${number(100 * share)} %`;
const FORMATS = { number, percent, memory: (bytes) => `${number(bytes / 1e9)} GB` };

function number(value) {
  if (value && Math.abs(value) < 0.001) return value.toExponential(2).replace(/\.?0+e/, "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

function whole(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

function stepRange(first, last) {
  return first >= last ? `step ${whole(last)}` : `steps ${whole(first)} – ${whole(last)}`;
}

function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
}

// ---- What the reader has chosen, kept in the page's address: a page that is loaded again, or sent, is as it was

const fields = [...form].filter((field) => field.name);
const valueOf = (field) => (field.type === "checkbox" ? String(field.checked) : field.value);
const defaults = fields.map(valueOf);
const address = new URLSearchParams(location.hash.slice(1));

function choose(name, value, byDefault) {
  if (value === byDefault) address.delete(name);
  else address.set(name, value);
  try {
    history.replaceState(history.state, "", `#${address}`);
  } catch {
    // a browser that limits how often this is done loses no more than the latest choice
  }
}

function fill(field, value) {
  if (field.type === "checkbox") field.checked = value === "true";
  else field.value = value;
}

for (const field of fields) if (address.has(field.name)) fill(field, address.get(field.name));
for (const details of document.querySelectorAll("details")) {
  const byDefault = details.open;
  if (address.has(details.id)) details.open = address.get(details.id) === "true";
  details.addEventListener("toggle", () => {
    choose(details.id, details.open, byDefault);
    if (details.open) details.querySelectorAll(".load").forEach(drawLoad);
  });
}

// ---- Curves

function isShown(run) {
  return form[`run${page.runs.indexOf(run)}`]?.checked ?? true;
}

// At each of `places`, in order, the height of the line through points in order that begin at (0, 0).
function heights(xs, ys, places) {
  let at = 0;
  return places.map((place) => {
    while (at < xs.length - 1 && xs[at] < place) at++;
    const [x, y] = at ? [xs[at - 1], ys[at - 1]] : [0, 0];
    return y + (ys[at] - y) * Math.min(1, (place - x) / (xs[at] - x || 1));
  });
}

// Steps of a run on another axis.
function placesOf(run, steps, axis) {
  return axis === "steps" || !run.positions.steps ? steps : heights(run.positions.steps, run.positions[axis], steps);
}

// The part of the horizontal axis that is shown, and the unit it is told in.
function shownPart() {
  const axis = form.x.value;
  const end = Math.max(1e-9, ...page.runs.filter(isShown).flatMap((run) => placesOf(run, [run.step], axis)));
  const isZoomed = form.from.value !== "" && Number(form.from.value) < end;
  const [from, to] = isZoomed ? [Number(form.from.value), Number(form.to.value)] : [0, end];
  const unit = axis === "seconds" ? Object.keys(UNITS).find((name) => end >= 2 * UNITS[name]) ?? axis : axis;
  return { axis, from, to, isZoomed, unit, size: UNITS[unit] ?? 1 };
}

function zoom(from, to) {
  [form.from.value, form.to.value] = [from, to];
  changed();
}

function movingMean(values, radius) {
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const [from, to] = [Math.max(0, i - radius), Math.min(values.length, i + radius + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

// The lines of a chart, of each run that is shown. A run's colour is its own; where there is one run, its second line
// has another.
function linesOf(chart, { axis, size }) {
  const isOne = page.runs.length === 1;
  const scaled = (values) => (chart.format === "memory" ? values?.map((value) => value * 1e6) : values);
  return page.runs.flatMap((run, at) =>
    chart.series.filter(({ name }) => run.curves[name] && isShown(run)).map(({ name, label, smooth }, place) => {
      const { steps, ...curve } = run.curves[name];
      const [mean, low, high] = [curve.mean, curve.low, curve.high].map(scaled);
      const radius = smooth ? Math.floor((mean.length * form.smooth.value) / 200) : 0;
      const color = colour(`hue-${isOne ? place : at}`);
      const line = { color, width: 1.8, dash: isOne || !place ? "solid" : "dash" };
      const x = placesOf(run, steps, axis).map((place) => place / size);
      return { run, name, label, line, radius, steps, x, mean, low, high };
    }),
  );
}

function tracesOf({ line, radius, x, mean, low, high }) {
  const quiet = { x, mode: "lines", hoverinfo: "skip" };
  const edge = { ...quiet, line: { ...line, width: 0 } };
  const fillcolor = line.color.replace("rgb", "rgba").replace(")", ", 0.17)");
  const isBand = low && page.runs.length === 1;
  const band = isBand ? [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor }] : [];
  const faint = radius ? [{ ...quiet, y: mean, opacity: 0.4, line: { ...line, width: 1 } }] : [];
  const dots = { mode: x.length > MANY_POINTS ? "lines" : "lines+markers", marker: { size: 5 }, cliponaxis: false };
  return [...band, ...faint, { ...dots, x, y: movingMean(mean, radius), line, hoverinfo: "none" }];
}

// What happened in a run: triangles below and above, and lines.
function marksOf(run, { axis, size }) {
  const own = page.runs.length > 1 && colour(`hue-${page.runs.indexOf(run)}`);
  const marks = Object.entries(run.marks).flatMap(([kind, at]) => {
    const x = placesOf(run, at.map(([step]) => step), axis);
    const color = own || colour(kind === "warning" ? "bad" : "quiet");
    const lines = at.map(([, text]) => plain(text).replace(/(.{70}\S*) /g, "$1<br>"));
    return lines.map((text, i) => ({ ...MARKS[kind], color, text, x: x[i] / size }));
  });
  const all = (name) => marks.map((mark) => mark[name]);
  const trace = {
    x: all("x"), y: all("y"), yaxis: "y2", mode: "markers", cliponaxis: false, text: all("text"),
    marker: { symbol: all("symbol"), color: all("color"), size: 8 }, hovertemplate: "%{text}<extra></extra>",
  };
  const lines = marks.filter(({ dash }) => dash).map(({ x, color, dash }) => (
    { type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color, width: 1.3, dash } }
  ));
  return { trace, lines };
}

// Of the vertical axis: from the lowest to the highest value that is shown, and what the chart must reach.
function rangeOf(chart, lines, { from, to, size }, isLog) {
  const isIn = (place) => place * size >= from && place * size <= to;
  const inside = lines.flatMap(({ x, mean, low, high }) => {
    const all = chart.reaches_all && low ? [mean, low, high] : [mean];
    return all.flatMap((values) => values.filter((_, i) => isIn(x[i])));
  });
  const reached = chart.reaches_all ? chart.references.map(([value]) => value) : [];
  const values = [...inside, ...chart.include, ...reached];
  const known = isLog ? values.filter((value) => value > 0).map(Math.log10) : values;
  const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  const room = ROOM * (high - low) || ROOM * Math.abs(low) || 1;
  return [!isLog && chart.include.includes(low) ? low : low - room, high + room];
}

function drawChart(card, chart, shown, marks) {
  const [plot, note, readout] = [".plot", ".note", ".readout"].map((name) => card.querySelector(name));
  const [lines, isLog, isMemory] = [linesOf(chart, shown), form.log.checked, chart.format === "memory"];
  const evaluations = lines.filter(({ name, run }) => name === "eval_loss" && run.best);
  const best = evaluations.map(({ run, line: { color } }) => ({
    x: placesOf(run, [run.best[0]], shown.axis).map((place) => place / shown.size), y: [run.best[1]], mode: "markers",
    marker: { symbol: "circle-open", size: 12, color, line: { width: 1.8 } }, cliponaxis: false,
    hovertemplate: `best: ${number(run.best[1])} at step ${whole(run.best[0])}<extra></extra>`,
  }));
  const range = rangeOf(chart, lines, shown, isLog);
  const references = chart.references.map(([y, text]) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("quiet"), width: 1, dash: "dash" },
    label: { text: plain(text), textposition: "end", yanchor: y > (range[0] + range[1]) / 2 ? "top" : "bottom" },
  }));
  const traces = [...marks.map(({ trace }) => trace), ...lines.flatMap(tracesOf), ...best];
  const xaxis = {
    ...axis(), title: { text: shown.unit, standoff: 4, font: { size: 11.5 } },
    range: [shown.from / shown.size, shown.to / shown.size],
    dtick: shown.axis === "steps" && shown.to - shown.from < 5 ? 1 : undefined,
    showspikes: true, spikemode: "across", spikedash: "solid", spikethickness: 1,
  };
  const yaxis = {
    ...axis(), fixedrange: true, type: isLog ? "log" : "linear", range, ticksuffix: isMemory ? "B" : "",
    exponentformat: range[1] < (isLog ? -2 : 0.01) ? "e" : "SI",
    tickformat: { percent: ".3~p", memory: ".3~s" }[chart.format],
  };
  const yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
  const shapes = [...references, ...marks.flatMap((mark) => mark.lines)];
  Plotly.react(plot, traces, layout({ hovermode: "x", dragmode: "zoom", shapes, xaxis, yaxis, yaxis2 }), CONFIG);
  const widest = Math.max(0, ...lines.map(({ radius }) => radius));
  const dashed = page.runs.length > 1 && chart.series.length > 1 ? `dashed: ${chart.series[1].label}` : "";
  const bold = widest ? `bold: mean of ${2 * widest + 1} points` : "";
  note.textContent = [note.dataset.note, dashed, bold].filter(Boolean).join("; ");
  // the values at a place, or the last ones that are shown
  card.tell = (place = shown.to / shown.size) => {
    const points = lines.map(({ x }) => Math.max(0, x.findLastIndex((each) => each <= place)));
    const lead = lines[0]?.steps[points[0]];
    const told = lines.map(({ label, line, mean, low, high, steps }, i) => {
      const [value, least, most] = [mean, low, high].map((all) => all && FORMATS[chart.format](all[points[i]]));
      const spread = least !== most && page.runs.length === 1 ? ` (${least} – ${most})` : "";
      const name = page.runs.length > 1 ? `■\u00a0${label}` : label;
      const step = steps[points[i]] === lead ? "" : ` at step ${whole(steps[points[i]])}`;
      const span = document.createElement("span");
      span.textContent = ` · ${name} ${value}${spread}${step}`;
      span.style.color = line.color;
      return span;
    });
    readout.replaceChildren(told.length ? `step ${whole(lead)}` : "no value", ...told);
  };
  card.tell();
  const end = (change, at) => change[`xaxis.range[${at}]`] * shownPart().size;
  listen(plot, {
    plotly_relayout: (change) => "xaxis.range[0]" in change && zoom(end(change, 0), end(change, 1)),
    plotly_doubleclick: () => zoom("", ""),
    plotly_hover: ({ xvals }) => follow(plot, xvals[0]),
    plotly_unhover: () => follow(plot),
  });
}

// All charts tell their values at the place under the pointer, and those in sight show it.
function follow(plot, place) {
  for (const card of document.querySelectorAll(".curves")) {
    card.tell(place);
    const [other, { top, bottom }] = [card.querySelector(".plot"), card.getBoundingClientRect()];
    if (other === plot || bottom < 0 || top > innerHeight) continue;
    if (place === undefined) Plotly.Fx.unhover(other);
    else Plotly.Fx.hover(other, { xval: place }, "xy", true);
  }
}

// ---- Load of experts, relative to an even one, as powers of two

// How far the colours go, for the whole run, so that pictures of different steps can be compared.
function boundOf(load) {
  const powers = load.flat(2).filter((cell) => cell > 0).map((cell) => Math.abs(Math.log2(cell / 100)));
  const far = powers.sort((a, b) => a - b)[Math.floor(powers.length * 0.98)] ?? 1;
  return Math.min(3, Math.max(1, Math.ceil(far)));
}

function drawLoad(card) {
  const at = card.dataset.run;
  const { load, entropy, first_steps: first, last_steps: last } = page.runs[at].load;
  const [slider, [grid, time]] = [form[`load${at}`], card.querySelectorAll(".plot")];
  const distances = last.map((step) => Math.abs(step - slider.value));
  const place = distances.indexOf(Math.min(...distances));
  const cells_LE = load[place];
  const [layers, experts, bound] = [cells_LE.length, cells_LE[0].length, boundOf(load)];
  const shade = (cell) => (cell > 0 ? Math.log2(cell / 100) : -bound);
  const powers = Array.from({ length: 2 * bound + 1 }, (_, i) => i - bound);
  const map = {
    type: "heatmap", zmin: -bound, zmax: bound, xgap: experts > 40 ? 0 : 1, ygap: 1,
    colorscale: ["low", "even", "high"].map((name, i) => [i / 2, colour(name)]),
    colorbar: {
      orientation: "h", y: 0, yanchor: "top", thickness: 10, len: 0.7, outlinewidth: 0,
      tickvals: powers, ticktext: powers.map((power) => (power ? `${number(2 ** power)}×` : "even")),
    },
  };
  const still = { ...axis(), fixedrange: true, showgrid: false, zeroline: false };
  const yaxis = { ...still, autorange: "reversed", tickprefix: "layer ", dtick: layers > 24 ? 4 : 1 };
  const margin = { l: 58, t: 26, b: 40 };
  grid.style.height = time.style.height = `${110 + layers * (layers <= 12 ? 24 : layers <= 40 ? 17 : 13)}px`;

  const annotations = cells_LE.map((cells_E, layer) => {
    const [most, without] = [Math.max(...cells_E) / 100, cells_E.filter((cell) => cell === 0).length];
    const text = `${most.toFixed(2)}×  ${without}  ${entropy[place][layer]?.toFixed(2) ?? ""}`;
    return { text, x: 1, xref: "paper", xanchor: "left", y: layer, showarrow: false, font: { color: colour("text") } };
  });
  const ofLayer = {
    ...map, z: cells_LE.map((cells_E) => cells_E.map(shade)),
    text: cells_LE.map((cells_E) => cells_E.map((cell) => (cell ? "" : "×"))),
    texttemplate: "%{text}", textfont: { color: colour("mark") },
    customdata: cells_LE.map((cells_E) => cells_E.map((cell) => [cell / 100, cell / 100 / experts])),
    hovertemplate: "%{y}, expert %{x}: %{customdata[0]:.4~r} × even, %{customdata[1]:.3~p} of its tokens<extra></extra>",
  };
  const shownGrid = layout({ margin: { ...margin, r: 104 }, xaxis: { ...still, side: "top" }, yaxis, annotations });
  Plotly.react(grid, [ofLayer], shownGrid, CONFIG);

  const busiest_LS = cells_LE.map((_, layer) => load.map((cells) => Math.max(...cells[layer])));
  const overTime = {
    ...map, showscale: false, z: busiest_LS.map((cells_S) => cells_S.map(shade)),
    customdata: busiest_LS.map((cells_S, layer) =>
      cells_S.map((cell, i) => [load[i][layer].indexOf(cell), cell / 100, stepRange(first[i], last[i])]),
    ),
    hovertemplate: "%{customdata[2]}, %{y}: expert %{customdata[0]}, %{customdata[1]:.4~r} × even<extra></extra>",
  };
  const ends = [first[0], last.at(-1)].map((step) => `step ${whole(step)}`);
  const xaxis = { ...still, side: "top", tickvals: [0, last.length - 1], ticktext: ends };
  const line = { width: 1.5, color: colour("text") };
  const shapes = [{ type: "rect", x0: place - 0.5, x1: place + 0.5, yref: "paper", y0: 0, y1: 1, line }];
  Plotly.react(time, [overTime], layout({ margin: { ...margin, r: 32 }, xaxis, yaxis, shapes }), CONFIG);

  card.querySelector(".when").textContent = stepRange(first[place], last[place]);
  const move = (to) => (fill(slider, last[to]), changed(slider));
  listen(time, { plotly_click: ({ points }) => move(points[0].pointIndex[1]) });
  card.querySelector(".play").onclick = ({ target: button }) => {
    const step = (to) => {
      if (to === last.length) button.textContent = "Play";
      if (button.textContent === "Play") return;
      move(to);
      setTimeout(step, Math.max(120, 6000 / last.length), to + 1);
    };
    button.textContent = button.textContent === "Play" ? "Pause" : "Play";
    step(place === last.length - 1 ? 0 : place + 1);
  };
}

// ---- The page

let colours = {};
const probe = document.body.appendChild(document.createElement("i"));

// A colour of page.css, as the reader's system has it.
function colour(name) {
  probe.style.color = `var(--${name})`;
  return (colours[name] ??= getComputedStyle(probe).color);
}

function axis() {
  return { gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("line") };
}

function layout(own) {
  const [card, line, quiet, text] = ["card", "line", "quiet", "text"].map(colour);
  return {
    autosize: true, showlegend: false, paper_bgcolor: "#0000", plot_bgcolor: "#0000",
    margin: { l: 52, r: 14, t: 8, b: 38 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 11.5, color: quiet },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text, size: 12 } },
    modebar: { color: quiet, activecolor: text, bgcolor: "#0000" }, ...own,
  };
}

// Once for each plot, however often it is drawn.
function listen(plot, listeners) {
  for (const [event, listener] of Object.entries(listeners)) {
    plot.removeAllListeners(event);
    plot.on(event, listener);
  }
}

function drawAll() {
  colours = {};
  const shown = shownPart();
  document.getElementById("reset").disabled = !shown.isZoomed;
  const marks = page.runs.filter((run) => form.marks.checked && isShown(run)).map((run) => marksOf(run, shown));
  document.querySelectorAll(".curves").forEach((card, at) => drawChart(card, page.charts[at], shown, marks));
  [...document.querySelectorAll(".load")].filter((card) => card.clientWidth > 0).forEach(drawLoad);
}

// Called when a field has changed; without one, when several have.
function changed(field) {
  fields.forEach((each, i) => choose(each.name, valueOf(each), defaults[i]));
  if (field?.name.startsWith("load")) drawLoad(field.closest(".load"));
  else if (field?.name !== "live") drawAll();
}

// While a run goes on, this file is written again and again, and the page loads it anew: not while a hand is on it. A
// run that was killed says nothing more: all there is to go by is how long ago it wrote.
function refresh() {
  for (const badge of document.querySelectorAll(".badge.running")) {
    const minutes = Math.floor((Date.now() - Date.parse(badge.dataset.written)) / 60000);
    if (minutes >= 5) badge.append(`, silent for ${whole(minutes)} min`);
    badge.classList.toggle("stopped", minutes >= 5);
  }
  let isHeld = false;
  for (const event of ["pointerdown", "pointerup", "pointercancel"]) {
    addEventListener(event, () => (isHeld = event === "pointerdown"), true);
  }
  const again = () => {
    if (!isHeld && !document.hidden && form.live.checked) location.reload();
    else setTimeout(again, 1000);
  };
  setTimeout(again, 1000 * page.refresh_seconds);
}

let axisBefore = form.x.value;
document.addEventListener("input", ({ target }) => {
  if (target === form.x && form.from.value !== "") {
    // what was shown stays shown, by the first run's positions
    const run = page.runs.find(isShown) ?? page.runs[0];
    const ends = [form.from, form.to].map((field) => Number(field.value));
    const steps = axisBefore === "steps" ? ends : heights(run.positions[axisBefore], run.positions.steps, ends);
    [form.from.value, form.to.value] = placesOf(run, steps, target.value);
  }
  axisBefore = form.x.value;
  changed(target);
});
document.getElementById("reset").addEventListener("click", () => zoom("", ""));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
if (page.refresh_seconds) refresh();

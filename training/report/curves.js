// ---- Curves

const FORMATS = { number, percent, memory };
const AXES = { step: "steps", tokens: "tokens", epoch: "epochs", time: "seconds" }; // the positions that each shows
const SMOOTH = 4; // percent of a curve's points that its mean is taken over, unless something else is chosen
const MANY_POINTS = 40; // beyond which points have no dots

const followers = []; // charts that show the place under the pointer, wherever it is; null: the last one

function follow(x) {
  for (const follower of followers) follower(x);
}

function isShown(run) {
  return !(chosen.get("hide") ?? "").split(",").includes(String(runs.indexOf(run)));
}

// The axes that all runs have positions for.
function knownAxes() {
  const isKnown = (name) => runs.every((run) => run.positions[name]?.length && !run.positions[name].includes(null));
  return Object.keys(AXES).filter((axis) => axis === "step" || isKnown(AXES[axis]));
}

function axis() {
  return knownAxes().includes(chosen.get("x")) ? chosen.get("x") : "step";
}

// `y` at `x` of the line through points that begin at (0, 0).
function interpolated(xs, ys, x) {
  const after = xs.findIndex((each) => each >= x);
  if (after === -1) return ys.at(-1) ?? 0;
  const [x0, y0] = after === 0 ? [0, 0] : [xs[after - 1], ys[after - 1]];
  return xs[after] === x0 ? ys[after] : y0 + ((ys[after] - y0) * (x - x0)) / (xs[after] - x0);
}

function placeOf(run, step, along) {
  return along === "step" ? step : interpolated(run.positions.steps, run.positions[AXES[along]], step);
}

function placesOf(run, steps, along) {
  if (along === "step") return steps;
  // both are in order: one pass over the positions is enough
  const [xs, ys] = [[0, ...run.positions.steps], [0, ...run.positions[AXES[along]]]];
  let at = 1;
  return steps.map((step) => {
    while (at < xs.length - 1 && xs[at] < step) at++;
    const share = Math.min(1, (step - xs[at - 1]) / (xs[at] - xs[at - 1] || 1));
    return ys[at - 1] + (ys[at] - ys[at - 1]) * share;
  });
}

// How an axis is named, and its values are told: of the time, in a unit that fits `end`.
function scaleOf(along, end) {
  const units = [[172800, 86400, "days"], [5400, 3600, "hours"], [180, 60, "minutes"], [0, 1, "seconds"]];
  const [, size, name] = along === "time" ? units.find(([least]) => end >= least) : [0, 1, along];
  const titles = { step: "step", tokens: "tokens", epoch: "epochs" };
  const told = { step: whole, tokens: large, epoch: number, time: (value) => `${number(value / size)} ${name}` };
  const ticked = { ...told, time: (value) => number(value / size) };
  return { size, title: titles[along] ?? `wall time, ${name}`, told: told[along], ticked: ticked[along] };
}

// The part of the horizontal axis that is shown.
function shownPart() {
  const along = axis();
  const ends = runs.filter(isShown).map((run) => placeOf(run, run.step, along));
  const end = Math.max(...ends, along === "step" ? 1 : 1e-9);
  const [from, to] = [chosenNumber("from"), chosenNumber("to")];
  const isZoomed = from !== null && to !== null && to > from && from < end;
  return { along, from: isZoomed ? from : 0, to: isZoomed ? to : end, isZoomed, scale: scaleOf(along, end) };
}

function zoom(from, to) {
  choose("from", from === null ? null : Number(from.toPrecision(7)));
  choose("to", to === null ? null : Number(to.toPrecision(7)));
}

function movingMean(values, radius) {
  if (radius === 0) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const [from, to] = [Math.max(0, i - radius), Math.min(values.length, i + radius + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

function drawDot(parent, className, x, y, radius) {
  drawn(parent, "circle", `dot ${className}`, { cx: x, cy: y, r: radius });
}

// The lines of a chart: for each run that is shown the curves it has, as the axis and the smoothing are chosen.
// A run's colour is its own; where there is one run, a chart's second line has another.
function linesOf(chart, along) {
  const percentage = chosenNumber("smooth") ?? SMOOTH;
  return runs.flatMap((run, at) => {
    const series = isShown(run) ? (run.charts.find(({ title }) => title === chart.title)?.series ?? []) : [];
    return series.flatMap(({ name, label, smooth }, place) => {
      const curve = run.curves[name];
      if (curve === undefined) return [];
      const radius = smooth ? Math.floor((curve.mean.length * percentage) / 200) : 0;
      const hue = runs.length > 1 ? `hue-${at}` : `hue-${place}`;
      const kind = runs.length > 1 && place > 0 ? `${hue} dashed` : hue;
      const smoothed = movingMean(curve.mean, radius);
      return [{ ...curve, run, name, label, radius, kind, smoothed, places: placesOf(run, curve.steps, along) }];
    });
  });
}

// What happened at a step of a run: resumes and the end as lines, saves and warnings as triangles.
function marksOf(run, along) {
  const at = (steps, kind, text) => steps.map((step) => ({ x: placeOf(run, step, along), kind, text: text(step) }));
  const stop = run.state === "stopped" || run.stopped_early ? [run.step] : [];
  return [
    ...at(run.marks.saves, "save", (step) => `saved at step ${whole(step)}`),
    ...at(run.marks.resumes, "resume", (step) => `resumed after step ${whole(step)}`),
    ...at(stop, "stop", (step) => `stopped at step ${whole(step)}`),
    ...run.warnings.map(({ step, text }) => ({ x: placeOf(run, step, along), kind: "warning", text })),
  ];
}

function drawMark(parent, { kind, text }, x, top, bottom, className) {
  const mark = drawn(parent, "g", `mark ${kind} ${className}`, {});
  if (kind === "save") drawn(mark, "path", "", { d: `M${x},${bottom - 7} l4,7 h-8 z` });
  else if (kind === "warning") drawn(mark, "path", "", { d: `M${x},${top + 8} l4.5,-8 h-9 z` });
  else drawn(mark, "line", "", { x1: x, x2: x, y1: top, y2: bottom });
  drawn(mark, "title", "", {}, text);
}

// The vertical axis: what it must reach, its ticks, and where a value is. Values at or below 0 leave a logarithmic one.
function verticalAxis(values, include, isLog, top, bottom) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of [...values, ...include.filter((value) => !isLog || value > 0)]) {
    [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  if (low > high) [low, high] = [isLog ? 0.1 : 0, 1];
  if (isLog) {
    const room = Math.max((high / low) ** 0.06, 1.02);
    [low, high] = [low / room, high * room];
    const y = (value) => top + (Math.log(high / Math.min(Math.max(value, low), high)) / Math.log(high / low)) * (bottom - top);
    return { low, high, ticks: logTicks(low, high, 7), y };
  }
  if (high === low) {
    const size = Math.abs(low) || 1;
    [low, high] = include.includes(low) ? [low, low + size] : [low - size / 2, low + size / 2];
  }
  const room = (high - low) * 0.06;
  low -= include.includes(low) ? 0 : room;
  high += room;
  const y = (value) => top + ((high - Math.min(Math.max(value, low), high)) / (high - low)) * (bottom - top);
  return { low, high, ticks: niceTicks(low, high, 5), y };
}

// What is absent from a run is left out. Of a chart, `include` are values that the axis must reach, with `reaches_all`
// the references and all of the band too, which else spikes may leave; `references` are dashed lines, drawn where the
// axis reaches them.
function curveChart(chart) {
  const format = FORMATS[chart.format];
  const shown = picture("chart", chart.title);
  const [remark, readout] = [element("span", "quiet"), element("p", "readout quiet")];
  const card = element("div", "card", element("div", "title", element("h3", "", chart.title), remark), readout, shown);
  const [top, right, height] = [8, 12, 218];
  const bottom = height - 40;
  let [x, toPlace, lines, view, cursor, held] = [null, null, [], null, null, null];

  function draw() {
    view = shownPart();
    lines = linesOf(chart, view.along);
    shown.replaceChildren();
    readout.replaceChildren("no value");
    if (lines.length === 0) return;
    const isIn = (place) => place >= view.from && place <= view.to;
    const visible = lines.flatMap((line) => {
      const heights = chart.reaches_all && line.low ? [line.mean, line.low, line.high] : [line.mean];
      return heights.flatMap((values) => values.filter((_, i) => isIn(line.places[i])));
    });
    const isLog = chosen.get("log") === "yes" && visible.some((value) => value > 0);
    const include = chart.reaches_all ? chart.include.concat(chart.references.map(([value]) => value)) : chart.include;
    const { low, high, ticks, y } = verticalAxis(isLog ? visible.filter((v) => v > 0) : visible, include, isLog, top, bottom);
    const left = 14 + 6.8 * Math.max(...ticks.map((tick) => format(tick).length));
    const width = shown.clientWidth;
    const end = width - right;
    x = (place) => left + ((place - view.from) / (view.to - view.from)) * (end - left);
    toPlace = (pixel) => view.from + ((pixel - left) / (end - left)) * (view.to - view.from);

    for (const tick of ticks) {
      drawn(shown, "line", "grid", { x1: left, x2: end, y1: y(tick), y2: y(tick) });
      drawn(shown, "text", "", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, format(tick));
    }
    drawHorizontal(left, end, width);
    // pictures of their own cut off what is beyond the part that is shown; dots and marks may stand on its edge
    const inside = (margin) => {
      const [x, width] = [left - margin, end - left + 2 * margin];
      return drawn(shown, "svg", "", { x, y: 0, width, height, viewBox: `${x} 0 ${width} ${height}` });
    };
    const [area, plot] = [inside(0), inside(9)];
    if (chosen.get("marks") !== "no") drawMarks(plot, y);
    for (const [value, label] of chart.references.filter(([value]) => value >= low && value <= high)) {
      drawn(shown, "line", "reference", { x1: left, x2: end, y1: y(value), y2: y(value) });
      drawn(shown, "text", "", { x: end, y: y(value) + (y(value) < 24 ? 13 : -5), "text-anchor": "end" }, label);
    }
    for (const line of lines) drawLine(area, plot, line, y);
    cursor = drawn(plot, "g", "", {});
    cursor.y = y;
    const smoothing = Math.max(...lines.map((line) => line.radius));
    const dashed = runs.length > 1 && chart.series.length > 1 ? `dashed: ${chart.series[1].label}` : "";
    const words = [chart.note, dashed, smoothing ? `bold: mean of ${2 * smoothing + 1} points` : "", isLog ? "log scale" : ""];
    remark.textContent = words.filter(Boolean).join("; ");
    show(null);
  }

  function drawHorizontal(left, end, width) {
    const { scale, from, to, along } = view;
    const ticks = niceTicks(from / scale.size, to / scale.size, width > 420 ? 6 : 4).map((tick) => tick * scale.size);
    for (const tick of along === "step" ? ticks.filter((tick) => Number.isInteger(tick)) : ticks) {
      const text = scale.ticked(tick);
      const at = Math.min(Math.max(x(tick), left), width - 2 - 3.4 * text.length);
      drawn(shown, "text", "", { x: at, y: bottom + 16, "text-anchor": "middle" }, text);
    }
    drawn(shown, "text", "axis", { x: (left + end) / 2, y: height - 6, "text-anchor": "middle" }, scale.title);
  }

  function drawMarks(plot, y) {
    runs.filter(isShown).forEach((run) => {
      const hue = runs.length > 1 ? `hue-${runs.indexOf(run)}` : "";
      const marks = marksOf(run, view.along).filter((mark) => mark.x >= view.from && mark.x <= view.to);
      for (const mark of marks) drawMark(plot, mark, x(mark.x), top, bottom, hue);
    });
    for (const line of lines.filter((line) => line.name === "eval_loss" && line.run.summary.best_eval_loss !== null)) {
      const { best_eval_loss: value, best_eval_step: step } = line.run.summary;
      const at = { cx: x(placeOf(line.run, step, view.along)), cy: y(value), r: 6 };
      drawn(drawn(plot, "circle", `best ${line.kind}`, at), "title", "", {}, `best: ${format(value)} at step ${whole(step)}`);
    }
  }

  function drawLine(area, plot, line, y) {
    const path = (heights) => heights.map((value, i) => `${x(line.places[i]).toFixed(1)},${y(value).toFixed(1)}`);
    if (line.low && runs.length === 1) {
      const outline = [...path(line.high), ...path(line.low).reverse()];
      drawn(area, "polygon", `band ${line.kind}`, { points: outline.join(" ") });
    }
    if (line.radius) drawn(area, "polyline", `curve faint ${line.kind}`, { points: path(line.mean).join(" ") });
    drawn(area, "polyline", `curve ${line.kind}`, { points: path(line.smoothed).join(" ") });
    const inside = [...line.places.keys()].filter((i) => line.places[i] >= view.from && line.places[i] <= view.to);
    if (inside.length > MANY_POINTS) return;
    for (const i of inside) drawDot(plot, line.kind, x(line.places[i]), y(line.mean[i]), 2.6);
  }

  // The values at a place, or the last ones that are shown.
  function show(place) {
    if (lines.length === 0) return;
    cursor.replaceChildren();
    const points = lines.map((line) => nearest(line.places, place ?? view.to));
    const lead = lines[0].steps[points[0]];
    const at = lines[0].places[points[0]];
    if (place !== null) drawn(cursor, "line", "cursor", { x1: x(at), x2: x(at), y1: top, y2: bottom });
    const before = points[0] > 0 ? lines[0].steps[points[0] - 1] : 0;
    const where = view.along === "step" ? "" : `, ${view.scale.told(at)}`;
    readout.replaceChildren((lines[0].per_point > 1 ? stepRange(before + 1, lead) : stepRange(lead, lead)) + where);
    lines.forEach((line, i) => {
      const point = points[i];
      if (place !== null) drawDot(cursor, line.kind, x(line.places[point]), cursor.y(line.mean[point]), 4);
      const spread = runs.length === 1 && line.low && line.low[point] < line.high[point];
      const range = spread ? ` (${format(line.low[point])} – ${format(line.high[point])})` : "";
      const step = line.steps[point] === lead ? "" : ` at step ${whole(line.steps[point])}`;
      const name = runs.length > 1 ? `■\u00a0${line.label}` : line.label; // which run is told by the legend's colours
      readout.append(" · ", element("span", line.kind, `${name} ${format(line.mean[point])}`.trim() + range + step));
    });
  }

  shown.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || lines.length === 0) return;
    held = event.offsetX;
    shown.setPointerCapture(event.pointerId);
  });
  shown.addEventListener("pointermove", (event) => {
    if (lines.length === 0) return;
    follow(toPlace(event.offsetX));
    if (held === null || Math.abs(event.offsetX - held) < 8) return;
    const from = Math.min(held, event.offsetX);
    drawn(cursor, "rect", "zoom", { x: from, y: top, width: Math.abs(event.offsetX - held), height: bottom - top });
  });
  shown.addEventListener("pointerup", (event) => {
    const ends = held === null ? [0, 0] : [held, event.offsetX].sort((a, b) => a - b);
    held = null;
    if (ends[1] - ends[0] >= 8) zoom(...ends.map((pixel) => Math.min(Math.max(toPlace(pixel), view.from), view.to)));
  });
  shown.addEventListener("pointercancel", () => (held = null));
  shown.addEventListener("dblclick", () => zoom(null, null));
  shown.addEventListener("pointerleave", () => held === null && follow(null));
  followers.push(show);
  drawing(shown, draw);
  return card;
}

// A button that is pressed or not.
function toggle(text, isOn, press) {
  const made = element("button", "toggle", text);
  const tell = () => made.setAttribute("aria-pressed", isOn());
  made.addEventListener("click", press);
  watchers.push(tell);
  tell();
  return made;
}

function switchAxis(next) {
  const { along, from, to, isZoomed } = shownPart();
  choose("x", next === "step" ? null : next);
  if (!isZoomed) return;
  // what was shown stays shown, by the first run's positions
  const run = runs.find(isShown) ?? runs[0];
  const step = (place) => (along === "step" ? place : interpolated(run.positions[AXES[along]], run.positions.steps, place));
  zoom(placeOf(run, step(from), next), placeOf(run, step(to), next));
}

function curveControls() {
  const axes = knownAxes().map((name) => toggle(name, () => axis() === name, () => switchAxis(name)));
  const smoothing = slider(51, "smoothing, percent of the points", (value) => choose("smooth", value));
  smoothing.value = chosenNumber("smooth") ?? SMOOTH;
  const isOn = (name) => chosen.get(name) === "yes";
  const reset = element("button", "", "Reset zoom");
  const tell = () => (reset.disabled = !shownPart().isZoomed);
  reset.addEventListener("click", () => zoom(null, null));
  watchers.push(tell);
  tell();
  return element(
    "div",
    "card controls",
    element("div", "group", element("span", "quiet", "x"), ...axes),
    toggle("log scale", () => isOn("log"), () => choose("log", isOn("log") ? null : "yes")),
    toggle("marks", () => chosen.get("marks") !== "no", () => choose("marks", chosen.get("marks") === "no" ? null : "no")),
    element("label", "group", element("span", "quiet", "smoothing"), smoothing),
    element("div", "group", reset, element("span", "quiet", "drag over a chart to zoom, double-click to reset")),
  );
}

// The runs by their colours, each to be hidden and shown; and what the marks are, those that there are.
function curveLegend() {
  const made = element("div", "legend");
  if (runs.length > 1) {
    const hide = (at) => {
      const hidden = new Set((chosen.get("hide") ?? "").split(",").filter(Boolean));
      if (!hidden.delete(String(at))) hidden.add(String(at));
      choose("hide", hidden.size ? [...hidden].join(",") : null);
    };
    runs.forEach((run, at) => {
      const button = toggle("", () => isShown(run), () => hide(at));
      button.append(element("span", `swatch hue-${at}`), run.label);
      made.append(button);
    });
  }
  const names = { save: "checkpoint saved", resume: "resumed", stop: "stopped", warning: "warning" };
  const kinds = new Set(runs.flatMap((run) => marksOf(run, "step")).map(({ kind }) => kind));
  const key = (name, draw) => {
    const shown = picture("mark-key", name);
    draw(shown);
    made.append(element("span", "key quiet", shown, name));
  };
  for (const [kind, name] of Object.entries(names)) {
    if (kinds.has(kind)) key(name, (shown) => drawMark(shown, { kind, text: name }, 8, 2, 15, ""));
  }
  if (runs.some((run) => run.summary.best_eval_loss !== null)) {
    key("best evaluation", (shown) => drawn(shown, "circle", "best hue-1", { cx: 8, cy: 8, r: 6 }));
  }
  return made.childElementCount ? made : null;
}

function curves() {
  // charts of all runs, in the order of the first run that has each
  const charts = new Map();
  for (const chart of runs.flatMap((run) => run.charts)) if (!charts.has(chart.title)) charts.set(chart.title, chart);
  if (charts.size === 0) return null;
  const perPoint = Math.max(...runs.flatMap((run) => Object.values(run.curves).map((curve) => curve.per_point)));
  const cards = element("div", "charts", ...[...charts.values()].map(curveChart));
  const points = `A point is the mean of up to ${whole(perPoint)} logged steps; the band is their lowest to highest.`;
  watchers.push(drawAll);
  return section(
    "Curves", curveControls(), curveLegend(), cards, perPoint > 1 ? element("p", "remark quiet", points) : null,
  );
}

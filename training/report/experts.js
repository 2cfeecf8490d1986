// ---- Expert load

const SCALE_WIDTH = 340; // pixels, where the card has as many
const HEAD = 24; // height of a map's head, where experts or steps stand
const LABELS = 58; // width of the names of the layers
const COLUMNS = { "max/mean": 72, "no token": 136, entropy: 200 }; // right edges of a layer's figures, beside the grid

// The colours of the page as it is now, light or dark. `load` gives that of a load, relative to an even one: from blue
// over neutral (even) to orange, which the colour-blind tell apart, on a logarithmic scale from 1/bound to bound.
function mapColours(bound) {
  const style = getComputedStyle(document.documentElement);
  const names = ["text", "quiet", "bad", "low", "even", "high", "mark"];
  const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const [low, even, high] = [colours.low, colours.even, colours.high].map(channels);
  colours.load = (ratio) => {
    const place = Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(bound)));
    const end = place < 0 ? low : high;
    return `rgb(${even.map((value, i) => Math.round(value + (end[i] - value) * Math.abs(place))).join(",")})`;
  };
  return colours;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// How far the scale goes, for the whole run, so that pictures of different steps can be compared.
function scaleBound(load) {
  const cells = load.flat(2).filter((cell) => cell > 0);
  const distances = cells.map((cell) => Math.abs(Math.log(cell / 100))).sort((a, b) => a - b);
  const wide = Math.exp(distances[Math.floor(distances.length * 0.98)] ?? 0);
  return [1.5, 2, 4].find((bound) => wide <= bound) ?? 8;
}

function sized(canvas, width, height) {
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(density, 0, 0, density, 0, 0);
  pen.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  return pen;
}

function drawWithoutToken(pen, colours, left, top, width, height) {
  pen.fillStyle = colours.low;
  pen.fillRect(left, top, width, height);
  const [x, y, arm] = [left + width / 2, top + height / 2, Math.min(3.5, width / 3)];
  pen.strokeStyle = colours.mark;
  pen.lineWidth = 1.4;
  pen.beginPath();
  for (const side of [-1, 1]) {
    pen.moveTo(x - arm, y - side * arm);
    pen.lineTo(x + arm, y + side * arm);
  }
  pen.stroke();
}

function drawLayerNames(pen, colours, layers, row) {
  pen.fillStyle = colours.quiet;
  pen.textAlign = "right";
  for (let layer = 0; layer < layers; layer++) pen.fillText(`layer ${layer}`, LABELS - 8, HEAD + (layer + 0.5) * row);
}

// The load of each expert in one stretch of steps, and figures of each layer to the right of it.
function drawGrid(pen, colours, cells_LE, entropy_L, row, cell) {
  const experts = cells_LE[0].length;
  const right = LABELS + experts * cell;
  const gap = cell >= 6 ? 1 : 0;
  drawLayerNames(pen, colours, cells_LE.length, row);
  const every = Math.max(1, Math.ceil(niceTicks(0, experts, Math.max(1, (experts * cell) / 26))[1]));
  pen.textAlign = "center";
  for (let expert = 0; expert < experts; expert += every) {
    pen.fillText(expert, LABELS + (expert + 0.5) * cell, HEAD / 2);
  }
  pen.textAlign = "right";
  for (const [name, edge] of Object.entries(COLUMNS)) {
    if (name !== "entropy" || entropy_L.some((value) => value !== null)) pen.fillText(name, right + edge, HEAD / 2);
  }
  cells_LE.forEach((cells_E, layer) => {
    const top = HEAD + layer * row;
    cells_E.forEach((value, expert) => {
      const left = LABELS + expert * cell;
      if (value === 0) return drawWithoutToken(pen, colours, left, top, cell - gap, row - 1);
      pen.fillStyle = colours.load(value / 100);
      pen.fillRect(left, top, cell - gap, row - 1);
    });
    const without = cells_E.filter((value) => value === 0).length;
    const figure = (name, text, colour) => {
      pen.fillStyle = colour;
      pen.fillText(text, right + COLUMNS[name], top + row / 2);
    };
    figure("max/mean", `${(Math.max(...cells_E) / 100).toFixed(2)}×`, colours.text);
    figure("no token", without, without > 0 ? colours.bad : colours.quiet);
    if (entropy_L[layer] !== null) figure("entropy", entropy_L[layer].toFixed(2), colours.text);
  });
}

// The most loaded expert of each layer in each stretch of steps; the chosen stretch is framed.
function drawOverTime(pen, colours, load, row, column, chosen) {
  const [stretches, layers] = [load.load.length, load.load[0].length];
  drawLayerNames(pen, colours, layers, row);
  const right = LABELS + stretches * column;
  pen.textAlign = "left";
  pen.fillText(`step ${whole(load.first_steps[0])}`, LABELS, HEAD / 2);
  pen.textAlign = "right";
  if (stretches * column > 150) pen.fillText(`step ${whole(load.last_steps.at(-1))}`, right, HEAD / 2);
  load.load.forEach((cells_LE, stretch) =>
    cells_LE.forEach((cells_E, layer) => {
      pen.fillStyle = colours.load(Math.max(Math.max(...cells_E) / 100, 1));
      pen.fillRect(LABELS + stretch * column, HEAD + layer * row, column + 0.3, row - 1);
    }),
  );
  pen.strokeStyle = colours.text;
  pen.lineWidth = 1.5;
  pen.strokeRect(LABELS + chosen * column, HEAD - 1.5, column, layers * row + 0.5);
}

function drawScale(pen, colours, bound, width) {
  for (let x = 0; x < width; x++) {
    pen.fillStyle = colours.load(bound ** ((2 * x) / (width - 1) - 1));
    pen.fillRect(x, 0, 1.5, 12);
  }
  pen.fillStyle = colours.text;
  pen.fillRect(width / 2 - 1, 0, 2, 12);
}

function legend(scale, withoutKey, bound, experts) {
  const marks = [`≤ ${number(1 / bound)} ×`, `even = 1/E = ${number(100 / experts)} %`, `≥ ${bound} ×`];
  const under = element("div", "legend-labels", ...marks.map((mark) => element("span", "", mark)));
  const withoutToken = element("div", "key", withoutKey, "no token at all");
  return element("div", "legend quiet", element("div", "", scale, under), withoutToken);
}

// A button that calls `next` again and again until that says it was the last, or until it is pressed again.
function playButton(start, next, pause) {
  const button = element("button", "play", "Play");
  let timer = null;
  function stop() {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  }
  button.addEventListener("click", () => {
    if (timer !== null) return stop();
    start();
    button.textContent = "Pause";
    timer = setInterval(() => next() || stop(), pause);
  });
  return button;
}

function expertLoad(run) {
  if (run.load === null) return null;
  const { per_stretch, first_steps, last_steps, load, entropy } = run.load;
  const [stretches, layers, experts] = [load.length, load[0].length, load[0][0].length];
  const bound = scaleBound(load);
  const row = layers <= 12 ? 24 : layers <= 40 ? 17 : 13;
  // the latest, unless another was chosen before the page was loaded again
  const before = chosenNumber("load");
  let place = before === null ? stretches - 1 : nearest(last_steps, before);
  let cell, column;

  const [grid, time, scale, withoutKey] = Array.from({ length: 4 }, () => element("canvas"));
  const maps = element(
    "div",
    "maps",
    element("div", "", element("p", "quiet", "Layer × expert, in the steps chosen"), grid),
    element("div", "", element("p", "quiet", "Most loaded expert of each layer, over time"), time),
  );
  const when = element("span");
  const readout = element("p", "readout quiet", "Point at a cell to read it.");

  function draw() {
    const colours = mapColours(bound);
    const [width, height, figures] = [maps.clientWidth, HEAD + layers * row, COLUMNS.entropy + 6];
    const wanted = LABELS + figures + experts * Math.max(5, Math.min(44, 384 / experts));
    const beside = width - wanted - 26 >= 300;
    const [gridWidth, timeWidth] = beside ? [wanted, width - wanted - 26] : [width, width];
    cell = (gridWidth - LABELS - figures) / experts;
    column = Math.min(60, (timeWidth - LABELS - 2) / stretches);
    drawGrid(sized(grid, gridWidth, height), colours, load[place], entropy[place], row, cell);
    drawOverTime(sized(time, timeWidth, height), colours, run.load, row, column, place);
    const scaleWidth = Math.min(SCALE_WIDTH, width);
    drawScale(sized(scale, scaleWidth, 12), colours, bound, scaleWidth);
    drawWithoutToken(sized(withoutKey, 22, 16), colours, 0, 0, 22, 16);
    when.textContent = stepRange(first_steps[place], last_steps[place]);
  }

  function move(stretch) {
    place = Math.max(0, Math.min(stretches - 1, stretch));
    position.value = place;
    choose("load", place === stretches - 1 ? null : last_steps[place], false);
    draw();
  }

  const position = slider(stretches, "steps of the expert load", move);
  position.value = place;
  const play = playButton(
    () => place === stretches - 1 && move(0),
    () => {
      move(place + 1);
      return place < stretches - 1;
    },
    Math.max(120, 6000 / stretches),
  );
  grid.addEventListener("pointermove", (event) => {
    const [layer, expert] = [Math.floor((event.offsetY - HEAD) / row), Math.floor((event.offsetX - LABELS) / cell)];
    const value = load[place][layer]?.[expert];
    if (value === undefined) return;
    const share = `${number(value / 100)} × even, ${number(value / experts)} % of the layer's routed tokens`;
    readout.textContent = `layer ${layer}, expert ${expert}: ${value === 0 ? "no token" : share}`;
  });
  time.addEventListener("pointermove", (event) => {
    const [layer, stretch] = [Math.floor((event.offsetY - HEAD) / row), Math.floor((event.offsetX - LABELS) / column)];
    const cells_E = load[stretch]?.[layer];
    if (cells_E === undefined) return;
    const largest = Math.max(...cells_E);
    const where = `${stepRange(first_steps[stretch], last_steps[stretch])}, layer ${layer}`;
    readout.textContent = `${where}: expert ${cells_E.indexOf(largest)} has most, ${number(largest / 100)} × even`;
    if (event.buttons === 1) move(stretch);
  });
  time.addEventListener("pointerdown", (event) => move(Math.floor((event.offsetX - LABELS) / column)));
  drawing(grid, draw);

  const controls = element("div", "controls", ...(stretches > 1 ? [play, position, when] : [when]));
  const card = element("div", "card", controls, legend(scale, withoutKey, bound, experts), readout, maps);
  if (per_stretch > 1) {
    const sums = `Tokens are added up over ${whole(per_stretch)} logged steps at a time: ${stretches} pictures in all.`;
    card.append(element("p", "remark quiet", sums));
  }
  return section("Expert load", card);
}

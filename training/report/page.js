// ---- Header

function badge(run) {
  const steps = `step ${whole(run.step)}` + (run.num_steps === null ? "" : ` of ${whole(run.num_steps)}`);
  const early = run.stopped_early ? ", early" : "";
  const words = { finished: `finished at ${steps}${early}`, running: `running, ${steps}`, stopped: `stopped at ${steps}` };
  const minutes = Math.floor((Date.now() - Date.parse(run.written)) / 60000);
  // a run that was killed says nothing more: all there is to go by is how long ago it wrote
  const isSilent = run.state === "running" && page.refresh_seconds !== null && minutes >= 5;
  const text = (words[run.state] ?? steps) + (isSilent ? `, silent for ${duration(60 * minutes)}` : "");
  return element("span", `badge ${isSilent ? "stopped" : (run.state ?? "")}`, text);
}

function day(written) {
  return written.replace("T", " ").replace(/:\d\d\+00:00$/, " UTC");
}

function header() {
  const isOne = runs.length === 1;
  const title = element("div", "title", element("h1", "", isOne ? runs[0].name : `${runs.length} runs compared`));
  const made = element("header", "", title);
  if (!isOne) {
    made.append(overview());
    return made;
  }
  const [run] = runs;
  title.append(badge(run));
  if (page.refresh_seconds !== null) {
    const isLive = () => chosen.get("live") !== "no";
    title.append(toggle("live", isLive, () => choose("live", isLive() ? "no" : null)));
  }
  const started = run.environment.started;
  const dates = [started && `${run.summary.num_starts > 1 ? "resumed" : "started"} ${started}`, `written ${day(run.written)}`];
  made.append(element("p", "model quiet", [run.model, ...dates].filter(Boolean).join(" · ")));
  if (run.num_steps) {
    const bar = element("div");
    bar.style.width = `${Math.min(100, (100 * run.step) / run.num_steps)}%`;
    made.append(element("div", "progress", bar));
  }
  made.append(tiles(run));
  return made;
}

function tiles(run) {
  const all = run.summary;
  const made = element("div", "tiles");
  function tile(label, value, below = "", kind = "") {
    const [above, under] = [element("span", "quiet", label), element("span", "quiet", below)];
    made.append(element("div", `card tile ${kind}`, above, element("b", "", value), under));
  }
  if (all.loss !== null) {
    const step = run.curves.loss.steps.at(-1);
    tile(run.state === "running" ? "Loss" : "Final loss", number(all.loss), `at step ${whole(step)}`);
  }
  if (all.best_eval_loss !== null) {
    tile("Best eval loss", number(all.best_eval_loss), `at step ${whole(all.best_eval_step)}`);
  }
  if (all.tokens !== null) tile("Tokens seen", large(all.tokens), "without padding");
  if (all.tokens_per_second !== null) tile("Tokens/s", large(all.tokens_per_second), "median");
  if (all.mfu !== null) tile("MFU", percent(all.mfu), "median");
  if (all.peak_memory_mb !== null) tile("Peak memory", memory(all.peak_memory_mb), "of any rank");
  if (all.wall_seconds !== null) {
    tile("Wall time", duration(all.wall_seconds), all.num_starts > 1 ? `in ${all.num_starts} starts` : "");
  }
  if (all.dropped_tokens !== null) {
    const kind = all.dropped_tokens === 0 ? "good" : "bad";
    tile("Dropped tokens", whole(all.dropped_tokens), "all logged steps", kind);
  }
  if (all.skipped_steps > 0) tile("Skipped steps", whole(all.skipped_steps), "not finite", "bad");
  return made;
}

// The runs side by side, a line each.
function overview() {
  const told = (value, format) => (value === null || value === undefined ? "–" : format(value));
  const rows = runs.map((run, at) => {
    const { summary } = run;
    const best = summary.best_eval_loss === null ? "–" : `${number(summary.best_eval_loss)} (step ${whole(summary.best_eval_step)})`;
    return [
      element("span", "", element("span", `swatch hue-${at}`), run.label),
      badge(run), told(summary.loss, number), best, told(summary.tokens, large), told(summary.tokens_per_second, large),
      told(summary.peak_memory_mb, memory), told(summary.wall_seconds, duration), whole(run.warnings.length),
    ];
  });
  const head = ["run", "state", "final loss", "best eval loss", "tokens", "tokens/s", "peak memory", "wall time", "warnings"];
  return element("div", "card wide", table("figures overview", [head, ...rows]));
}

function warnings(run) {
  if (run.warnings.length === 0) return null;
  const lines = run.warnings.map((warning) => element("p", "", `Step ${whole(warning.step)}: ${warning.text}`));
  return section("Warnings", element("div", "card", ...lines));
}

// ---- Where time went

const BAR = 22; // pixels of a bar, and of the space below it
const TIMES = {
  "waiting for data": ["data", "host clock, rank that waits longest"],
  "training": ["training", "host clock, main process: compute, exchange between ranks, logging"],
  "evaluation": ["evaluations", "host clock, main process"],
  "sample generations": ["generations", "host clock, main process"],
  "saving": ["saves", "host clock: how long training waited"],
  "other": ["other", "the rest of the wall time: comparing replicas, writing profiles"],
};

function timesOf(run) {
  const { steps, data, number, ...pauses } = run.seconds;
  const known = { ...pauses, data: Math.min(data, steps), training: Math.max(steps - data, 0) };
  const sum = Object.values(known).reduce((total, part) => total + part, 0);
  return { ...known, other: Math.max((run.summary.wall_seconds ?? 0) - sum, 0) };
}

// The share of a step's profiled time that its exchanges took; null without a profile.
function exchanged(run) {
  const parts = run.profiles.flatMap((profile) => Object.entries(profile.parts));
  const total = (wanted) => parts.reduce((sum, [name, { seconds }]) => sum + (wanted(name) ? seconds : 0), 0);
  return parts.length ? total((name) => page.exchange.includes(name)) / (total(() => true) || 1) : null;
}

function wallTime() {
  const measured = runs.filter((run) => run.seconds.steps > 0);
  if (measured.length === 0) return null;
  const names = Object.keys(TIMES);
  const shares = measured.map((run) => {
    const times = timesOf(run);
    const all = Object.values(times).reduce((sum, part) => sum + part, 0);
    return { run, all, of: (name) => times[TIMES[name][0]] };
  });
  const kindOf = (name) => (name === "other" ? "part-between" : `part-${names.indexOf(name)}`);
  const labels = shares.map(({ run, all }) => `${runs.length > 1 ? `${run.label}: ` : ""}${duration(all)}`);
  const drawnBars = bars("Wall time", names, kindOf, shares.map(({ all, of }, i) => ({ label: labels[i], all, of, format: duration })));
  const perStep = (share, name) => `${seconds(share.of(name) / share.run.seconds.number)}, ${percent(Math.round((1000 * share.of(name)) / share.all) / 1000)}`;
  const head = ["", ...shares.map(({ run }) => (runs.length > 1 ? run.label : "seconds per step, share")), "measured by"];
  const rows = names
    .filter((name) => shares.some((share) => share.of(name) > 0))
    .map((name) => {
      const label = element("span", "", element("span", `swatch ${kindOf(name)}`), name);
      return [label, ...shares.map((share) => perStep(share, name)), TIMES[name][1]];
    });
  const exchange = shares.map(({ run }) => exchanged(run));
  if (exchange.some((share) => share !== null)) {
    const told = exchange.map((share) => (share === null ? "–" : `${percent(Math.round(1000 * share) / 1000)} of a step`));
    rows.push(["exchange", ...told, "profiles, a part of training: dispatch to experts, FSDP, pipeline, waiting for ranks"]);
  }
  return section("Where the time went", element("div", "card", drawnBars, element("div", "wide", table("figures times", [head, ...rows]))));
}

// A bar for each of `rows`, cut into its parts by `names`. `press` is called with the place of the one that is pressed.
function bars(title, names, kindOf, rows, press = null) {
  const shown = picture("bars", title);
  shown.style.height = `${rows.length * 2 * BAR}px`;
  if (press !== null) shown.classList.add("pressed");
  const most = Math.max(...rows.map(({ all }) => all)) || 1;
  drawing(shown, () => {
    const width = shown.clientWidth;
    shown.replaceChildren();
    rows.forEach(({ label, all, of, format }, place) => {
      const top = place * 2 * BAR;
      const bar = drawn(shown, "g", "", {});
      drawn(bar, "text", "", { x: 0, y: top + BAR - 6 }, label);
      let left = 0;
      for (const name of names.filter((name) => of(name) > 0)) {
        const size = (of(name) / most) * width;
        const part = drawn(bar, "rect", kindOf(name), { x: left, y: top + BAR, width: Math.max(size - 1, 0.5), height: BAR - 6 });
        drawn(part, "title", "", {}, `${name}: ${format(of(name))}, ${percent(of(name) / all)}`);
        left += size;
      }
      if (press !== null) bar.addEventListener("click", () => press(place));
    });
  });
  return element("div", "", element("h3", "", title), shown);
}

// ---- Profiles

const HUES = 8; // colours of parts in page.css; parts beyond them share one
const FIGURES = {
  "Seconds per step": { figure: "seconds", format: seconds },
  "Memory allocated per step": { figure: "allocated_bytes", format: bytes },
};

function nameOf(profile) {
  return `rank ${profile.rank}, ${stepRange(profile.steps[0], profile.steps.at(-1))}`;
}

// The names of all parts, those with the most time first, and last what is no part's.
function partNames(profiles) {
  const sums = {};
  for (const profile of profiles) {
    for (const [name, figures] of Object.entries(profile.parts)) sums[name] = (sums[name] ?? 0) + figures.seconds;
  }
  const names = Object.keys(sums).filter((name) => name !== page.between);
  names.sort((a, b) => sums[b] - sums[a]);
  return page.between in sums ? [...names, page.between] : names;
}

function profileTable(profile, names, kindOf) {
  const steps = profile.steps.length;
  const all = Object.values(profile.parts).reduce((sum, figures) => sum + figures.seconds, 0) || 1;
  const head = ["", "time per step", "share", "calls per step", "allocated per step"];
  const rows = names
    .filter((name) => profile.parts[name])
    .sort((a, b) => (a === page.between) - (b === page.between) || profile.parts[b].seconds - profile.parts[a].seconds)
    .map((name) => {
      const part = profile.parts[name];
      return [
        element("span", "", element("span", `swatch ${kindOf(name)}`), name),
        seconds(part.seconds / steps),
        percent(Math.round((1000 * part.seconds) / all) / 1000),
        name === page.between ? "" : number(part.calls / steps),
        bytes(part.allocated_bytes / steps),
      ];
    });
  return table("figures", [head, ...rows]);
}

function profiles(run) {
  if (run.profiles.length === 0) return null;
  const names = partNames(run.profiles);
  const kindOf = (name) => {
    const place = names.indexOf(name);
    return name === page.between ? "part-between" : place < HUES ? `part-${place}` : "part-more";
  };
  const [when, remark, figures] = [element("h3"), element("p", "remark quiet"), element("div", "wide")];
  function show(at) {
    const profile = run.profiles[at];
    position.value = at;
    when.textContent = nameOf(profile);
    figures.replaceChildren(profileTable(profile, names, kindOf));
    const onCpu = "Time of operators; waiting for other ranks within one counts as its part's. Between operators: ";
    const onGpu = "Time of kernels: those that run at once count each. Between operators: time beyond that of all kernels. ";
    remark.textContent =
      (profile.device === "cpu" ? onCpu + "Python, waiting, and the profiler itself. " : onGpu) +
      "Memory: what operators allocated and did not free themselves.";
  }
  const count = run.profiles.length;
  const position = slider(count, "profile", show);
  const pictures = Object.entries(FIGURES).map(([title, { figure, format }]) => {
    const rows = run.profiles.map((profile) => {
      const of = (name) => (profile.parts[name]?.[figure] ?? 0) / profile.steps.length;
      const all = names.reduce((sum, name) => sum + of(name), 0);
      return { label: `${nameOf(profile)}: ${format(all)}`, all, of, format };
    });
    return bars(title, names, kindOf, rows, show);
  });
  show(0);
  const controls = element("div", "controls", count > 1 ? position : null, when);
  const card = element("div", "card", element("div", "charts", ...pictures), controls, figures, remark);
  if (run.profiles_not_shown) {
    card.append(element("p", "remark quiet", `${whole(run.profiles_not_shown)} more profiles are in the directory.`));
  }
  return section("Profiled steps", card);
}

// ---- Sample generations

// Tokens with a meaning of their own as the families write them, which are marked: <|im_end|>, </s>, <end_of_turn>, [INST].
const SPECIAL = /(<[|｜][^<>|｜]{1,48}[|｜]>|<\/?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_\w+>|\[\/?INST\])/;

function generatedText(className, title, content) {
  const parts = content.split(SPECIAL).map((part, i) => (i % 2 ? element("span", "special", part) : part));
  const made = element("pre", className, ...parts);
  made.dir = "auto";
  return element("div", "", element("span", "quiet", title), made);
}

function generations(run) {
  if (run.generations.length === 0) return null;
  const samples = element("div", "samples");
  const when = element("span", "");
  const steps = run.generations.map(({ step }) => step);
  function show(at) {
    const logged = run.generations[at];
    when.textContent = `after step ${whole(logged.step)}`;
    const all = ({ prompt, text, reference }) => {
      const beside = reference === undefined ? null : generatedText("reference", "reference, from the data", reference);
      return element("div", "sample", generatedText("prompt", "prompt", prompt), generatedText("", "generated", text), beside);
    };
    samples.replaceChildren(...logged.samples.map(all));
    if (logged.not_shown) samples.append(element("p", "quiet", `${whole(logged.not_shown)} more in metrics.jsonl`));
  }
  const last = steps.length - 1;
  const position = slider(steps.length, "step of the generations", (at) => {
    show(at);
    choose("sample", at === last ? null : steps[at], false);
  });
  const before = chosenNumber("sample");
  position.value = before === null ? last : nearest(steps, before);
  show(Number(position.value));
  const controls = element("div", "controls", steps.length > 1 ? position : null, when);
  if (run.num_generations > steps.length) {
    controls.append(element("span", "quiet", `${steps.length} of ${whole(run.num_generations)} times, evenly spread`));
  }
  return section("Sample generations", element("div", "card", controls, samples));
}

// ---- Settings

function facts(title, remark, entries) {
  if (entries.length === 0) return null;
  const heading = element("div", "title", element("h3", "", title), element("span", "quiet", remark));
  const rows = entries.map(([name, value]) => element("tr", "", element("td", "", name), element("td", "", value)));
  return element("div", "card", heading, element("table", "", element("tbody", "", ...rows)));
}

function settings(run) {
  const isChanged = ([name]) => run.not_default.includes(name);
  const all = Object.entries(run.config);
  const changed = facts("Differs from the defaults", "", all.filter(isChanged));
  const rest = facts("At its default", "", all.filter((entry) => !isChanged(entry)));
  const command = run.command === null ? null : element("pre", "command", run.command);
  const title = element("div", "title", element("h3", "", "Command line"), element("span", "quiet", "that asks for these settings"));
  const folded = rest && element("details", "", element("summary", "quiet", "Settings at their defaults"), rest);
  if (folded) {
    folded.open = chosen.get("defaults") === "shown";
    folded.addEventListener("toggle", () => choose("defaults", folded.open ? "shown" : null, false));
  }
  const made = [
    command && element("div", "card", title, command),
    element("div", "tables", changed, facts("Environment", "", Object.entries(run.environment))),
    folded,
  ];
  return all.length || Object.keys(run.environment).length ? section("Settings", ...made) : null;
}

// What is not the same in all runs, side by side.
function differences() {
  if (runs.length === 1) return null;
  const rows = (part) => {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run[part])))];
    const differing = names.filter((name) => new Set(runs.map((run) => run[part][name])).size > 1);
    return differing.map((name) => [name, ...runs.map((run) => run[part][name] ?? "–")]);
  };
  const heads = runs.map((run, at) => element("span", "", element("span", `swatch hue-${at}`), run.label));
  const tables = [["Settings", "config"], ["Environment", "environment"]].map(([title, part]) => {
    const found = rows(part);
    return found.length ? table("figures differing", [[title, ...heads.map((head) => head.cloneNode(true))], ...found]) : null;
  });
  const same = element("p", "quiet", "All settings are the same.");
  return section("Differing settings", element("div", "card wide", ...(tables.some(Boolean) ? tables : [same])));
}

// ---- The page

// What is shown of one run alone; where there are several, of the one that is picked.
function details() {
  const shown = element("div");
  const parts = [warnings, expertLoad, profiles, generations, settings];
  const show = (run) => {
    shown.replaceChildren(...parts.map((part) => part(run)).filter((part) => part !== null));
    drawAll();
  };
  const at = Math.min(Math.max(chosenNumber("run") ?? 0, 0), runs.length - 1);
  if (runs.length === 1) return { shown, show: () => show(runs[0]) };
  const pick = element("select", "");
  pick.setAttribute("aria-label", "run");
  runs.forEach((run, place) => pick.append(new Option(run.label, place)));
  pick.value = at;
  pick.addEventListener("change", () => {
    choose("run", Number(pick.value) || null, false);
    show(runs[Number(pick.value)]);
  });
  const line = element("div", "title details", element("h2", "", "Details of"), pick);
  return { shown: element("div", "", line, shown), show: () => show(runs[at]) };
}

function footer() {
  const unreadable = runs.reduce((sum, run) => sum + run.unreadable_lines, 0);
  const skipped = unreadable ? ` Unreadable lines of metrics.jsonl, skipped: ${whole(unreadable)}.` : "";
  return element("footer", "quiet", `Written ${day(runs[0].written)} by expertmesh.${skipped}`);
}

const isEmpty = runs.every((run) => Object.keys(run.curves).length === 0);
const nothing = isEmpty ? element("p", "quiet", "No step has been logged yet.") : null;
const ofOne = details();
const sections = [header(), nothing, curves(), wallTime(), differences(), ofOne.shown, footer()];
document.getElementById("report").replaceChildren(...sections.filter((section) => section !== null));
ofOne.show();
refresh();
addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

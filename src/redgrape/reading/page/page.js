"use strict";
// Draws the page from its data (see figures.py for what is in it). All text goes in as text, never as markup.

const FIGURES = {
  accuracy: "Overall", balanced: "Class-balanced", macro_f1: "Macro F1", head: "Head", middle: "Middle", tail: "Tail",
};
const GROUPS = { head: "Head: the frequent classes", middle: "Middle", tail: "Tail: the rare classes" };
const COLOURS = 7; // beside the first, which is RedGrape's own
const MARKERS = [ // each within a box of 8 by 8 about the point
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", "M-3.5,-3.5h7v7h-7Z", "M0,-4.5L4.3,3.4H-4.3Z", "M0,-5L4.4,0L0,5L-4.4,0Z",
  "M0,4.5L4.3,-3.4H-4.3Z", "M-4,-4L4,4M-4,4L4,-4", "M0,-4.6V4.6M-4.6,0H4.6", "M-4.5,-2.5h9v5h-9Z",
];
const DASHES = ["", "7 4", "2 4", "10 3 2 3"]; // for methods whose colour another has already

// How to read each chart
const READ = {
  rounds: `Share of test examples that are recognised, in %, after each round. Lines are means over seeds, bands span
    the seeds. Class-balanced counts every class alike, head and tail the frequent and the rare ones.`,
  groups: `Share of test examples that are recognised, in %. Head and tail are the three tenths of the classes with the
    most and with the fewest training examples, or the classes that the experiment names. A thin line spans the seeds.`,
  classes: `Classes stand from the most frequent to the rarest; the grey bars are their training examples
    (logarithmic). A method that treats rare classes well stays high on the right.`,
  norms: `The score of a class is its weight vector times the features, so a class with a longer vector is favoured.
    1 is the classifier's own mean. A line that falls to the right leans towards frequent classes; re-balancing levels
    it. Dashed: classifiers that serve the training only.`,
  confusion: `Each row is a true class, each column what the model said, from frequent to rare; a row adds up to 100 %.
    The diagonal is right. A rare class that is taken for a frequent one stands in the lower left.`,
  sites: `How each site fares with the final model, on its own test examples. A site may lack classes, and a site with few
    examples says little. A model that is good on average may fail one of them.`,
  reliability: `Test examples are grouped by the highest probability that the final model gives. On the dotted line, it is
    right as often as it says; below it, it is too sure of itself. The error is the mean distance from the line.`,
  about: "What all methods of this setting have in common, and each method's own hyper-parameters.",
  tail: `How many training examples there are of each class, over all clients. The test set is separate, and no client
    holds any of it.`,
  holding: `Each row is a client, each column a class, from frequent to rare: the number of its training examples
    (darker is more, empty is none). Clients differ in what they hold and in how much.`,
  ages: `How many rounds ago the server had enough reports of a class. If a round has too few clients that report it, the
    last release stays and ages (darker).`,
  seconds: `Mean wall-clock time of a round, all clients of it: training (strong) and evaluation (pale). It depends on
    the machine, and on what else ran on it.`,
  bytes: "What a client receives (strong) and sends (pale) in one round, in MB of 10⁶ bytes.",
  commands: `Save each description below under its name; these commands then give the same bits on the same versions and
    machine. In a run folder, experiment.toml is that description.`,
  suite: `This gives the table: cells that have been run are found, and the others are run. How to make the runs one by one
    stands below.`,
  overview: `Test accuracy in %, a row a setting; the rest of the page is about one of them. The buttons choose which
    accuracy, here and over the rounds.`,
};
const NOT_YET = "No round has been evaluated yet.";
const DRAWN = 300; // more classes make no readable matrix
const TOO_MANY = "There are too many clients and classes to draw.";
const AT_THE_END = "This is written when a run ends; `redgrape resume RUN` adds it to one of before redgrape wrote it.";
const OF_RECORDS = "Records do not hold this; it is in the folder of a run.";

const page = document.getElementById("page");
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = { setting: 0, figure: "accuracy", hidden: new Set() }; // and what is chosen in a chart, by its key
const opened = new Set(); // the details that are open, by their key

// Elements and numbers

function element(space, tag, attributes, children) {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...known(children.flat()));
  return made;
}
const html = (tag, attributes, ...children) => element(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => element("http://www.w3.org/2000/svg", tag, attributes, children);

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const range = (count) => [...Array(count).keys()];
const largest = (values) => values.reduce((most, value) => Math.max(most, value), -Infinity);
const smallest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);
const spread = (values) => ({ mean: mean(values), low: smallest(values), high: largest(values), n: values.length });
const within = (value, low, high) => Math.max(low, Math.min(high, value));

const percent = (share) => (share === null || share === undefined ? "–" : (100 * share).toFixed(1));
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;
const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
const longest = (names, most) => largest(names.map((name) => Math.min(name.length, most)));

function compact(count) {
  if (count >= 1e6) return `${+(count / 1e6).toFixed(1)}M`;
  return count >= 1e4 ? `${Math.round(count / 1e3)}k` : String(count);
}

// What is shown, and how a method looks

const setting = () => data.settings[Math.min(chosen.setting, data.settings.length - 1)];
const runsOf = (method) => known(method.runs.map((id) => data.runs[id]));
const isShown = (method) => !chosen.hidden.has(method.label);
const shown = () => setting().methods.filter(isShown);
const splitOf = (method) => known(runsOf(method).map((run) => data.splits[run.split]))[0];
const anySplit = () => known(setting().methods.map(splitOf))[0];
const notThere = () => (setting().methods.flatMap(runsOf).every((run) => run.is_record) ? OF_RECORDS : AT_THE_END);
const figuresOf = (method, figure) => method.figures[figure]; // of each seed
const seedsOf = (runs) => [...new Set(runs.map((run) => run.seed))];
// Of each seed, the mean over its runs: those of clients that were trained alone
const bySeed = (runs, valueOf) => known(seedsOf(runs).map((seed) =>
  mean(known(runs.filter((run) => run.seed === seed).map(valueOf)))));

let looks = new Map(); // label -> place among the looks, the same in every setting

function setLooks() {
  const labels = [...new Set(data.settings.flatMap((s) => s.methods.map((m) => m.label)))];
  const grape = labels.find((label) => label.startsWith("redgrape"));
  looks = new Map(labels.filter((label) => label !== grape).map((label, place) => [label, place + 1]));
  if (grape) looks.set(grape, 0);
}
const look = (method) => looks.get(method.label);
const colour = (method) => (look(method) ? `m${1 + ((look(method) - 1) % COLOURS)}` : "m0");
const dash = (method) => DASHES[Math.floor(Math.max(0, look(method) - 1) / COLOURS) % DASHES.length] || null;
const marker = (method, x, y) =>
  svg("path", { class: "dot", d: MARKERS[look(method) % MARKERS.length], transform: `translate(${x},${y})` });
const sample = (method) =>
  svg("svg", { class: colour(method), viewBox: "0 0 26 14", "aria-hidden": "true" },
    svg("path", { class: "line", d: "M1,7H25", "stroke-dasharray": dash(method) }), marker(method, 13, 7));

// Cards, tables, controls

const card = (title, read, ...body) =>
  html("section", { class: "card" }, html("h3", {}, title), html("p", { class: "read" }, read), ...body);
const heading = (title) => html("h2", {}, title);
const missing = (text) => html("p", { class: "missing" }, text);
const note = (text) => html("p", { class: "note" }, text);
const wide = (text) => html("td", { class: "wide" }, text);

function table(head, rows) {
  const cell = (entry) => (entry instanceof Node ? entry : html("td", {}, String(entry)));
  return html("div", { class: "scroll", tabindex: "0" }, html("table", {},
    html("thead", {}, html("tr", {}, head.map((title) => html("th", { scope: "col" }, title)))),
    html("tbody", {}, rows.map((row) => html("tr", {}, row.map(cell))))));
}

function details(key, summary, ...body) {
  const box = html("details", { open: opened.has(key) ? "" : null }, html("summary", {}, summary), ...body);
  box.addEventListener("toggle", () => (box.open ? opened.add(key) : opened.delete(key)));
  return box;
}
const asTable = (key, head, rows) => details(`table ${key}`, "The same as a table", table(head, rows));

function choice(key, label, options, value) {
  if (options.length < 2) return null;
  const choose = () => { chosen[key] = select.value; render(); };
  const select = html("select", { id: `choose-${key}`, change: choose }, options.map(([name, text]) =>
    html("option", { value: name, selected: name === value ? "" : null }, text)));
  return html("div", { class: "controls" }, html("label", { for: select.id }, label), select);
}
const methodChoice = (key, methods, method) =>
  choice(key, "method", methods.map((m) => [m.label, m.label]), method.label);

function toggle(key, pressed, click, ...content) {
  return html("button", { type: "button", "aria-pressed": String(pressed), "data-key": key, click }, ...content);
}

// The parts of a chart

let chartWidth = 600;
const isWide = () => chartWidth >= 560;

function measure() {
  const probe = html("div", { class: "card" }, html("div", {}));
  page.append(probe);
  chartWidth = Math.max(240, Math.floor(probe.firstChild.clientWidth)); // a window may not have its size yet
  probe.remove();
}

const canvas = (height, label) =>
  svg("svg", { width: chartWidth, height, viewBox: `0 0 ${chartWidth} ${height}`, role: "img", "aria-label": label });
const write = (root, x, y, words, anchor = "middle", kind = null) =>
  root.append(svg("text", { x, y, "text-anchor": anchor, class: kind }, words));
const line = (root, kind, x1, y1, x2, y2) => root.append(svg("line", { class: kind, x1, y1, x2, y2 }));
const rect = (root, kind, x, y, width, height, more = {}) =>
  root.append(svg("rect", { class: kind, x, y, width: Math.max(0, width), height: Math.max(0, height), ...more }));
const pointsOf = (pairs) => pairs.map(([x, y]) => `${x},${y}`).join(" ");

function niceTicks(low, high, count) {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return range(Math.floor(high / step + 1e-6) - first + 1).map((i) => +((first + i) * step).toPrecision(10));
}

function drawTicks(root, ticks, y, left, right, format) {
  for (const tick of ticks) {
    line(root, "grid", left, y(tick), right, y(tick));
    write(root, left - 8, y(tick) + 4, format(tick), "end");
  }
}

function drawGroups(root, split, left, right, top, bottom) {
  const room = (right - left) / split.order.length;
  let start = 0;
  for (const group of Object.keys(GROUPS)) {
    const size = split.groups.filter((name) => name === group).length, x = left + start * room;
    if (start && size) line(root, "parting", x, top - 14, x, bottom);
    if (size) write(root, x + (size / 2) * room, top - 10, group);
    start += size;
  }
}

const isTilted = (names, room) => longest(names, 12) * 6.6 > room - 4;

function drawNames(root, names, x, y, tilted, room) {
  const every = Math.max(1, Math.ceil((tilted ? 13 : 8) / room));
  names.forEach((name, i) => {
    if (i % every) return;
    if (!tilted) return write(root, x(i), y + 16, short(name, 12));
    const turned = { x: x(i) + 4, y: y + 16, "text-anchor": "end", transform: `rotate(-60 ${x(i)} ${y + 14})` };
    root.append(svg("text", turned, short(name, 12)));
  });
}

// The tip, which follows the pointer, a finger or the arrow keys

const tip = html("div", { id: "tip", role: "status", hidden: "" });
document.body.append(tip);

function showTip(x, y, content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 14) : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };
const tipRow = (mark, name, value) => html("div", {}, mark, html("span", {}, name), html("span", {}, value));

// `at(x, y)`: the place under a point of the drawing, or null. `show(place, overlay)`: marks it, and returns what the
// tip says and where it stands if no pointer does. Places are 0 .. along - 1 where arrow keys go along them.
function hoverable(root, at, show, along = 0) {
  const overlay = svg("g", {});
  root.append(overlay);
  root.classList.add("hoverable");
  let current = null;
  const move = (place, x, y) => {
    current = place;
    overlay.replaceChildren();
    if (place === null) return hideTip();
    const box = root.getBoundingClientRect(), [content, px, py] = show(place, overlay);
    showTip(x ?? box.left + px, y ?? box.top + py, content);
  };
  const point = (event) => {
    const box = root.getBoundingClientRect();
    move(at(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  };
  root.addEventListener("pointermove", point);
  root.addEventListener("pointerdown", point);
  root.addEventListener("pointerleave", () => move(null));
  if (!along) return;
  root.setAttribute("tabindex", "0");
  root.addEventListener("blur", () => move(null));
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    move(within((current ?? (step > 0 ? -1 : along)) + step, 0, along - 1));
  });
}

// Accuracy over rounds

function overRounds(method, figure) {
  const at = new Map();
  for (const id of method.runs) {
    const columns = data.rounds[id] || {}, { seed } = data.runs[id];
    (columns[figure] || []).forEach((value, i) => {
      if (value !== null) at.set(columns.round[i], [...(at.get(columns.round[i]) || []), { seed, value }]);
    });
  }
  return [...at].sort((a, b) => a[0] - b[0])
    .map(([round, found]) => ({ round, ...spread(bySeed(found, ({ value }) => value)) }));
}

function roundsChart(figure) {
  const series = shown().map((method) => ({ method, points: overRounds(method, figure) }))
    .filter((s) => s.points.length);
  if (!series.length) return missing(NOT_YET);
  const height = isWide() ? 340 : 260, left = 44, right = chartWidth - (isWide() ? 130 : 12), top = 12;
  const bottom = height - 44;
  const rounds = [...new Set(series.flatMap((s) => s.points.map((p) => p.round)))].sort((a, b) => a - b);
  const first = rounds[0], last = Math.max(rounds[rounds.length - 1], first + 1);
  const x = (round) => left + ((round - first) / (last - first)) * (right - left);
  const most = Math.min(1, Math.ceil(10 * largest(series.flatMap((s) => s.points.map((p) => p.high))) + 0.5) / 10);
  const y = (share) => bottom - (share / most) * (bottom - top);
  const root = canvas(height, "Accuracy over rounds");
  drawTicks(root, niceTicks(0, most, 5), y, left, right, (share) => String(Math.round(100 * share)));
  for (const tick of niceTicks(first, last, isWide() ? 8 : 5).filter(Number.isInteger)) {
    write(root, x(tick), bottom + 20, String(tick));
  }
  write(root, (left + right) / 2, height - 6, "round");
  for (const { method, points } of series) root.append(roundsLine(method, points, x, y));
  if (isWide()) drawEnds(root, series, right + 12, y, top, bottom);
  const nearest = (px) => rounds.reduce((best, round, i) =>
    (Math.abs(x(round) - px) < Math.abs(x(rounds[best]) - px) ? i : best), 0);
  hoverable(root, nearest, (i, overlay) => {
    line(overlay, "cross", x(rounds[i]), top, x(rounds[i]), bottom);
    const here = series.map(({ method, points }) => ({ method, point: points.find((p) => p.round === rounds[i]) }))
      .filter((entry) => entry.point).sort((a, b) => b.point.mean - a.point.mean);
    const rows = here.map(({ method, point }) => tipRow(sample(method), method.label,
      percent(point.mean) + (point.n > 1 ? ` (${percent(point.low)} to ${percent(point.high)})` : "")));
    return [[html("b", {}, `round ${rounds[i]}`), ...rows], x(rounds[i]), top];
  }, rounds.length);
  return root;
}

function roundsLine(method, points, x, y) {
  const group = svg("g", { class: colour(method) }), several = points.filter((p) => p.n > 1);
  const there = several.map((p) => [x(p.round), y(p.high)]), back = several.map((p) => [x(p.round), y(p.low)]);
  group.append(svg("polygon", { class: "band", points: pointsOf([...there, ...back.reverse()]) }));
  const path = pointsOf(points.map((p) => [x(p.round), y(p.mean)]));
  group.append(svg("polyline", { class: "line", "stroke-dasharray": dash(method), points: path }));
  const every = Math.ceil(points.length / 12);
  points.filter((_, i) => (points.length - 1 - i) % every === 0)
    .forEach((p) => group.append(marker(method, x(p.round), y(p.mean))));
  return group;
}

// The methods' names at the ends of their lines, pushed apart where they would cover each other
function drawEnds(root, series, x, y, top, bottom) {
  const ends = series.map(({ method, points }) => ({ method, at: y(points[points.length - 1].mean) }));
  ends.sort((a, b) => a.at - b.at);
  ends.forEach((end, i) => { end.at = Math.max(end.at, i ? ends[i - 1].at + 14 : top); });
  const over = Math.max(0, ends[ends.length - 1].at - bottom);
  for (const { method, at } of ends) {
    write(root, x, at - over + 4, short(method.label, 18), "start", `end ${colour(method)}`);
  }
}

const figureButtons = () =>
  html("div", { class: "controls", role: "group", "aria-label": "Which accuracy" },
    Object.entries(FIGURES).map(([figure, title]) =>
      toggle(`figure ${figure}`, chosen.figure === figure, () => { chosen.figure = figure; render(); }, title)));

const roundsCard = () =>
  card(`Accuracy over rounds: ${FIGURES[chosen.figure].toLowerCase()}`, READ.rounds, figureButtons(),
    roundsChart(chosen.figure));

// Figures by class, from head to tail

const classTitle = (split, c) =>
  split.known ? `${split.class_names[c]}: ${plural(split.class_counts[c], "training example")}, ${split.groups[c]}`
    : [split.class_names[c], split.groups[c]].filter(Boolean).join(", ");

// For each class, from head to tail, the spread over a method's seeds; null where there is nothing.
function byClass(method, valuesOf) {
  const split = splitOf(method), runs = runsOf(method).map((run) => ({ seed: run.seed, values: valuesOf(run) }));
  if (!split || !runs.some(({ values }) => values)) return null;
  return split.order.map((c) => bySeed(runs, ({ values }) => values?.[c]))
    .map((values) => (values.length ? spread(values) : null));
}

// series: [{method, name, values, thin}], the values as `byClass` gives them
function classChart(split, series, label, [least, most], format, tipFormat) {
  const order = split.order, names = order.map((c) => split.class_names[c]);
  const left = 44, right = chartWidth - 10, top = 30, bottom = isWide() ? 290 : 230, floor = bottom + 58;
  const room = (right - left) / order.length, tilted = isTilted(names, room);
  const x = (i) => left + (i + 0.5) * room;
  const y = (value) => bottom - ((value - least) / (most - least)) * (bottom - top);
  const root = canvas(floor + (tilted ? 82 : 24), label);
  drawTicks(root, niceTicks(least, most, 5), y, left, right, format);
  drawGroups(root, split, left, right, top, floor);
  const log = (count) => Math.log(count + 1), tallest = log(largest(split.class_counts)) || 1;
  order.forEach((c, i) => {
    const height = (36 * log(split.class_counts[c])) / tallest;
    rect(root, "counts", x(i) - room * 0.36, floor - height, room * 0.72, height);
    const count = split.known ? compact(split.class_counts[c]) : "";
    if (room > 26) write(root, x(i), floor - height - 4, count, "middle", "small");
  });
  drawNames(root, names, x, floor, tilted, room);
  for (const { method, values, thin } of series) {
    const group = svg("g", { class: colour(method) });
    const points = values.map((value, i) => value && [x(i), value]).filter(Boolean);
    const path = pointsOf(points.map(([px, value]) => [px, y(value.mean)]));
    const dashes = thin ? "4 4" : dash(method);
    group.append(svg("polyline", { class: thin ? "line thin" : "line", "stroke-dasharray": dashes, points: path }));
    for (const [px, value] of points) {
      if (value.n > 1) line(group, "whisker own", px, y(value.low), px, y(value.high));
      if (!thin && room > 9) group.append(marker(method, px, y(value.mean)));
    }
    root.append(group);
  }
  hoverable(root, (px) => within(Math.floor((px - left) / room), 0, order.length - 1), (i, overlay) => {
    line(overlay, "cross", x(i), top, x(i), floor);
    const here = series.filter((s) => s.values[i]).sort((a, b) => b.values[i].mean - a.values[i].mean);
    const rows = here.map((s) => tipRow(sample(s.method), s.name, tipFormat(s, i)));
    return [[html("b", {}, classTitle(split, order[i])), ...rows], x(i), top];
  }, order.length);
  return root;
}

function classTable(key, split, series, format) {
  const tested = runsOf(series[0].method).find((run) => run.tested)?.tested;
  const head = ["class", "training examples", "test examples", ...series.map((s) => s.name)];
  const rows = split.order.map((c, i) => [c, i]).map(([c, i]) =>
    [split.class_names[c], split.known ? split.class_counts[c] : "–", tested?.[c] ?? "–", ...series.map((s) => format(s, i))]);
  return asTable(key, head, rows);
}

function perClassCard() {
  const title = "How well each class is recognised", split = anySplit();
  const series = shown().map((method) => ({ method, name: method.label, values: byClass(method, (r) => r.per_class) }))
    .filter((s) => s.values && s.values.some(Boolean));
  if (!series.length) return card(title, READ.classes, missing(NOT_YET));
  const tick = (share) => String(Math.round(100 * share)), format = (s, i) => percent(s.values[i]?.mean);
  return card(title, READ.classes,
    classChart(split, series, "Accuracy per class, from head to tail", [0, 1], tick, format),
    classTable("per class", split, series, format));
}

function normSeries() {
  return shown().flatMap((method) => {
    const names = [...new Set(runsOf(method).flatMap((run) => Object.keys(run.norms || {})))];
    return names.map((name) => ({
      method,
      name: name === "model" ? method.label : `${method.label}, ${name}`,
      thin: name !== "model",
      norms: byClass(method, (run) => run.norms?.[name]),
      values: byClass(method, (run) => run.norms?.[name]?.map((norm) => norm / mean(known(run.norms[name])))),
    }));
  }).filter((s) => s.values);
}

function normsCard() {
  const title = "How long the classifier's weight vector of each class is", series = normSeries();
  if (!series.length) return card(title, READ.norms, missing(notThere()));
  const all = series.flatMap((s) => known(s.values));
  const bounds = [Math.max(0, smallest(all.map((v) => v.low)) - 0.05), largest(all.map((v) => v.high)) + 0.05];
  const norm = (s, i) => s.norms[i]?.mean.toFixed(3) ?? "–";
  return card(title, READ.norms,
    classChart(anySplit(), series, "Norm of the classifier's weights per class", bounds, (v) => String(+v.toFixed(2)),
      (s, i) => `${s.values[i].mean.toFixed(2)} (norm ${norm(s, i)})`),
    classTable("norms", anySplit(), series, norm));
}

// Horizontal bars. groups: [{title, rows: [{method, parts: one or two numbers, low, high, text, tip}]}]

function barChart(groups, label, most) {
  const all = groups.flatMap((group) => group.rows), step = 24;
  const inset = Math.min(chartWidth * 0.36, 8 + 7 * longest(all.map((row) => row.method.label), 22));
  const left = inset + 8, right = chartWidth - 9 - 6.6 * longest(all.map((row) => row.text), 20);
  const root = canvas(sum(groups.map((group) => (group.title ? 28 : 0) + group.rows.length * step + 8)), label);
  const x = (value) => left + (value / (most || 1)) * (right - left);
  let y = 0;
  for (const group of groups) {
    if (group.title) { write(root, 0, y + 17, group.title, "start", "strong bold"); y += 28; }
    for (const { method, parts, low, high, text, tip } of group.rows) {
      const row = svg("g", { class: colour(method) }, tip ? svg("title", {}, `${method.label}: ${tip}`) : null);
      write(row, inset, y + 16, short(method.label, Math.floor(inset / 6.6)), "end");
      const end = x(parts[0]);
      rect(row, "bar", left, y + 4, end - left, step - 8, { rx: 2 });
      if (parts.length > 1) rect(row, "bar second", end, y + 4, x(sum(parts)) - end, step - 8, { rx: 2 });
      if (high > low) {
        const d = `M${x(low)},${y + 8}v8M${x(low)},${y + 12}H${x(high)}M${x(high)},${y + 8}v8`;
        row.append(svg("path", { class: "whisker", fill: "none", d }));
      }
      write(row, x(Math.max(sum(parts), high || 0)) + 7, y + 16, text, "start", "strong");
      root.append(row);
      y += step;
    }
    y += 8;
  }
  return root;
}

function groupsCard() {
  const groups = Object.entries(GROUPS).map(([figure, title]) => ({
    title,
    rows: shown().map((method) => ({ method, ...spread(figuresOf(method, figure)) })).filter((row) => row.n)
      .map((row) => ({ ...row, parts: [row.mean], text: percent(row.mean) })),
  })).filter((group) => group.rows.length);
  return card("Frequent, middling and rare classes", READ.groups,
    groups.length ? barChart(groups, "Accuracy of head, middle and tail per method", 1) : missing(NOT_YET));
}

function costCard(title, read, label, columns, unit) {
  const figure = (value) => String(+value.toPrecision(3));
  const rows = shown().map((method) => {
    const all = (column) => known(method.runs.flatMap((id) => data.rounds[id]?.[column] || []));
    const parts = columns.map((column) => (mean(all(column)) ?? 0) / unit);
    return { method, parts, text: figure(sum(parts)), tip: parts.map(figure).join(" + ") };
  }).filter((row) => sum(row.parts) > 0);
  const most = largest(rows.map((row) => sum(row.parts)));
  return card(title, read, rows.length ? barChart([{ rows }], label, most) : missing("Nothing has been recorded yet."));
}

const costCards = () => [
  costCard("Seconds a round", READ.seconds, "Seconds a round per method", ["train", "evaluate"], 1),
  costCard("Megabytes a client and round", READ.bytes, "Megabytes a client and round per method", ["down", "up"], 1e6),
];

// Heat maps. value(row, column): a number, or null; strength(number): 0 to 1; tipOf(row, column): a title and a line

function heatMap({ label, rows, rowTitle, columns, columnTitle, value, strength, format, tipOf }) {
  const left = 24 + 6.8 * longest(rows, 12), right = chartWidth - 2, top = 24;
  const room = (right - left) / columns.length, tilted = isTilted(columns, room) && columns.length <= 120;
  const step = Math.min(within(room, 15, 24), Math.max(3, 640 / rows.length)), bottom = top + rows.length * step;
  const gap = (size) => (size > 8 ? size - 1 : size);
  const root = canvas(bottom + (tilted ? 80 : 24), label);
  write(root, 0, 13, `${rowTitle} ↓`, "start", "small");
  write(root, right, 13, `${columnTitle} →`, "end", "small");
  rect(root, "axis", left, top, right - left, bottom - top, { fill: "none" });
  rows.forEach((_, r) => columns.forEach((_, c) => {
    const number = value(r, c), x = left + c * room, y = top + r * step;
    if (!number) return;
    const s = strength(number);
    rect(root, "cell", x, y, gap(room), gap(step), { "fill-opacity": (0.1 + 0.9 * s).toFixed(3) });
    const ink = s > 0.7 ? "on" : s > 0.45 ? "dark" : "strong";
    if (room >= 25 && step >= 14) write(root, x + room / 2, y + step / 2 + 4, format(number), "middle", `small ${ink}`);
  }));
  const every = Math.ceil(12 / step);
  rows.forEach((name, r) => {
    if (r % every === 0) write(root, left - 6, top + (r + 0.5) * step + 4, short(name, 12), "end", "small");
  });
  drawNames(root, columns, (c) => left + (c + 0.5) * room, bottom, tilted, room);
  const at = (px, py) => {
    const r = Math.floor((py - top) / step), c = Math.floor((px - left) / room);
    return r >= 0 && c >= 0 && r < rows.length && c < columns.length ? [r, c] : null;
  };
  hoverable(root, at, ([r, c], overlay) => {
    rect(overlay, "pick", left + c * room, top + r * step, room, step);
    const [title, words] = tipOf(r, c);
    return [[html("b", {}, title), words], left, top];
  });
  return root;
}

function holdingCard() {
  const seeds = new Map(); // of each split
  for (const run of setting().methods.flatMap(runsOf)) if (data.splits[run.split]) seeds.set(run.split, run.seed);
  const title = "Who holds what";
  if (!seeds.size) return card(title, READ.holding, missing("The data of this run has not been prepared yet."));
  const name = seeds.has(chosen.split) ? chosen.split : [...seeds.keys()][0];
  if (!data.splits[name].known) return card(title, READ.holding, missing("Only the sites know: the data is theirs."));
  const { order, class_names: names, class_counts: totals, client_names: clients, client_counts: counts } =
    data.splits[name];
  if (!counts.length) return card(title, READ.holding, missing(TOO_MANY));
  const most = Math.log(largest(counts.flat()) + 1);
  const map = heatMap({
    label: "Training examples of each client and class",
    rows: clients, rowTitle: "client",
    columns: order.map((c) => names[c]), columnTitle: "class, from head to tail",
    value: (client, i) => counts[client][order[i]], strength: (count) => Math.log(count + 1) / most, format: compact,
    tipOf: (client, i) => [`client ${clients[client]}, class ${names[order[i]]}`,
      `${plural(counts[client][order[i]], "example")} of ${totals[order[i]]}`],
  });
  const seedChoice = choice("split", "the split of", [...seeds].map(([key, seed]) => [key, `seed ${seed}`]), name);
  return card(title, READ.holding, seedChoice, map, note(`Split ${name.slice(0, 16)}: every method met the same one.`));
}

function confusionCard() {
  const title = "What is taken for what";
  const having = setting().methods.filter((method) => splitOf(method) && runsOf(method).some((run) => run.confusion));
  if (!having.length) {
    return card(title, READ.confusion, missing((anySplit()?.order.length ?? 0) > DRAWN ? TOO_MANY : notThere()));
  }
  const method = having.find((m) => m.label === chosen.matrix) || having.find((m) => look(m) === 0) || having[0];
  const { order, class_names } = splitOf(method), names = order.map((c) => class_names[c]);
  const matrices = known(runsOf(method).map((run) => run.confusion));
  const counts = order.map((a) => order.map((b) => sum(matrices.map((matrix) => matrix[a][b]))));
  const share = (r, c) => (sum(counts[r]) ? counts[r][c] / sum(counts[r]) : null);
  const map = heatMap({
    label: `Confusion matrix of ${method.label}`,
    rows: names, rowTitle: "true", columns: names, columnTitle: "said",
    value: share, strength: (s) => s, format: (s) => (s >= 0.005 ? String(Math.round(100 * s)) : ""),
    tipOf: (r, c) => [`${names[r]} taken for ${names[c]}`,
      `${percent(share(r, c))} % (${counts[r][c]} of ${sum(counts[r])})`],
  });
  const seeds = matrices.length > 1 ? `, ${matrices.length} runs together` : "";
  return card(title, READ.confusion, methodChoice("matrix", having, method), map,
    note(`In %, of the final model${seeds}.`));
}

// What `redgrape evaluate` adds

const evaluated = (name) => setting().methods.filter((method) => runsOf(method).some((run) => run[name]?.length));

function evaluatedCards() {
  const cards = known([sitesCard(), reliabilityCard()]);
  return cards.length ? [heading("The final models, looked at closely"), ...cards] : [];
}

function sitesOf(method) {
  const rows = runsOf(method).flatMap((run) => run.sites || []);
  return [...new Set(rows.map((row) => row.site))].map((site) => {
    const here = rows.filter((row) => row.site === site), of = (name) => mean(known(here.map((row) => row[name])));
    return { site, ...Object.fromEntries(["examples", ...Object.keys(FIGURES)].map((name) => [name, of(name)])) };
  }).sort((a, b) => b.examples - a.examples);
}

function sitesCard() {
  const having = evaluated("sites"), figures = ["accuracy", "balanced", "macro_f1", "tail"];
  if (!having.length) return null;
  const titles = figures.map((figure) => `${FIGURES[figure]}, %`), few = 10;
  const worst = having.map((method) => {
    const all = sitesOf(method), many = all.filter((row) => row.examples >= few), rows = many.length ? many : all;
    return [wide(method.label), ...figures.map((figure) => {
      const lowest = rows.filter((row) => row[figure] !== null).sort((a, b) => a[figure] - b[figure])[0];
      return lowest ? `${percent(lowest[figure])} (${lowest.site})` : "–";
    })];
  });
  const tables = having.map((method) => details(`sites ${method.label}`, `${method.label}: every site`,
    table(["site", "test examples", ...titles], sitesOf(method).map((row) =>
      [wide(row.site), Math.round(row.examples), ...figures.map((figure) => percent(row[figure]))]))));
  return card("The worst site", READ.sites, table(["method", ...titles], worst),
    note(`The lowest of all sites with at least ${few} test examples.`), ...tables);
}

function reliabilityCard() {
  const having = evaluated("reliability");
  if (!having.length) return null;
  const method = having.find((m) => m.label === chosen.reliable) || having.find((m) => look(m) === 0) || having[0];
  const run = runsOf(method).find((one) => one.reliability?.length), left = 40, top = 26;
  const side = Math.min(chartWidth - left - 12, 420), bottom = top + side;
  const x = (share) => left + share * side, y = (share) => bottom - share * side;
  const root = canvas(bottom + 40, `Reliability of ${method.label}`);
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    line(root, "grid", left, y(tick), left + side, y(tick));
    write(root, left - 6, y(tick) + 4, String(100 * tick), "end");
    write(root, x(tick), bottom + 17, String(100 * tick));
  }
  write(root, x(0.5), bottom + 35, "highest probability, %");
  write(root, 0, 12, "right, %", "start");
  root.append(svg("path", { class: "whisker", fill: "none", "stroke-dasharray": "2 4", d: `M${x(0)},${y(0)}L${x(1)},${y(1)}` }));
  const rows = [];
  run.reliability.forEach(({ title, ece, bins }, i) => {
    const points = bins.filter(([n]) => n), at = points.map(([, p, right]) => [x(p), y(right)]);
    const group = svg("g", { class: i ? "m1" : colour(method) },
      svg("polyline", { class: "line", fill: "none", points: pointsOf(at), "stroke-dasharray": i ? "7 4" : null }));
    at.forEach(([px, py], j) => group.append(svg("path", { class: "dot", d: MARKERS[i], transform: `translate(${px},${py})` },
      svg("title", {}, `${plural(points[j][0], "example")}: right ${percent(points[j][2])} %`))));
    root.append(group);
    rows.push(...points.map(([n, p, right]) => [wide(title || "the model"), n, percent(p), percent(right)]));
  });
  const errors = run.reliability.map(({ title, ece }) => `${title || "error"}: ${percent(ece)} %`).join(", ");
  return card("Is it as sure as it is right?", READ.reliability, methodChoice("reliable", having, method), root,
    note(`Expected calibration error, seed ${run.seed}: ${errors}.`
      + (run.reliability.length > 1 ? " Dashed: after calibration on validation examples." : "")),
    asTable("reliability", ["", "examples", "highest probability, %", "right, %"], rows));
}

// Class rows

const releasing = (id) => data.rounds[id]?.age?.some((ages) => ages);

function classRowCards() {
  const having = setting().methods.filter((method) => method.runs.some(releasing));
  return having.length ? [heading("Class rows"), agesCard(having)] : [];
}

function agesCard(having) {
  const title = "Age of what is known of a class";
  const runs = having.flatMap((method) => method.runs.filter(releasing)
    .map((id) => [id, `${method.label}, seed ${data.runs[id].seed}`]));
  const id = runs.some(([key]) => key === chosen.ages) ? chosen.ages : runs[0][0];
  const { order, class_names: names } = data.splits[data.runs[id].split], { round, age } = data.rounds[id];
  const oldest = largest([0, ...age.map((ages) => largest((ages || []).map((a) => a ?? 0)))]);
  const runChoice = choice("ages", "run", runs, id);
  if (!oldest) {
    const fresh = `In each of the ${round.length} rounds enough clients reported every class that there is: all were fresh.`;
    return card(title, READ.ages, runChoice, missing(fresh));
  }
  const room = within(Math.floor(chartWidth / 14), 12, 60), width = Math.ceil(round.length / room);
  const spans = range(Math.ceil(round.length / width))
    .map((s) => range(round.length).slice(s * width, (s + 1) * width));
  const eldest = (i, s) => largest(spans[s].map((t) => age[t]?.[order[i]] ?? 0));
  const named = (span) => [...new Set([round[span[0]], round[span[span.length - 1]]])].join(" to ");
  const map = heatMap({
    label: "Age of what is known of each class over the rounds",
    rows: order.map((c) => names[c]), rowTitle: "class",
    columns: spans.map((span) => String(round[span[0]])), columnTitle: "round",
    value: eldest, strength: (rounds) => rounds / oldest, format: String,
    tipOf: (i, s) => [`${names[order[i]]}, round ${named(spans[s])}`, `${plural(eldest(i, s), "round")} old at most`],
  });
  return card(title, READ.ages, runChoice, map, note(`The oldest was ${plural(oldest, "round")} old.`));
}

// Suites: the tables that they are there for

const suites = () => data.suites || [];

// "+3.30 [-4.00, +10.59], not separated", with the interval on a line of its own and the remark on the next if need be
const unbroken = (words) => words.replace(/ (?!\(|not |too )/g, "\u00a0");
const withInterval = (words) => {
  const [value, interval] = words.split(" [");
  return [unbroken(value), interval ? html("span", { class: "interval" }, unbroken(` [${interval}`)) : null];
};

function suiteCard(suite) {
  const place = ([words, bold], i) => i
    ? html("td", { class: bold ? "best" : null }, ...withInterval(words))
    : html("th", { class: bold ? "best" : null, scope: "row" }, words);
  const blocks = suite.blocks.flatMap(({ title, header, rows }) =>
    [title ? html("h4", {}, title) : null, table(header, rows.map((row) => row.map(place)))]);
  return html("section", { class: "card suite" },
    html("h3", {}, suites().length > 1 ? suite.title : "The table"), ...blocks,
    html("ul", { class: "caption" }, suite.caption.map((words) => html("li", {}, words))),
    suite.not_run.length ? details(`not run ${suite.title}`, `${plural(suite.not_run.length, "cell")} not run`,
      table(["cell", "why"], suite.not_run.map((row) => row.map(wide)))) : null);
}

// Results, data, commands

function resultsCard() {
  const methods = setting().methods, runs = methods.flatMap(runsOf), figures = Object.keys(FIGURES);
  const averaged = [...new Set(runs.map((run) => run.averaged).filter(Boolean))];
  const seeds = methods.map((method) => figuresOf(method, "accuracy").length);
  const ofBest = runs.every((run) => run.is_best);
  const last = averaged.length !== 1 ? "evaluated rounds" : averaged[0] === 1 ? "round" : `${averaged[0]} evaluated rounds`;
  const over = largest(seeds) > 1 ? ", mean ± standard deviation over seeds" : "";
  const words = [
    `Accuracy on the test set, ${ofBest ? "of the best round by validation" : `mean of the last ${last}`}${over}.`,
    methods.length > 1 ? "The highest mean of a column is in bold." : null,
    methods.length > 1 && smallest(seeds) < 3 ? "So few seeds cannot tell methods apart whose figures are near." : null,
    runs.some((run) => run.state !== "finished")
      ? "Runs that are not finished stand with the rounds that they have done, and their figures of now." : null,
    methods.some((method) => method.label.endsWith("†")) ? "† uses extra balanced data at the server." : null,
    ...(setting().notes || []).map((note) => `Note: ${note}.`),
  ];
  const best = figures.map((figure) => largest(known(methods.map((method) => mean(figuresOf(method, figure))))));
  const rows = methods.map((method) => {
    const cells = figures.map((figure, i) => {
      const isBest = methods.length > 1 && mean(figuresOf(method, figure)) === best[i];
      return html("td", { class: isBest ? "best" : null }, method.cells[i]);
    });
    const finished = runsOf(method).every((run) => run.state === "finished");
    const progress = runsOf(method).map((run) => `${run.done}/${run.rounds}`).join(", ");
    return [wide(method.label), ...cells, finished ? plural(seedsOf(runsOf(method)).length, "seed") : progress];
  });
  return card("Results", known(words).join(" "),
    table(["method", ...Object.values(FIGURES).map((title) => `${title}, %`), "runs"], rows));
}

function overviewCard() {
  if (data.settings.length < 2) return null;
  const column = Object.keys(FIGURES).indexOf(chosen.figure), labels = [...looks.keys()];
  const rows = data.settings.map((s) =>
    [wide(s.title), ...labels.map((label) => s.methods.find((m) => m.label === label)?.cells[column] ?? "")]);
  const settings = data.settings.map((s, i) => [String(i), s.title]);
  return card(`All settings: ${FIGURES[chosen.figure].toLowerCase()} accuracy`, READ.overview, figureButtons(),
    table(["setting", ...labels], rows), choice("setting", "show", settings, String(data.settings.indexOf(setting()))));
}

function aboutCard() {
  const runs = setting().methods.flatMap(runsOf), rejected = sum(runs.map((run) => run.rejected));
  const versions = [...new Set(runs.flatMap((run) => run.versions))].join(", ");
  const facts = [...setting().facts, ["Made with", versions || "–"]];
  if (rejected) facts.push(["Rejected updates", `${rejected}; the server left them out`]);
  const rows = facts.map(([name, value]) => html("tr", {}, html("td", {}, name), html("td", {}, value)));
  return card("What was run", READ.about, html("table", { class: "facts" }, html("tbody", {}, rows)),
    ...setting().methods.map((method) => details(`hyper ${method.label}`, `${method.label}: its hyper-parameters`,
      table(["hyper-parameter", "value"], method.hyper.map(([name, value]) => [name, wide(value)])))));
}

function tailCard() {
  const split = anySplit();
  if (!split || !split.known) return null;
  const order = split.order, names = order.map((c) => split.class_names[c]);
  const counts = order.map((c) => split.class_counts[c]);
  const left = 8, right = chartWidth - 8, top = 40, bottom = 190, room = (right - left) / order.length;
  const tilted = isTilted(names, room), most = largest(counts) || 1, x = (i) => left + (i + 0.5) * room;
  const root = canvas(bottom + (tilted ? 82 : 26), "Training examples of each class");
  drawGroups(root, split, left, right, 22, bottom);
  counts.forEach((count, i) => {
    const tall = (count / most) * (bottom - top);
    rect(root, "bar real", x(i) - room * 0.38, bottom - tall, room * 0.76, tall, { rx: room > 8 ? 2 : 0 });
    if (room > 24) write(root, x(i), bottom - tall - 5, compact(count), "middle", isWide() ? "strong" : "small strong");
  });
  drawNames(root, names, x, bottom, tilted, room);
  hoverable(root, (px) => within(Math.floor((px - left) / room), 0, order.length - 1),
    (i) => [[html("b", {}, classTitle(split, order[i]))], x(i), top], order.length);
  return card("A long tail", READ.tail, root);
}

function commandsCard() {
  const methods = setting().methods, lines = (words) => html("pre", { tabindex: "0" }, words.join("\n"));
  const commands = lines(methods.flatMap((method) => method.commands));
  const descriptions = methods.map((method) => details(`toml ${method.label}`, method.file, lines([method.toml])));
  if (!suites().length) return card("The commands", READ.commands, commands, ...descriptions);
  return card("The command", READ.suite, lines(suites().map((suite) => suite.command)),
    singleRuns(commands, descriptions));
}

const singleRuns = (commands, descriptions) =>
  details("single runs", "The runs one by one", html("p", { class: "read" }, READ.commands), commands, ...descriptions);

function damagedCard() {
  if (!data.damaged.length) return null;
  return card("Damaged runs", "These could not be read, and are left out.",
    table(["run", "what is wrong"], data.damaged.map((run) => [wide(run.name), wide(run.reason)])));
}

// The page

function head() {
  const here = setting(), many = here.methods.length > 1;
  const count = suites().length, apart = "the charts after that are about one setting at a time";
  const what = count || data.settings.length > 1 ? `${plural(Object.keys(data.runs).length, "run")} in ${plural(data.settings.length, "setting")} `
    + `stand behind the ${count > 1 ? "tables" : "table"}${data.settings.length > 1 ? `; ${apart}` : ""}`
    : `${many ? `${here.methods.length} methods were` : `The method ${here.methods[0].label} was`} trained on `
      + here.title;
  const lead = `${what}. In federated learning the examples stay with the clients: in every round each trains on its own `
    + "and sends an update, and a server merges the updates. Here a few classes have most of the examples and others "
    + "hardly any, so that a model easily ignores the rare ones. This page shows how each method fares on both.";
  return [
    html("p", { class: "mark" }, "redgrape report"),
    html("h1", {}, count ? (count > 1 ? plural(count, "suite") : suites()[0].title)
      : data.settings.length > 1 ? plural(data.settings.length, "setting") : here.title),
    html("p", { class: "lead" }, lead),
  ];
}

function legend() {
  const buttons = setting().methods.map((method) => toggle(`legend ${method.label}`, isShown(method), () => {
    if (!chosen.hidden.delete(method.label)) chosen.hidden.add(method.label);
    render();
  }, sample(method), method.label));
  const controls = html("div", { class: "controls", role: "group", "aria-label": "Methods shown" }, buttons);
  return html("div", { class: "legend" }, controls);
}

function charts() {
  if (!data.settings.length) return [damagedCard()];
  const named = data.live || data.settings.length > 1 || suites().length ? heading(setting().title) : null;
  const compared = shown().length
    ? [heading("Accuracy"), roundsCard(), groupsCard(), perClassCard(), heading("Where mistakes come from"),
      confusionCard(), normsCard(), ...evaluatedCards()]
    : [missing("Every method is switched off; switch one on above.")];
  return [
    ...suites().map(suiteCard), overviewCard(), named, resultsCard(), legend(), ...compared,
    heading("Data"), aboutCard(), tailCard(), holdingCard(), ...classRowCards(),
    ...(shown().length ? [heading("Cost"), ...costCards()] : []),
    heading("Reproduce it"), commandsCard(), damagedCard(),
  ];
}

function render() {
  hideTip();
  if (data.settings) setLooks();
  measure();
  const focus = document.activeElement?.dataset.key || document.activeElement?.id;
  const boxes = () => [...page.querySelectorAll(".scroll, .legend .controls")];
  const scrolled = boxes().map((box) => [box.scrollLeft, box.scrollTop]);
  page.replaceChildren(...known([...(data.live ? live.head() : head()), ...(data.settings ? charts() : [])]));
  boxes().forEach((box, i) => { if (scrolled[i]) box.scrollTo(...scrolled[i]); });
  const hadFocus = (candidate) => focus && [candidate.dataset.key, candidate.id].includes(focus);
  [...page.querySelectorAll("[data-key], [id]")].find(hadFocus)?.focus({ preventScroll: true });
}

// Live, for `redgrape serve`: the list of runs, and news of those that are selected

const live = {
  runs: null, // null: not asked yet
  selected: new Set(),
  touched: false, // whether the selection is the reader's own
  problem: null,
  drawn: null,

  head() {
    const list = !live.runs ? note("Reading the runs …")
      : !live.runs.length ? missing("There is no run here yet. `redgrape run` makes one, and it appears by itself.")
        : table(["", "run", "state", "rounds", "method", "seed", "overall, %", "tail, %"], live.runs.map(live.row));
    const read = live.problem || "Select the runs to draw below. The page asks for news every two seconds.";
    return [
      html("p", { class: "mark" }, "redgrape serve"), html("h1", {}, `Runs of ${data.folder}`),
      html("section", { class: "card runs" }, html("h3", {}, "Runs"), html("p", { class: "read" }, read), list),
    ];
  },

  row(run) {
    const change = () => {
      live.touched = true;
      if (!live.selected.delete(run.id)) live.selected.add(run.id);
      history.replaceState(null, "", `#${[...live.selected].map(encodeURIComponent).join(",")}`);
      live.ask();
    };
    const damaged = run.state === "damaged", names = { "aria-label": `show ${run.name}`, "data-key": `run ${run.id}` };
    const box = html("input", { type: "checkbox", ...names, disabled: damaged ? "" : null, change });
    box.checked = live.selected.has(run.id);
    const state = html("td", {}, html("span", { class: `state ${run.state}` }, run.state));
    const first = [html("td", {}, box), wide(run.name), state];
    if (damaged) return [...first, html("td", { class: "wide reason", colspan: 5 }, run.reason)];
    const bar = html("progress", { max: run.rounds, value: run.done });
    const progress = html("td", {}, bar, `${run.done} / ${run.rounds}`);
    return [...first, progress, run.method, run.seed, percent(run.result.accuracy), percent(run.result.tail)];
  },

  // What the address names; else the runs of the setting in which something happened last.
  recall() {
    const there = live.runs.filter((run) => run.state !== "damaged");
    let named = [];
    try { named = location.hash.slice(1).split(",").map(decodeURIComponent); } catch { /* not of this page */ }
    const newest = [...there].sort((a, b) => b.changed - a.changed)[0];
    const wanted = there.filter((run) => named.includes(run.id));
    const found = wanted.length ? wanted : there.filter((run) => run.setting === newest?.setting);
    live.selected = new Set(found.map((run) => run.id));
  },

  async fetch(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  },

  merge(news) {
    const there = ([id]) => news.there.includes(id), rounds = {};
    for (const [id, { from, columns }] of Object.entries(news.rounds)) {
      const old = data.rounds?.[id] || {};
      const joined = ([name, values]) => [name, [...(old[name] || []).slice(0, from), ...values]];
      rounds[id] = Object.fromEntries(Object.entries(columns).map(joined));
    }
    data.runs = Object.fromEntries(Object.entries({ ...data.runs, ...news.runs }).filter(there));
    data.splits = { ...data.splits, ...news.splits };
    Object.assign(data, { rounds, settings: news.settings, damaged: news.damaged });
  },

  async ask() {
    try {
      live.runs = (await live.fetch("/runs")).sort((a, b) => (b.state === "training") - (a.state === "training"));
      if (!live.selected.size && !live.touched) live.recall();
      const query = live.runs.filter((run) => live.selected.has(run.id)).map(({ id }) => {
        const rows = data.rounds?.[id]?.round?.length || 0, stamp = data.runs?.[id]?.stamp || "";
        return `run=${encodeURIComponent(id)}&rows=${rows}&stamp=${stamp}`;
      });
      live.merge(await live.fetch(`/news?${query.join("&")}`));
      live.problem = null;
    } catch (error) {
      live.problem = `No news: ${error.message}. Is \`redgrape serve\` still running? The page goes on asking.`;
    }
    const now = JSON.stringify([live.runs, live.problem, [...live.selected]]);
    if (now !== live.drawn) render();
    live.drawn = now;
  },

  async start() {
    render();
    for (;;) {
      if (!document.hidden) await live.ask();
      await new Promise((wake) => setTimeout(wake, 2000));
    }
  },
};

let drawnFor = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawnFor) { drawnFor = innerWidth; render(); } });
if (data.live) live.start();
else render();

"use strict";
// Draws the charts of #data on #canvas and lets the reader zoom, move and ask. All times of the
// data are in its own unit; `factor` makes them readable.

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas");
const pen = canvas.getContext("2d");
const tip = document.getElementById("tip");
const shown = {
  messages: document.getElementById("messages"),
  critical: document.getElementById("critical"),
};

const LEFT = 92, RIGHT = 124, TOP = 34, FOOT = 34, LANE = 22, MEMORY = 16, GAP = 8;
const NAME = { size: 14, bold: true }, FACTS = { colour: "#555" }, LINE = 17;
const STEP = LANE + MEMORY + GAP;
const LINK = 12, LINK_STEP = LINK + 3; // a lane for each link, beneath all ranks
const LENGTH = Math.max(...data.charts.map((chart) => chart.makespan)) || 1;
const [STAGE, OP, MICROBATCH, START, END, STYLE, WAITED_RANK, WAITED_AT, READY, PART] = Array(10).keys();
// Of two that run together each has half of the lane; collectives run beside it.
const LOWER = 2, BESIDE = 3;
const [SOURCE, MAKER, TARGET, SENT, OFF] = Array(5).keys(); // of a message on a link

let view = { from: 0, to: LENGTH };
let hovered = null; // { chart, rank, at } or { chart, link, message }
let width = 0;
let height = 0;

const longest = (names) => names.reduce((most, name) => Math.max(most, name.length), 1);

// ── where things are ──

for (const chart of data.charts) {
  chart.most = Math.max(0, ...chart.peaks);
  // The places of the boxes in each lane, in order of time.
  chart.lanes = chart.rows.map((row) => [...row.keys()].filter((at) => row[at][PART] !== BESIDE));
  chart.bands = chart.rows.map((row) => [...row.keys()].filter((at) => row[at][PART] === BESIDE));
  chart.path = criticalPath(chart);
  // Letters of the longest number and of the longest label, so that all boxes are written alike.
  const boxes = chart.rows.flat();
  chart.digits = longest(boxes.map((box) => String(box[MICROBATCH] ?? "")));
  chart.letters = longest(boxes.map(label));
  const lengths = boxes.map((box) => box[END] - box[START]).sort((a, b) => a - b);
  chart.usual = lengths[Math.floor(lengths.length / 10)] ?? 0;
}

// Anew for each width, for a narrow page needs more lines of title.
function layOut() {
  let y = 0;
  for (const chart of data.charts) {
    const room = Math.max(width - LEFT - 8, 1);
    const name = broken([chart.name], room, "", NAME);
    const facts = broken(chart.facts.split(" · "), room, " · ", FACTS);
    const beside = wide(name.at(-1), NAME) + 12;
    const joined = facts.length === 1 && beside + wide(facts[0], FACTS) <= room;
    const after = name.length - (joined ? 1 : 0); // the line on which the facts begin
    const place = (at) => y + TOP - 12 + at * LINE;
    chart.title = [
      ...name.map((line, at) => [line, 0, place(at), NAME]),
      ...facts.map((line, at) => [line, joined ? beside : 0, place(after + at), FACTS]),
    ];
    chart.top = y + TOP + (after + facts.length - 1) * LINE;
    y = linkY(chart, chart.links.length) + FOOT;
  }
  height = y;
}

// Text in lines that fit, broken between parts, else words, else letters.
function broken(parts, room, between, style) {
  const lines = [];
  const fits = (line) => wide(line, style) <= room;
  for (const part of parts) {
    if (lines.length && fits(lines.at(-1) + between + part)) {
      lines[lines.length - 1] += between + part;
      continue;
    }
    lines.push("");
    for (const word of part.split(" ")) {
      const last = lines.at(-1), joined = last ? last + " " + word : word;
      if (fits(joined)) {
        lines[lines.length - 1] = joined;
        continue;
      }
      if (last) lines.push("");
      for (const letter of word) {
        if (lines.at(-1) && !fits(lines.at(-1) + letter)) lines.push("");
        lines[lines.length - 1] += letter;
      }
    }
  }
  return lines;
}

const pixels = () => (width - LEFT - RIGHT) / (view.to - view.from);
const toX = (time) => LEFT + (time - view.from) * pixels();
const toTime = (x) => view.from + (x - LEFT) / pixels();
const laneY = (chart, rank) => chart.top + rank * STEP;
const linkY = (chart, link) => laneY(chart, chart.rows.length) + link * LINK_STEP;

// The first of `count` things in order of time that ends after `time`.
function firstAfter(count, end, time) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end(middle) > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The places in `row` of those of `places` that are in view, in order of time.
function* inView(row, places) {
  const first = firstAfter(places.length, (at) => row[places[at]][END], view.from);
  for (let at = first; at < places.length && row[places[at]][START] < view.to; at++) yield places[at];
}

// The top and the height of a box, in its rank.
function spanOf(box) {
  if (box[PART] === BESIDE) return [LANE + 1, 5];
  return box[PART] ? [box[PART] === LOWER ? LANE / 2 : 0, LANE / 2] : [0, LANE];
}

function boxAt(x, y) {
  for (const chart of data.charts) {
    const time = toTime(x), link = Math.floor((y - linkY(chart, 0)) / LINK_STEP);
    if (link >= 0 && link < chart.links.length) {
      const { messages } = chart.links[link];
      const at = firstAfter(messages.length, (each) => messages[each][OFF], time);
      return { chart, link, time, message: messages[at]?.[SENT] <= time ? messages[at] : null };
    }
    const rank = Math.floor((y - chart.top) / STEP);
    if (rank < 0 || rank >= chart.rows.length) continue;
    const row = chart.rows[rank], down = (y - chart.top) % STEP;
    const hit = [...chart.lanes[rank], ...chart.bands[rank]].find((at) => {
      const [top, high] = spanOf(row[at]);
      return row[at][START] <= time && time < row[at][END] && top <= down && down < top + high;
    });
    return { chart, rank, time, at: hit ?? null };
  }
  return null;
}

// ── what is said ──

const number = (value) => {
  if (Math.abs(value) >= 1e15) return (+value.toPrecision(4)).toExponential();
  for (const [limit, scale, prefix] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (Math.abs(value) >= limit) return +(value / scale).toPrecision(4) + prefix;
  return String(+value.toPrecision(4));
};
const timeText = (chart, value) => (number(value * chart.factor) + " " + chart.unit).trim();
function label(box) {
  return box[STAGE] + data.ops[box[OP]].name + (box[MICROBATCH] ?? "");
}

function describeLink({ chart, link, time, message }) {
  const { name, messages } = chart.links[link];
  if (!message) return `link ${name}\nfree at ${timeText(chart, time)}`;
  const maker = chart.rows[message[SOURCE]][message[MAKER]];
  const lines = [
    `${label(maker)} from rank ${message[SOURCE]} to rank ${message[TARGET]}`,
    `on the link from ${timeText(chart, message[SENT])} to ${timeText(chart, message[OFF])}`,
  ];
  const late = message[SENT] - maker[END];
  if (late > 1e-9 * LENGTH) lines.push(`waited for the link for ${timeText(chart, late)}`);
  return lines.join("\n");
}

function describe({ chart, rank, time, at }) {
  const held = amountAt(chart.memory[rank], time);
  if (at === null) {
    const state = time < 0 || time > chart.makespan ? "outside the step" : `at ${timeText(chart, time)}`;
    return `rank ${rank}\n${state}\nholds ${number(held)} of activations`;
  }
  const box = chart.rows[rank][at], op = data.ops[box[OP]];
  const of = box[MICROBATCH] === null ? "" : `, microbatch ${box[MICROBATCH]}`;
  const earlier = at - (box[PART] === LOWER ? 2 : 1); // two that run together start together
  const before = earlier >= 0 ? chart.rows[rank][earlier][END] : 0;
  const idle = box[PART] === BESIDE ? 0 : box[START] - before;
  const lines = [
    `${label(box)}: ${op.meaning}, stage ${box[STAGE]}${of}, rank ${rank}`,
    `start ${timeText(chart, box[START])}, end ${timeText(chart, box[END])}, ` +
      `takes ${timeText(chart, box[END] - box[START])}`,
  ];
  if (box[WAITED_RANK] === null) {
    lines.push("waited for nothing");
  } else {
    const maker = chart.rows[box[WAITED_RANK]][box[WAITED_AT]];
    lines.push(
      box[WAITED_RANK] === rank
        ? `waited for ${label(maker)} on its own rank, which ended at ${timeText(chart, maker[END])}`
        : `waited for ${label(maker)} from rank ${box[WAITED_RANK]}, which was there at ` +
            timeText(chart, box[READY]),
    );
  }
  if (idle > 1e-9 * LENGTH) lines.push(`the rank was idle for ${timeText(chart, idle)} before`);
  lines.push(`rank ${rank} holds ${number(amountAt(chart.memory[rank], box[START]))} of activations`);
  return lines.join("\n");
}

function amountAt(steps, time) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle][0] <= time) low = middle + 1;
    else high = middle;
  }
  return low ? steps[low - 1][1] : 0;
}

function criticalPath(chart) {
  let here = null, end = -1;
  chart.rows.forEach((row, rank) =>
    row.forEach((box, at) => {
      if (box[END] > end || (box[END] === end && here[0] === rank)) {
        end = box[END];
        here = [rank, at];
      }
    }),
  );
  const path = [];
  while (here) {
    path.push(here);
    const box = chart.rows[here[0]][here[1]];
    here = box[WAITED_RANK] === null ? null : [box[WAITED_RANK], box[WAITED_AT]];
  }
  return path;
}

// ── drawing ──

const hatch = (() => {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.fillStyle = "#f4f4f4";
  ink.fillRect(0, 0, 6, 6);
  ink.strokeStyle = "#d4d4d4";
  ink.beginPath();
  for (const shift of [-6, 0, 6]) {
    ink.moveTo(shift, 6);
    ink.lineTo(shift + 6, 0);
  }
  ink.stroke();
  return pen.createPattern(tile, "repeat");
})();

function choose({ size = 12, bold = false }) {
  pen.font = `${bold ? "bold " : ""}${size}px Helvetica, Arial, "DejaVu Sans", sans-serif`;
}

function wide(string, style) {
  choose(style);
  return pen.measureText(string).width;
}

function text(string, x, y, { colour = "#000", align = "left", ...style } = {}) {
  choose(style);
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.fillText(string, x, y);
}

function draw() {
  const density = window.devicePixelRatio || 1;
  width = canvas.clientWidth;
  layOut();
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  pen.setTransform(density, 0, 0, density, 0, 0);
  for (const chart of data.charts) drawChart(chart);
  const [chart] = data.charts;
  document.getElementById("range").textContent =
    `time ${timeText(chart, view.from)} to ${timeText(chart, view.to)}`;
}

function drawChart(chart) {
  const bottom = linkY(chart, chart.links.length) - (chart.links.length ? 3 : GAP);
  for (const [line, x, y, style] of chart.title) text(line, LEFT + x, y, style);
  chart.rows.forEach((row, rank) => {
    const y = laneY(chart, rank), stages = chart.stages[rank];
    text(`rank ${rank}`, LEFT - 8, y + LANE / 2 + 4, { align: "right" });
    text(stages, LEFT - 8, y + LANE + MEMORY - 4, { align: "right", size: 10, colour: "#555" });
    text(chart.idle[rank], width - RIGHT + 8, y + LANE / 2 + 4);
    text("peak " + number(chart.peaks[rank]), width - RIGHT + 8, y + LANE + MEMORY - 4,
      { size: 10, colour: "#555" });
  });
  chart.links.forEach(({ name, messages }, link) => {
    const y = linkY(chart, link) + LINK - 2;
    const busy = messages.reduce((sum, each) => sum + each[OFF] - each[SENT], 0) / chart.makespan;
    text(name, LEFT - 8, y, { align: "right", size: 10, colour: "#555" });
    text(`busy ${Math.round(100 * busy)}%`, width - RIGHT + 8, y, { size: 10, colour: "#555" });
  });
  drawAxis(chart, bottom);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, chart.top - 4, width - LEFT - RIGHT, bottom - chart.top + 8);
  pen.clip();
  chart.rows.forEach((row, rank) => drawRank(chart, row, rank));
  chart.links.forEach((lane, link) => drawLink(chart, lane.messages, linkY(chart, link)));
  if (shown.messages.checked) drawMessages(chart);
  if (shown.critical.checked) drawCritical(chart);
  if (hovered?.chart === chart && (hovered.at ?? null) !== null) drawHovered(chart);
  pen.restore();
}

function drawAxis(chart, bottom) {
  const rough = ((view.to - view.from) * chart.factor) / Math.max(2, (width - LEFT - RIGHT) / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  for (let mark = Math.ceil((view.from * chart.factor) / step); ; mark++) {
    const time = (mark * step) / chart.factor;
    if (time > view.to) break;
    pen.fillStyle = "#e4e4e4";
    pen.fillRect(toX(time), chart.top - 4, 1, bottom - chart.top + 8);
    const name = String(+(mark * step).toPrecision(12));
    text(name + (chart.unit && " " + chart.unit), toX(time), bottom + 18, { align: "center", colour: "#555" });
  }
}

function drawRank(chart, row, rank) {
  const y = laneY(chart, rank), floor = y + LANE + MEMORY;
  const left = Math.max(toX(0), LEFT), right = Math.min(toX(chart.makespan), width - RIGHT);
  pen.fillStyle = hatch;
  pen.fillRect(left, y, right - left, LANE);

  if (chart.most > 0) {
    pen.fillStyle = "#c9cdd3";
    pen.beginPath();
    const steps = chart.memory[rank];
    let started = false;
    steps.forEach(([time, amount], at) => {
      const until = at + 1 < steps.length ? steps[at + 1][0] : chart.makespan;
      if (until <= view.from || time >= view.to || until <= time) return;
      const level = floor - ((MEMORY - 2) * Math.max(amount, 0)) / chart.most;
      const x = Math.max(toX(time), left);
      if (!started) pen.moveTo(x, floor);
      started = true;
      pen.lineTo(x, level);
      pen.lineTo(Math.min(toX(until), right), level);
    });
    pen.lineTo(right, floor);
    pen.fill();
  }
  pen.fillStyle = "#999";
  pen.fillRect(left, floor, right - left, 1);

  for (const at of [...inView(row, chart.lanes[rank]), ...inView(row, chart.bands[rank])]) {
    const box = row[at], style = data.styles[box[STYLE]], [top, high] = spanOf(box);
    const x = toX(box[START]), wide = (box[END] - box[START]) * pixels();
    pen.fillStyle = style.fill;
    pen.fillRect(x, y + top, Math.max(wide - Math.min(0.8, 0.12 * wide), 0.5), high);
    if (box[PART] === BESIDE) continue;
    const room = wide - 2;
    const whole = chart.letters * 6.8 <= chart.usual * pixels() - 2;
    const letters = whole ? chart.letters : chart.digits;
    const size = [11, 10, 9, 8, 7].find((size) => letters * size * 0.6 <= room);
    const name = whole ? label(box) : String(box[MICROBATCH] ?? "");
    if (size) {
      text(name, x + wide / 2, y + top + high / 2 + 4, { align: "center", colour: style.ink, size });
    }
  }
}

function drawLink(chart, messages, y) {
  pen.fillStyle = "#f4f4f4";
  pen.fillRect(toX(0), y, toX(chart.makespan) - toX(0), LINK);
  const first = firstAfter(messages.length, (each) => messages[each][OFF], view.from);
  for (let at = first; at < messages.length && messages[at][SENT] < view.to; at++) {
    const message = messages[at], maker = chart.rows[message[SOURCE]][message[MAKER]];
    const x = toX(message[SENT]), wide = (message[OFF] - message[SENT]) * pixels();
    const style = data.styles[maker[STYLE]];
    pen.fillStyle = style.fill;
    pen.fillRect(x, y, Math.max(wide - Math.min(0.8, 0.12 * wide), 0.5), LINK);
    const name = chart.letters * 6.8 <= wide - 2 ? label(maker) : String(maker[MICROBATCH] ?? "");
    const size = [9, 8, 7].find((size) => name.length * size * 0.6 <= wide - 2);
    if (size) text(name, x + wide / 2, y + LINK - 3, { align: "center", colour: style.ink, size });
  }
}

function middle(chart, rank, box) {
  const [top, high] = spanOf(box);
  return laneY(chart, rank) + top + high / 2;
}

function arrow(chart, source, target, colour) {
  const made = chart.rows[source[0]][source[1]], read = chart.rows[target[0]][target[1]];
  const x0 = toX(made[END]), y0 = middle(chart, source[0], made);
  const x1 = toX(read[START]), y1 = middle(chart, target[0], read);
  if (Math.max(x0, x1) < LEFT || Math.min(x0, x1) > width - RIGHT) return;
  pen.strokeStyle = pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
  pen.beginPath();
  pen.arc(x1, y1, 2.2, 0, 7);
  pen.fill();
}

function drawMessages(chart) {
  pen.lineWidth = 0.8;
  for (const [r0, a0, r1, a1] of chart.messages) arrow(chart, [r0, a0], [r1, a1], "#0009");
}

function outline(chart, [rank, at], colour, thick) {
  const box = chart.rows[rank][at], [top, high] = spanOf(box);
  pen.lineWidth = thick;
  pen.strokeStyle = colour;
  pen.strokeRect(toX(box[START]) + 1, laneY(chart, rank) + top + 1,
    Math.max((box[END] - box[START]) * pixels() - 2, 1), high - 2);
}

function drawCritical(chart) {
  chart.path.forEach((here, number) => {
    outline(chart, here, "#000", 2);
    const next = chart.path[number + 1];
    pen.lineWidth = 1.5;
    if (next && next[0] !== here[0]) arrow(chart, next, here, "#000");
  });
}

function drawHovered(chart) {
  const here = [hovered.rank, hovered.at], box = chart.rows[hovered.rank][hovered.at];
  if (box[WAITED_RANK] !== null) {
    const source = [box[WAITED_RANK], box[WAITED_AT]];
    outline(chart, source, "#cc79a7", 3);
    pen.lineWidth = 2;
    arrow(chart, source, here, "#cc79a7");
  }
  outline(chart, here, "#000", 3);
}

// ── what the reader does ──

function look(from, to) {
  const length = Math.min(Math.max(to - from, LENGTH * 1e-5), LENGTH);
  const start = Math.min(Math.max(from, 0), LENGTH - length);
  view = { from: start, to: start + length };
  draw();
}

const zoom = (time, factor) =>
  look(time - (time - view.from) * factor, time + (view.to - time) * factor);

function hover(event) {
  const { left, top } = canvas.getBoundingClientRect();
  const x = event.clientX - left, y = event.clientY - top;
  hovered = x < LEFT || x > width - RIGHT ? null : boxAt(x, y);
  tip.hidden = hovered === null;
  if (hovered) {
    tip.textContent = hovered.link === undefined ? describe(hovered) : describeLink(hovered);
    const { width: wide, height: tall } = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - wide - 8)) + "px";
    const below = event.clientY + 18;
    tip.style.top = (below + tall > window.innerHeight ? event.clientY - tall - 10 : below) + "px";
  }
  draw();
}

let grip = null;
canvas.addEventListener("pointerdown", (event) => {
  grip = { x: event.clientX, y: event.clientY };
  canvas.classList.add("dragging");
  if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!grip) return hover(event);
  const moved = (grip.x - event.clientX) / pixels();
  window.scrollBy(0, grip.y - event.clientY);
  grip = { x: event.clientX, y: event.clientY };
  look(view.from + moved, view.to + moved);
});
for (const name of ["pointerup", "pointercancel"])
  canvas.addEventListener(name, () => {
    grip = null;
    canvas.classList.remove("dragging");
  });
canvas.addEventListener("pointerleave", () => {
  hovered = null;
  tip.hidden = true;
  draw();
});
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { left } = canvas.getBoundingClientRect();
  const sideways = event.shiftKey ? event.deltaY : event.deltaX;
  if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
    look(view.from + sideways / pixels(), view.to + sideways / pixels());
  } else {
    zoom(toTime(event.clientX - left), Math.exp(Math.sign(event.deltaY) * 0.2));
  }
}, { passive: false });
canvas.addEventListener("dblclick", () => look(0, LENGTH));
document.getElementById("fit").addEventListener("click", () => look(0, LENGTH));
canvas.addEventListener("keydown", (event) => {
  const centre = (view.from + view.to) / 2, tenth = (view.to - view.from) / 10;
  const action = {
    "+": () => zoom(centre, 0.8), "=": () => zoom(centre, 0.8), "-": () => zoom(centre, 1.25),
    ArrowLeft: () => look(view.from - tenth, view.to - tenth),
    ArrowRight: () => look(view.from + tenth, view.to + tenth),
    0: () => look(0, LENGTH),
  }[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
});
for (const box of Object.values(shown)) box.addEventListener("change", draw);
window.addEventListener("resize", draw);

for (const { text: string, fills } of data.legend) {
  const item = document.createElement("li");
  for (const fill of fills) {
    const swatch = document.createElement("i");
    if (fill.startsWith("url")) swatch.className = "idle";
    else swatch.style.background = fill;
    item.append(swatch);
  }
  const name = document.createElement("span");
  name.textContent = string;
  item.append(name);
  document.getElementById("legend").append(item);
}
draw();

// The two charts. They draw what the server sent on an even grid of time; a gap in the traffic stays a gap. The only
// sums made here are those of a stack.
"use strict";

const PARTS = ["accept", "canonicalize", "tokenize", "gateway_queue", "connect", "engine_queue", "prefill", "first_sample", "return"];
const SHORT_GAP_S = 30;
const LEAST_WINDOW_S = 120;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name.replace("_", "-")).trim();

function percent(value) {
  return value === null || value === undefined ? "-" : (100 * value).toFixed(1) + " %";
}

function millis(value) {
  if (value === null || value === undefined) return "-";
  if (value >= 10000) return (value / 1000).toFixed(1) + " s";
  if (value >= 100) return Math.round(value).toLocaleString("en") + " ms";
  return value.toFixed(value < 1 ? 2 : 1) + " ms";
}

// Times from the oldest one shown to now, and for each the row of `series` or -1.
function gridOf(series, now) {
  const step = series.step_s;
  const end = Math.floor(now / step) * step;
  const first = series.t.length ? series.t[0] : end;
  const start = Math.max(end - series.window_s, Math.min(first, end - LEAST_WINDOW_S));
  const rows = new Map(series.t.map((second, row) => [second, row]));
  const times = [];
  for (let second = start; second <= end; second += step) times.push(second);
  return { times, rows: times.map((second) => rows.get(second) ?? -1), step };
}

// A column on the grid. uPlot joins over undefined and breaks at null: short silences are joined, long ones are not.
function column(grid, values) {
  const out = grid.rows.map((row) => (row < 0 ? null : values[row]));
  const reach = SHORT_GAP_S / grid.step;
  let last = -1;
  out.forEach((value, i) => {
    if (value === null) return;
    if (last >= 0 && i - last <= reach) out.fill(undefined, last + 1, i);
    last = i;
  });
  return out;
}

class Chart {
  constructor(id, options) {
    this.host = document.getElementById(id);
    this.none = document.createElement("p");
    this.none.className = "none";
    this.none.textContent = "no requests in the last ten minutes";
    this.host.append(this.none);
    this.options = options;
    this.plot = null;
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.remake());
  }

  size() {
    return { width: Math.max(240, this.host.clientWidth), height: 220 };
  }

  remake() {
    if (!this.plot) return;
    const data = this.plot.data;
    this.plot.destroy();
    this.plot = null;
    this.draw(data);
  }

  draw(data) {
    this.none.hidden = data.slice(1).some((values) => values.some((value) => value !== null && value !== undefined));
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot({ ...this.size(), ...this.options() }, data, this.host);
  }
}

function axis(more) {
  const line = colour("line");
  return { stroke: colour("soft"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 5 }, ...more };
}

const timeAxis = () => axis({ space: 70, values: (self, ticks) => ticks.map((tick) => clock(tick, tick % 60 !== 0)) });

function clock(second, exact = true) {
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (exact) options.second = "2-digit";
  return new Date(1000 * second).toLocaleTimeString("en-GB", options);
}

const LINES = [
  ["delivered_ratio", "delivered", { colour: "warm" }],
  ["potential_ratio", "with what enforce would recover", { colour: "cool", dash: [6, 4] }],
  ["original_ratio", "without canonicalization", { colour: "soft", dash: [2, 3] }],
];

const hitChart = new Chart("hit-chart", () => ({
  legend: { show: false },
  padding: [10, 26, 0, 0],
  scales: { y: { range: [0, 1] } },
  axes: [timeAxis(), axis({ size: 52, values: (self, ticks) => ticks.map((tick) => Math.round(100 * tick) + " %") })],
  series: [{}, ...LINES.map(([name, label, style]) => ({
    label, stroke: colour(style.colour), width: 2, dash: style.dash, fill: style.dash ? undefined : colour(style.colour) + "1f",
  }))],
  hooks: { setCursor: [(self) => drawLines(self.cursor.idx)] },
}));

let lines = { grid: null, series: null };

function drawHit(series, now) {
  const grid = gridOf(series, now);
  lines = { grid, series };
  hitChart.draw([grid.times, ...LINES.map(([name]) => column(grid, series[name]))]);
  drawLines(hitChart.plot.cursor.idx);
}

// The lines' values: under the cursor, else the latest.
function drawLines(index) {
  const { grid, series } = lines;
  const pointed = index === null || index === undefined ? -1 : grid.rows[index];
  const row = pointed >= 0 ? pointed : series.t.length - 1;
  document.getElementById("hit-when").textContent = row < 0 ? "latest" : (pointed >= 0 ? "at " : "latest, at ") + clock(series.t[row]);
  document.getElementById("hit-legend").replaceChildren(
    ...LINES.map(([name, label, style]) => legendItem(label, percent(row < 0 ? null : series[name][row]), style.colour)),
  );
}

// Stacked bars: the k-th series is as high as parts 1..k together; the highest is painted first.
const ttftChart = new Chart("ttft-chart", () => {
  const bars = uPlot.paths.bars({ size: [0.9, 40], align: 1 });
  return {
    legend: { show: false },
    padding: [10, 26, 0, 0],
    scales: { y: { range: (self, low, high) => [0, 1.08 * (high || 10)] } },
    axes: [timeAxis(), axis({ size: 78, values: (self, ticks) => ticks.map((tick) => tick.toLocaleString("en") + " ms") })],
    series: [{}, ...PARTS.slice().reverse().map((name) => ({ label: name, fill: colour(name), width: 0, paths: bars, points: { show: false } }))],
    hooks: { setCursor: [(self) => drawLegend(undefined, self.cursor.idx)] },
  };
});

let bars = { grid: null, parts: null };
let means = [];

function drawTtft(series, now) {
  const grid = gridOf(series, now);
  bars = { grid, parts: series.parts_ms };
  const stack = PARTS.map(() => []);
  for (const row of grid.rows) {
    const known = row >= 0 && PARTS.some((name) => series.parts_ms[name][row] !== null);
    let height = 0;
    PARTS.forEach((name, part) => {
      height += known ? series.parts_ms[name][row] || 0 : 0;
      stack[part].push(known ? height : null);
    });
  }
  ttftChart.draw([grid.times, ...stack.reverse()]);
}

// The parts' means since the start; under the cursor, those of the bar that it points at.
function drawLegend(given = means, index = null) {
  means = given;
  const row = index === null || index === undefined || !bars.grid ? -1 : bars.grid.rows[index];
  const shown = row >= 0 ? PARTS.map((name) => bars.parts[name][row]) : PARTS.map((name) => means.find((mean) => mean.part === name)?.mean_ms);
  document.getElementById("ttft-when").textContent = row >= 0 ? "mean at " + clock(bars.grid.times[index]) : "mean since the start";
  const items = PARTS.map((name, part) => legendItem(name.replace("_", " "), millis(shown[part]), name));
  const known = shown.filter((value) => value !== null && value !== undefined);
  items.push(legendItem("together", millis(known.length ? known.reduce((sum, value) => sum + value, 0) : null), null));
  document.getElementById("ttft-legend").replaceChildren(...items);
}

function legendItem(label, text, name) {
  const item = document.createElement("li");
  const figure = document.createElement("b");
  figure.textContent = text;
  if (name) {
    const swatch = document.createElement("i");
    swatch.style.background = colour(name);
    item.append(swatch);
    item.dataset.part = name;
  } else {
    item.className = "total";
  }
  item.append(label, figure);
  return item;
}

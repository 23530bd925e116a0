// The dashboard: polls /admin/state once a second and draws it. Every text goes through textContent, so nothing that a
// request or a policy says can become markup. All figures come from the server; this file computes no rates of its own.
"use strict";

const POLL_MS = 1000;
const PARTS = [
  ["accept", "#868e96"], ["canonicalize", "#ae3ec9"], ["tokenize", "#7048e8"], ["gateway_queue", "#4263eb"],
  ["connect", "#1098ad"], ["engine_queue", "#0ca678"], ["prefill", "#f76707"], ["first_sample", "#fab005"], ["return", "#adb5bd"],
];
const byId = (id) => document.getElementById(id);
const percent = (value) => (value === null || value === undefined ? "-" : (100 * value).toFixed(1) + " %");
const count = (value) => (value === null || value === undefined ? "-" : Math.round(value).toLocaleString("en"));
const millis = (value) => (value === null || value === undefined ? "-" : value < 10 ? value.toFixed(1) + " ms" : Math.round(value).toLocaleString("en") + " ms");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function duration(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " min";
  return (whole / 3600).toFixed(1) + " h";
}

function cell(value, className) {
  const td = document.createElement("td");
  if (value instanceof Node) td.append(value);
  else td.textContent = value;
  if (className) td.className = className;
  return td;
}

function fill(id, rows, none) {
  const body = byId(id).tBodies[0];
  const made = rows.map((cells) => {
    const tr = document.createElement("tr");
    tr.append(...cells);
    return tr;
  });
  if (!made.length) {
    const tr = document.createElement("tr");
    const td = cell(none, "empty");
    td.colSpan = byId(id).tHead.rows[0].cells.length;
    tr.append(td);
    made.push(tr);
  }
  body.replaceChildren(...made);
}

function blockBar(replica) {
  const bar = document.createElement("span");
  bar.className = "bar";
  const total = replica.total_blocks || 1;
  const pinned = replica.pinned_blocks || 0;
  const parts = [["pinned", pinned], ["used", replica.used_blocks || 0], ["cached", Math.max(0, (replica.cached_blocks || 0) - pinned)]];
  for (const [name, blocks] of parts) {
    const piece = document.createElement("i");
    piece.className = name;
    piece.style.width = (100 * blocks / total).toFixed(2) + "%";
    bar.append(piece);
  }
  bar.title = `${pinned} pinned, ${replica.used_blocks || 0} in use, ${replica.cached_blocks || 0} cached, ${replica.free_blocks || 0} free of ${replica.total_blocks || 0} blocks`;
  return bar;
}

function code(text) {
  const element = document.createElement("code");
  element.textContent = text;
  return element;
}

const axes = () => [
  { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 } },
  { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 } },
];

function chart(id, options, data) {
  const host = byId(id);
  const size = () => ({ width: Math.max(300, host.clientWidth), height: 240 });
  const plot = new uPlot({ ...size(), ...options }, data, host);
  new ResizeObserver(() => plot.setSize(size())).observe(host);
  return plot;
}

let hitChart = null;
let ttftChart = null;

function drawHit(series) {
  const data = [series.t, series.delivered_ratio, series.recoverable_ratio, series.recovered_ratio];
  if (hitChart) return hitChart.setData(data);
  const ratio = (self, value) => percent(value);
  const [x, y] = axes();
  hitChart = chart("hit-chart", {
    scales: { y: { range: [0, 1] } },
    axes: [x, { ...y, values: (self, ticks) => ticks.map((tick) => Math.round(100 * tick) + " %") }],
    series: [
      {},
      { label: "delivered", stroke: ink("--warm"), width: 2, fill: ink("--warm") + "22", value: ratio, spanGaps: true },
      { label: "could be recovered", stroke: ink("--cool"), width: 1.5, dash: [5, 4], value: ratio, spanGaps: true },
      { label: "recovered", stroke: ink("--good"), width: 1.5, value: ratio, spanGaps: true },
    ],
  }, data);
}

// Stacked: part k is drawn as the sum of parts k..last, so that the last series painted is the thinnest band.
function drawTtft(series) {
  const stacked = PARTS.map(() => []);
  for (let i = 0; i < series.t.length; i += 1) {
    let sum = 0;
    let known = false;
    const heights = PARTS.map(([name]) => {
      const value = series.parts_ms[name][i];
      if (value !== null) known = true;
      sum += value || 0;
      return sum;
    });
    heights.forEach((height, part) => stacked[part].push(known ? height : null));
  }
  const data = [series.t, ...stacked.slice().reverse()];
  if (ttftChart) return ttftChart.setData(data);
  const [x, y] = axes();
  const colours = PARTS.slice().reverse();
  ttftChart = chart("ttft-chart", {
    legend: { show: false },
    axes: [x, { ...y, size: 60, values: (self, ticks) => ticks.map((tick) => tick + " ms") }],
    scales: { y: { range: (self, low, high) => [0, Math.max(10, high || 0)] } },
    series: [{}, ...colours.map(([name, colour]) => ({ label: name, stroke: colour, fill: colour, width: 1, spanGaps: true, points: { show: false } }))],
  }, data);
}

function drawLegend(parts) {
  byId("ttft-legend").replaceChildren(...PARTS.map(([name, colour]) => {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = colour;
    const found = parts.find((part) => part.part === name);
    item.append(swatch, `${name.replace("_", " ")} ${millis(found ? found.mean_ms : null)}`);
    item.dataset.part = name;
    return item;
  }));
}

function draw(state) {
  const totals = state.totals;
  byId("policy-version").textContent = state.policy.version;
  byId("uptime").textContent = duration(state.uptime_s);
  byId("hit-rate").textContent = percent(totals.hit_ratio);
  const enforced = state.routes.some((route) => route.mode === "enforce");
  byId("recover-title").textContent = enforced ? "Recovered" : "Recoverable";
  byId("recover-note").textContent = enforced ? "tokens that canonicalization added" : "tokens that enforce would add";
  byId("recoverable").textContent = count(enforced ? totals.recovered_tokens : totals.recoverable_tokens);
  byId("ttft-p50").textContent = millis(state.ttft.p50_ms);
  byId("ttft-p95").textContent = millis(state.ttft.p95_ms);
  byId("requests").textContent = count(totals.requests);
  byId("failed").textContent = count(totals.failed);
  byId("prompt-tokens").textContent = count(totals.prompt_tokens);
  byId("delivered-tokens").textContent = count(totals.delivered_tokens);
  drawHit(state.series);
  drawTtft(state.series);
  drawLegend(state.ttft.parts);
  fill("replicas", state.replicas.map((r) => [
    cell(r.id), cell(r.state, "state-" + r.state), cell(count(r.inflight), "n"), cell(count(r.running), "n"), cell(count(r.waiting), "n"),
    cell(blockBar(r)), cell(count(r.resident_blocks), "n"), cell(count(r.prefill_rate), "n"), cell(percent(r.hit_ratio), "n"),
  ]), "no replicas yet");
  fill("pins", state.pins.map((pin) => [
    cell(pin.name), cell(pin.tenant || "-"), cell(pin.replica || "-"), cell(pin.state.replace("_", " "), "state-" + pin.state),
    cell(count(pin.tokens), "n"), cell(count(pin.computed_tokens), "n"),
  ]), "no pins in this policy");
  fill("prefixes", state.prefixes.map((prefix) => [
    cell(code(prefix.prefix)), cell(prefix.route), cell(count(prefix.tokens), "n"), cell(count(prefix.requests), "n"),
    cell(percent(prefix.hit_ratio), "n"), cell(prefix.replicas.join(", ") || "none"),
  ]), "no requests yet");
  fill("routes", state.routes.map((route) => [
    cell(route.name), cell(route.class), cell(route.pool), cell(route.mode), cell(route.replay ? "on" : "off"),
    cell(code(`warmfront policy ${route.mode === "enforce" ? "observe" : "enforce"} ${route.name}`)),
  ]), "no routes");
  fill("recent", state.recent.map((entry) => [
    cell(code(entry.request_id)), cell(entry.route), cell(entry.replica || "-"), cell(entry.status, "n"), cell(entry.mode), cell(entry.edits, "n"),
    cell(count(entry.prompt_tokens), "n"), cell(count(entry.cached_tokens), "n"), cell(count(entry.output_tokens), "n"), cell(millis(entry.ttft_ms), "n"),
  ]), "no requests yet");
}

async function poll() {
  const status = byId("status");
  try {
    const response = await fetch("admin/state", { cache: "no-store" });
    if (!response.ok) throw new Error("HTTP " + response.status);
    const state = await response.json();
    draw(state);
    status.textContent = "live";
    status.className = "";
    document.body.dataset.updated = state.now;
  } catch (error) {
    status.textContent = "no answer from the gateway (" + error.message + ")";
    status.className = "lost";
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

poll();

// The dashboard: polls /admin/state once a second and draws it. Every text goes through textContent, so nothing that a
// request or a policy says can become markup. All figures come from the server; this file computes no rates of its own.
"use strict";

const POLL_MS = 1000;
const ANSWER_MS = 5000;
const KIND = {
  ready: "good", resident: "good", enforce: "good",
  down: "bad", error: "bad", over_budget: "bad",
  starting: "wait", warming: "wait", pending: "wait",
};
const byId = (id) => document.getElementById(id);
const put = (id, text) => { byId(id).textContent = text; };

function count(value) {
  if (value === null || value === undefined) return "-";
  return value >= 1e7 ? (value / 1e6).toFixed(1) + " M" : Math.round(value).toLocaleString("en");
}

function duration(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " min";
  if (whole < 172800) return Math.floor(whole / 3600) + " h " + Math.floor((whole % 3600) / 60) + " min";
  return Math.floor(whole / 86400) + " d";
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function cell(value, className) {
  const td = element("td", "", className);
  td.append(...[value].flat());
  return td;
}

const figure = (text) => cell(text, "n");

function code(text) {
  const made = element("code", text);
  made.title = text;
  return made;
}

// A state in words, coloured, with the reason below it.
function stateCell(state, reason) {
  const words = element("span", state.replace("_", " "), KIND[state] || "");
  return cell(reason ? [words, element("small", reason)] : words);
}

function fill(id, rows, none) {
  const table = byId(id);
  const made = rows.map((cells) => {
    const tr = document.createElement("tr");
    tr.append(...cells);
    return tr;
  });
  if (!made.length) {
    const td = cell(none, "empty");
    td.colSpan = table.tHead.rows[0].cells.length;
    const tr = document.createElement("tr");
    tr.append(td);
    made.push(tr);
  }
  table.tBodies[0].replaceChildren(...made);
}

function blocks(replica) {
  const total = replica.total_blocks;
  if (!total) return "-";
  const pinned = replica.pinned_blocks || 0;
  const used = replica.used_blocks || 0;
  const cached = replica.cached_blocks || 0;
  const bar = element("span", "", "bar");
  for (const [name, share] of [["pinned", pinned], ["used", used], ["cached", Math.max(0, cached - pinned)]]) {
    const piece = element("i", "", name);
    piece.style.width = (100 * share / total).toFixed(2) + "%";
    bar.append(piece);
  }
  bar.title = `${count(pinned)} pinned, ${count(used)} in use, ${count(cached)} cached, ${count(replica.free_blocks)} free`;
  return [bar, `${count(used + cached)} / ${count(total)}`];
}

function drawTiles(state) {
  const totals = state.totals;
  const enforced = state.routes.some((route) => route.mode === "enforce");
  const ratio = enforced ? totals.recovered_ratio : totals.recoverable_ratio;
  put("hit-rate", percent(totals.hit_ratio));
  put("recover-title", enforced ? "Recovered" : "Recoverable");
  put("recoverable", ratio === null ? "-" : "+" + percent(ratio));
  put("recover-note", enforced
    ? count(totals.recovered_tokens) + " tokens by canonicalization"
    : count(totals.recoverable_tokens) + " tokens more with enforce");
  put("ttft-p50", millis(state.ttft.p50_ms));
  put("ttft-p95", millis(state.ttft.p95_ms));
  put("requests", count(totals.requests));
  put("failed", count(totals.failed));
  byId("failed").className = totals.failed ? "bad" : "";
  put("prompt-tokens", count(totals.prompt_tokens));
  put("delivered-tokens", count(totals.delivered_tokens));
}

function drawTables(state) {
  fill("replicas", state.replicas.map((r) => [
    cell(r.id), stateCell(r.state, r.reason), figure(count(r.inflight)), figure(count(r.running)), figure(count(r.waiting)),
    cell(blocks(r)), figure(count(r.resident_blocks)), figure(count(r.prefill_rate)), figure(percent(r.hit_ratio)),
  ]), "no replicas in this policy");
  fill("pins", state.pins.map((pin) => [
    cell(pin.name), cell(pin.tenant || "-"), cell(pin.replica || "-"), stateCell(pin.state, pin.reason),
    figure(count(pin.tokens)), figure(count(pin.computed_tokens)),
  ]), "no pins");
  fill("prefixes", state.prefixes.map((prefix) => [
    cell(code(prefix.prefix)), cell(prefix.route), figure(count(prefix.tokens)), figure(count(prefix.requests)),
    figure(percent(prefix.hit_ratio)), cell(prefix.replicas.join(", ") || "none", prefix.replicas.length ? "" : "soft"),
  ]), "no system prompts seen yet");
  fill("routes", state.routes.map((route) => [
    cell(route.name), cell(route.class), cell(route.pool),
    stateCell(route.mode, route.lowered ? `${route.configured} in the policy, ${route.lowered}` : ""),
    figure(count(route.rules)), cell(route.replay ? "on" : "off"), cell(code(route.change)),
  ]), "no routes");
  fill("recent", state.recent.map((entry) => [
    cell(clock(entry.at), "soft"), cell(code(entry.request_id)), cell(entry.route || "-"), cell(entry.replica || "-"),
    cell(entry.outcome === "ok" ? String(entry.status) : `${entry.status} ${entry.outcome.replace("_", " ")}`, entry.outcome === "ok" ? "" : "bad"),
    cell(entry.route ? entry.mode : "-"), figure(count(entry.edits)), figure(count(entry.prompt_tokens)), figure(count(entry.cached_tokens)),
    figure(count(entry.output_tokens)), figure(millis(entry.ttft_ms)),
  ]), "no requests yet");
}

function draw(state) {
  put("policy-version", state.policy.version);
  put("policy-source", state.policy.source);
  put("uptime", duration(state.uptime_s));
  drawTiles(state);
  drawHit(state.series, state.now);
  drawTtft(state.series, state.now);
  drawLegend(state.ttft.parts, ttftChart.plot.cursor.idx);
  drawTables(state);
}

function tell(text, className) {
  put("status", text);
  byId("status").className = className;
  document.body.className = className === "lost" ? "stale" : "";
}

async function poll() {
  try {
    const response = await fetch("admin/state", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!response.ok) throw new Error("HTTP " + response.status);
    const state = await response.json();
    draw(state);
    tell("live", "");
    document.body.dataset.updated = state.now;
  } catch (error) {
    tell("no answer from the gateway (" + error.message + ")", "lost");
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

poll();

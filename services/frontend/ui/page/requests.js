// The latest requests: one line each, with a stop for every step of its way.

import { bar, byId, keep, make, write } from "./dom.js";
import { brief, count, duration, plural } from "./format.js";

/** The stops, and where their times are. The last one is reached when the request ends. */
const STOPS = ["tokenised", "worker chosen", "accepted", "first token", "ended"];
const GOOD = new Set(["stop", "length", "tool_calls", "answered"]);
let chosen = "";

export function showRequests(view, choose) {
  const latest = [...view.requests].reverse();
  keep(byId("requests"), latest, (one) => `${one.frontend} ${one.id}`, (one) => newRow(one, choose), (row, one) => update(row, one, view.at_ms));
  byId("requests-empty").hidden = latest.length > 0;
  byId("requests-scroll").hidden = latest.length === 0;
  const running = latest.filter((one) => one.times[4] === null).length;
  const words = latest.length ? `latest ${count(latest.length)}, ${count(running)} on their way` : "";
  write(byId("requests-aside"), words + (view.left_out.requests ? ` · ${plural(view.left_out.requests, "older one", "older ones")} not shown` : ""));
}

/** Marks the request whose decision is shown. */
export function markChosen(id) {
  chosen = id;
  for (const row of byId("requests").children) row.classList.toggle("chosen", row.dataset.id === id);
}

function newRow(one, choose) {
  const row = make("tr");
  row.dataset.id = one.id;
  const pick = make("button", "pick");
  pick.type = "button";
  pick.addEventListener("click", () => choose(one.id));
  const head = make("th", "", pick);
  head.scope = "row";
  row.append(head);
  for (const stop of STOPS) {
    const cell = make("td", "stop", make("i"), make("span"));
    cell.title = stop;
    row.append(cell);
  }
  const prompt = make("td", "prompt", make("div", "tiers-line"), make("span"));
  prompt.firstElementChild.setAttribute("role", "img");
  row.append(prompt, make("td", "at", make("code")), make("td", "outcome", make("span")));
  return row;
}

function update(row, one, nowMs) {
  const cells = row.children;
  row.classList.toggle("chosen", one.id === chosen);
  write(cells[0].firstElementChild, one.id);
  cells[0].firstElementChild.title = `${one.model} at frontend ${one.frontend}: why this worker?`;
  const reached = one.times.findIndex((time) => time === null);
  const ended = one.times[4] !== null;
  const running = ended ? -1 : reached < 0 ? 4 : reached;
  let before = 0;
  one.times.forEach((time, at) => {
    const cell = cells[1 + at];
    cell.dataset.state = time !== null ? "done" : at === running ? "now" : ended ? "never" : "next";
    const took = time === null ? null : time - before;
    if (time !== null) before = time;
    const waited = at === running ? Math.max(0, nowMs - one.began_ms) / 1000 - before : null;
    write(cell.lastElementChild, at === 4 ? tokens(one, took ?? waited) : time === null ? (at === running ? duration(waited) : "") : duration(took));
  });
  const [device, host, disk] = one.cached;
  bar(cells[6].firstElementChild, [["device", device, "device"], ["host", host, "host"], ["disk", disk, "disk"]], one.prompt);
  const found = device + host + disk;
  write(cells[6].lastElementChild, found ? `${count(found)} of ${count(one.prompt)}` : count(one.prompt));
  const worker = one.instances.at(-1) ?? "";
  write(cells[7].firstElementChild, brief(worker) + (one.instances.length > 1 ? ` (${one.instances.length})` : ""));
  cells[7].firstElementChild.title = one.instances.join(" → ");
  write(cells[8].firstElementChild, ended ? one.outcome : ["tokenises", "asks a router", "asks the worker", "computes the prompt", "streams"][running]);
  row.dataset.outcome = ended ? (GOOD.has(one.outcome) ? "good" : one.outcome === "cancelled" ? "left" : "bad") : "running";
}

function tokens(one, took) {
  if (!one.output) return "";
  return took === null ? count(one.output) : `${count(one.output)} in ${duration(took)}`;
}

// The candidates of a routing decision, as `headrace explain` shows them.

import { Refused, ask } from "./connection.js";
import { byId, make } from "./dom.js";
import { age, brief, count, duration, plural } from "./format.js";

let asked = 0;

const number = (value) => make("td", "number", value);
const tier = (at) => (row) => number(count(row.overlap[at]));

/** The columns: heading, the class of its cell, and what makes the cell of a candidate. */
const COLUMNS = [
  ["Worker", "", name],
  ["Device", "number", tier(0)],
  ["Host", "number", tier(1)],
  ["Disk", "number", tier(2)],
  ["Remote", "number", tier(3)],
  ["Held", "number", (row) => number(count(row.active_blocks))],
  ["Queued", "number", (row) => number(count(row.queued_tokens))],
  ["First token", "number", (row) => number(duration(row.predicted_s))],
  ["Score", "number", score],
  ["Why", "", (row) => make("td", "reason", row.reason)],
];

/** Asks routers for the decisions on a request; returns them, oldest first. */
export async function decisionsOf(request) {
  const response = await ask(`ui/decision?request=${encodeURIComponent(request)}`);
  return response.json();
}

/** Shows the decisions on a request. */
export async function showDecision(request) {
  asked += 1;
  const mine = asked;
  const place = byId("decision");
  const empty = byId("decision-empty");
  try {
    const found = await decisionsOf(request);
    if (mine !== asked) return;
    place.replaceChildren(...found.decisions.map(decision));
    empty.hidden = found.decisions.length > 0;
    empty.textContent = found.silent
      ? `${plural(found.silent, "router does", "routers do")} not answer; the others do not remember this request.`
      : "No router remembers this request: it was not routed, or too long ago.";
  } catch (wrong) {
    if (mine !== asked) return;
    place.replaceChildren();
    empty.hidden = false;
    empty.textContent = wrong instanceof Refused ? wrong.message : "The frontend does not answer.";
  }
}

function decision(one) {
  const head = make(
    "p",
    "decision-head",
    make("code", "", one.request),
    ` attempt ${one.attempt} went to `,
    make("code", "strong", brief(one.instance)),
    ` · router ${brief(one.router)} · ${age(one.age_s)} ago`,
  );
  const table = make("table", "candidates");
  table.append(make("thead", "", make("tr", "", ...COLUMNS.map(([title, kind]) => header(title, kind)))));
  table.append(make("tbody", "", ...one.candidates.map((row) => candidate(row, one))));
  return make("article", "decision", head, make("div", "scroll", table), ...passedOver(one), outcome(one));
}

function header(title, kind) {
  const cell = make("th", kind, title);
  cell.scope = "col";
  return cell;
}

function isChosen(row, one) {
  return row.instance === one.instance && row.rank === one.rank;
}

function candidate(row, one) {
  return make("tr", isChosen(row, one) ? "chosen" : "", ...COLUMNS.map(([, , cell]) => cell(row, one)));
}

function name(row, one) {
  const cell = make("th", "", make("code", "", brief(row.instance)));
  cell.scope = "row";
  cell.title = row.instance;
  if (one.candidates.some((each) => each.rank > 0)) cell.append(` rank ${row.rank}`);
  if (isChosen(row, one)) cell.append(make("span", "badge", "chosen"));
  return cell;
}

function score(row, one) {
  const worst = Math.max(1, ...one.candidates.map((each) => Math.abs(each.score)));
  const meter = make("i", "meter");
  meter.style.setProperty("width", `${Math.max(2, (100 * Math.abs(row.score)) / worst)}%`);
  return make("td", "number score", make("span", "", Number(row.score.toPrecision(4)).toLocaleString("en")), meter);
}

function passedOver(one) {
  return Object.entries(one.passed_over).map(([instance, why]) =>
    make("p", "fine", make("code", "", brief(instance)), ` was passed over: ${why}`),
  );
}

function outcome(one) {
  const found = one.actual_cached_tokens === null ? "not reported yet" : `${count(one.actual_cached_tokens)} found`;
  const facts = [
    `Prompt: ${plural(one.prompt_tokens, "token", "tokens")}, ${count(one.predicted_cached_tokens)} predicted in a cache, ${found}`,
  ];
  if (one.first_token_s !== null) facts.push(`first token after ${duration(one.first_token_s)}`);
  if (one.ended_s !== null) facts.push(`ended ${duration(one.ended_s)} after the choice`);
  return make("p", "fine", ...facts.map((text) => make("span", "", text)));
}

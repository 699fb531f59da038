// The candidates of a routing decision, as `headrace explain` shows them.

import { Refused, ask } from "./connection.js";
import { byId, make } from "./dom.js";
import { age, brief, count, duration, plural } from "./format.js";

let asked = 0;

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
  const names = ["Worker", "Device", "Host", "Disk", "Held", "Queued", "First token", "Score", "Why"];
  table.append(make("thead", "", make("tr", "", ...names.map((name) => header(name)))));
  const worst = Math.max(1, ...one.candidates.map((row) => Math.abs(row.score)));
  table.append(make("tbody", "", ...one.candidates.map((row) => candidate(row, one, worst))));
  return make("article", "decision", head, make("div", "scroll", table), ...passedOver(one), outcome(one));
}

function header(name) {
  const cell = make("th", "", name);
  cell.scope = "col";
  return cell;
}

function candidate(row, one, worst) {
  const isChosen = row.instance === one.instance && row.rank === one.rank;
  const ranks = one.candidates.some((each) => each.rank > 0);
  const name = make("th", "", make("code", "", brief(row.instance)));
  name.scope = "row";
  name.title = row.instance;
  if (ranks) name.append(` rank ${row.rank}`);
  if (isChosen) name.append(make("span", "badge", "chosen"));
  const cells = [...row.overlap, row.active_blocks, row.queued_tokens].map((value) => make("td", "number", count(value)));
  const meter = make("i", "meter");
  meter.style.setProperty("width", `${Math.max(2, (100 * Math.abs(row.score)) / worst)}%`);
  const score = make("td", "number score", make("span", "", Number(row.score.toPrecision(4)).toLocaleString("en")), meter);
  const line = make("tr", isChosen ? "chosen" : "", name, ...cells);
  line.append(make("td", "number", duration(row.predicted_s)), score, make("td", "reason", row.reason));
  return line;
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

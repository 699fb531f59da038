// Workers, frontends, routers and block stores.

import { HISTORY, bar, byId, keep, legend, make, spark, write } from "./dom.js";
import { age, brief, bytes, count, duration, median, percent, plural, rate } from "./format.js";

/** Seconds for which a worker that is gone stays in view. */
const GONE_SHOWN_S = 20;
const history = { tokens: [], running: [], first: [] };
const ofWorker = new Map();
const gone = new Map();

function remember(values, value) {
  values.push(value);
  if (values.length > HISTORY) values.shift();
}

export function showFigures(view) {
  const { totals, requests } = view;
  const firsts = requests.filter((one) => one.times[3] !== null).map((one) => one.times[3]);
  const half = median(firsts);
  remember(history.tokens, totals.tokens_per_s);
  remember(history.running, totals.running);
  remember(history.first, half);
  write(byId("figure-tokens"), rate(totals.tokens_per_s));
  write(byId("figure-running"), count(totals.running));
  write(byId("figure-waiting"), totals.waiting ? `${count(totals.waiting)} wait` : "none waits");
  write(byId("figure-first"), duration(half));
  write(byId("figure-first-most"), firsts.length ? `at most ${duration(Math.max(...firsts))}` : "");
  spark(byId("spark-tokens"), history.tokens, 10);
  spark(byId("spark-running"), history.running, 4);
  spark(byId("spark-first"), history.first, 0.01);

  const begun = requests.filter((one) => one.times[3] !== null);
  const prompt = begun.reduce((sum, one) => sum + one.prompt, 0);
  const [device, host, disk] = [0, 1, 2].map((tier) => begun.reduce((sum, one) => sum + one.cached[tier], 0));
  write(byId("figure-cached"), prompt ? percent((device + host + disk) / prompt) : "–");
  write(byId("figure-cached-of"), begun.length ? `of ${plural(begun.length, "prompt", "prompts")}` : "");
  bar(byId("cached-line"), [["device", device, "device"], ["host", host, "host"], ["disk", disk, "disk"]], prompt);
  legend(byId("cached-legend"), [["device", "device"], ["host", "host"], ["disk", "disk"]]);

  write(byId("figure-blocks"), totals.blocks ? percent((totals.held + totals.cached) / totals.blocks) : "–");
  write(byId("figure-blocks-of"), `of ${count(totals.blocks)}`);
  bar(byId("blocks-line"), [["held", totals.held, "held"], ["cached", totals.cached, "cached"]], totals.blocks);
  legend(byId("blocks-legend"), [["held", "held"], ["cached", "cached"], ["free", "free"]]);
}

export function showWorkers(view) {
  const now = view.at_ms / 1000;
  const present = new Set(view.workers.map((worker) => worker.process.id));
  for (const [id, kept] of ofWorker) {
    if (present.has(id)) {
      kept.seen = now;
      gone.delete(id);
    } else if (view.left_out.workers === 0 && now - kept.seen < GONE_SHOWN_S) {
      gone.set(id, { ...kept.last, state: "gone", running: 0, waiting: 0, tokens_per_s: null });
    } else {
      gone.delete(id);
      ofWorker.delete(id);
    }
  }
  for (const worker of view.workers) {
    const kept = ofWorker.get(worker.process.id) ?? { tokens: [], seen: now };
    kept.last = worker;
    remember(kept.tokens, worker.tokens_per_s);
    ofWorker.set(worker.process.id, kept);
  }
  const shown = [...view.workers, ...gone.values()];
  keep(byId("workers"), shown, (worker) => worker.process.id, newWorker, updateWorker);
  byId("workers-empty").hidden = shown.length > 0;
  const models = new Set(view.workers.map((worker) => worker.model).filter(Boolean));
  const what = models.size === 1 ? `${plural(view.totals.workers, "worker", "workers")} of ${[...models][0]}` : plural(view.totals.workers, "worker", "workers");
  write(byId("workers-aside"), what + left(view.left_out.workers));
}

const left = (number) => (number ? `, ${count(number)} not shown` : "");

function newWorker() {
  const card = make("article", "worker");
  card.append(
    make("header", "", make("i", "dot"), make("code"), make("span", "what"), make("span", "state")),
    make("div", "load", make("p", "numbers", make("b"), make("span")), document.createElementNS("http://www.w3.org/2000/svg", "svg")),
    make("div", "blocks"),
    make("p", "fine"),
  );
  card.querySelector("svg").setAttribute("class", "spark");
  card.querySelector(".blocks").setAttribute("role", "img");
  return card;
}

function updateWorker(card, worker) {
  const [head, load, blocks, fine] = card.children;
  card.dataset.state = worker.state;
  write(head.children[1], brief(worker.process.id));
  head.children[1].title = worker.process.id;
  write(head.children[2], [worker.role, worker.device, worker.process.machine].filter(Boolean).join(" · "));
  write(head.children[3], worker.state);
  write(load.querySelector("b"), rate(worker.tokens_per_s));
  write(load.querySelector("span"), " tokens/s");
  spark(load.querySelector("svg"), ofWorker.get(worker.process.id)?.tokens ?? [], 10);
  const free = Math.max(0, worker.blocks - worker.held - worker.cached);
  bar(blocks, [["held", worker.held, "held"], ["cached", worker.cached, "cached"], ["free", free, "free"]], worker.blocks);
  const runs = `${count(worker.running)} running${worker.waiting ? `, ${count(worker.waiting)} waiting` : ""}`;
  const held = worker.blocks ? `${count(worker.held)} held · ${count(worker.cached)} cached · ${count(free)} free` : "no blocks yet";
  keep(fine, [["runs", runs], ["held", held]], ([kind]) => kind, () => make("span"), (node, [, text]) => write(node, text));
}

export function showServices(view) {
  const rows = [
    ...view.frontends.map((one) => ["frontend", one.process, frontendFacts(one, view.frontend), one.begun !== null]),
    ...view.routers.map((one) => ["router", one.process, routerFacts(one), one.answered]),
  ];
  keep(byId("services"), rows, ([, process]) => process.id, newService, updateService);
  const hidden = view.left_out.frontends + view.left_out.routers;
  write(byId("services-aside"), hidden ? `${count(hidden)} not shown` : "");
}

function frontendFacts(one, own) {
  if (one.begun === null) return ["does not answer"];
  const facts = [`${count(one.running)} running`, `${count(one.begun)} so far`];
  if (one.arriving) facts.unshift(`${count(one.arriving)} at the door`);
  if (one.process.id === own) facts.push("this page");
  return facts;
}

function routerFacts(one) {
  if (!one.answered) return ["does not answer"];
  const facts = [one.policy, plural(one.index_blocks, "block", "blocks")];
  const sources = Object.entries(one.sources).map(([state, number]) => (state === "off" ? "no KV events" : `${plural(number, "source", "sources")} ${state}`));
  facts.push(...sources);
  if (one.trouble) facts.push(one.trouble);
  return facts;
}

function newService() {
  return make("li", "service", make("i", "dot"), make("span", "kind"), make("code"), make("p", "fine"), make("span", "age"));
}

function updateService(row, [kind, process, facts, answered]) {
  row.dataset.state = answered ? "ready" : "silent";
  write(row.children[1], kind);
  write(row.children[2], brief(process.id));
  row.children[2].title = process.id;
  write(row.children[4], `up ${age(process.age_s)}`);
  keep(row.children[3], facts.map((text, at) => [String(at), text]), ([at]) => at, () => make("span"), (node, [, text]) => write(node, text));
}

export function showStores(view) {
  const rows = view.stores.flatMap((store) =>
    store.layouts.length ? store.layouts.map((layout, at) => [store, layout, at]) : [[store, null, 0]],
  );
  keep(byId("stores"), rows, ([store, , at]) => `${store.process.id} ${at}`, newStore, updateStore);
  byId("stores-empty").hidden = rows.length > 0;
  const hidden = view.left_out.stores + view.stores.reduce((sum, store) => sum + store.layouts_left_out, 0);
  write(byId("stores-aside"), hidden ? `${count(hidden)} not shown` : "");
}

function newStore() {
  return make("article", "store", make("header", "", make("i", "dot"), make("code"), make("span", "what")), make("p", "fine"), make("div", "tiers"));
}

function updateStore(card, [store, layout]) {
  card.dataset.state = store.answered ? "ready" : "silent";
  const [head, fine, tiers] = card.children;
  write(head.children[1], brief(store.process.id));
  head.children[1].title = store.process.id;
  const pool = store.answered ? `${bytes(store.pool_bytes)} of memory, ${percent(store.reserved)} reserved` : "does not answer";
  write(head.children[2], layout?.model ?? "");
  write(fine, layout === null ? pool : `${layout.dtype} · ${plural(layout.engines, "engine", "engines")} · ${plural(layout.tickets, "ticket", "tickets")} · ${pool}`);
  keep(tiers, layout?.tiers ?? [], (tier) => tier.name, newTier, (node, tier) => updateTier(node, tier, layout));
}

function newTier() {
  const row = make("div", "tier", make("span", "kind"), make("div", "blocks"), make("span", "amount"), make("p", "fine"));
  row.children[1].setAttribute("role", "img");
  return row;
}

function updateTier(row, tier, layout) {
  write(row.children[0], tier.name);
  bar(row.children[1], [[tier.name, tier.blocks, "blocks"], ["free", Math.max(0, tier.capacity - tier.blocks), "free"]], tier.capacity);
  write(row.children[2], tier.hit_rate === null ? "no look-ups" : `${percent(tier.hit_rate)} found`);
  const size = `${count(tier.blocks)} of ${plural(tier.capacity, "block", "blocks")} of ${bytes(layout.block_bytes)}`;
  write(row.children[3], tier.state === "on" ? size : `${size} · ${tier.state}${tier.reason ? `: ${tier.reason}` : ""}`);
}

export function showNotes(view) {
  const notes = [...view.notes];
  if (view.left_out.notes) notes.push(`${count(view.left_out.notes)} more notes`);
  if (!view.connected) notes.unshift("This frontend does not reach NATS: loads are old, and nothing was asked.");
  byId("notes").hidden = notes.length === 0;
  write(byId("notes"), notes.join("\n"));
  write(byId("where"), `${view.namespace} · ${view.version}`);
}

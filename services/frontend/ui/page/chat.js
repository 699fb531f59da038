// A chat with one of the models, over the same API that clients use.

import { Refused, ask, askForKey, events } from "./connection.js";
import { decisionsOf } from "./decision.js";
import { byId, keep, make, write } from "./dom.js";
import { brief, count, duration, plural } from "./format.js";
import { showPicture } from "./pictures.js";

const TURNS_KEPT = 40;
const ANSWER_TOKENS = 512;
let conversation = [];
let running = null;
let painters = new Set();

export function showModels(view) {
  const select = byId("chat-model");
  const models = view.models.filter((model) => model.generates || model.pictures);
  painters = new Set(models.filter((model) => model.pictures).map((model) => model.name));
  keep(select, models, (model) => model.name, () => make("option"), (option, model) => {
    option.value = model.name;
    write(option, model.name);
  });
  select.disabled = models.length === 0;
  byId("chat-send").disabled = models.length === 0 && running === null;
}

export function start(explain) {
  const form = byId("chat-form");
  const text = byId("chat-text");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else if (text.value.trim()) send(text, explain);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    byId("chat-log").replaceChildren(byId("chat-empty"));
    byId("chat-empty").hidden = false;
    text.focus();
  });
}

async function send(text, explain) {
  const question = text.value.trim();
  text.value = "";
  byId("chat-empty").hidden = true;
  const own = conversation;
  own.push({ role: "user", content: question });
  const answer = make("p", "said");
  const meta = make("p", "meta");
  append(make("article", "turn user", make("p", "said", question)), make("article", "turn model", answer, meta));
  running = new AbortController();
  const controller = running;
  write(byId("chat-send"), "Stop");
  try {
    const model = byId("chat-model").value;
    if (painters.has(model)) {
      await showPicture(model, question, controller.signal, answer, meta, scroll);
      own.pop();
      write(byId("chat-status"), "The picture is complete.");
      return;
    }
    const seen = await stream(own.slice(-TURNS_KEPT), controller.signal, (piece) => {
      answer.append(piece);
      scroll();
    });
    own.push({ role: "assistant", content: seen.text });
    write(byId("chat-status"), "The answer is complete.");
    await describe(meta, seen, explain);
  } catch (wrong) {
    own.pop();
    meta.classList.add("wrong");
    if (controller.signal.aborted) write(meta, "Stopped.");
    else write(meta, wrong instanceof Error ? wrong.message : String(wrong));
    write(byId("chat-status"), meta.textContent);
    if (wrong instanceof Refused && wrong.status === 401) await askForKey(wrong.message);
  } finally {
    if (running === controller) {
      running = null;
      write(byId("chat-send"), "Send");
    }
    scroll();
  }
}

async function stream(messages, signal, receive) {
  const began = performance.now();
  const seen = { id: "", text: "", usage: null, firstS: null, lastS: 0 };
  const response = await ask("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model: byId("chat-model").value,
      messages,
      max_tokens: ANSWER_TOKENS,
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    seen.id = chunk.id;
    seen.usage = chunk.usage ?? seen.usage;
    const delta = chunk.choices[0]?.delta;
    const piece = (delta?.reasoning_content ?? "") + (delta?.content ?? "");
    if (!piece) continue;
    seen.lastS = (performance.now() - began) / 1000;
    seen.firstS ??= seen.lastS;
    seen.text += delta?.content ?? "";
    receive(piece);
  }
  return seen;
}

/** Writes below an answer what it cost, and which instance gave it. */
async function describe(meta, seen, explain) {
  const { usage } = seen;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const facts = make("span", "facts");
  const fact = (name, value) => facts.append(make("span", "fact", make("span", "name", name), make("b", "", value)));
  if (usage) fact("cached tokens", `${count(cached)} of ${count(usage.prompt_tokens)}`);
  if (seen.firstS !== null) fact("first token", duration(seen.firstS));
  if (usage) {
    const spent = seen.lastS - (seen.firstS ?? 0);
    const speed = usage.completion_tokens > 1 && spent > 0 ? `, ${count(Math.round((usage.completion_tokens - 1) / spent))}/s` : "";
    fact("answer", plural(usage.completion_tokens, "token", "tokens") + speed);
  }
  meta.replaceChildren(facts);
  const why = make("button", "link", "Why this worker?");
  why.type = "button";
  why.addEventListener("click", () => explain(seen.id));
  try {
    const { decisions } = await decisionsOf(seen.id);
    const instances = decisions.map((one) => one.instance);
    if (instances.length) {
      const place = make("span", "fact", make("span", "name", "answered by"), make("code", "strong", instances.map(brief).join(" → ")));
      place.title = instances.join(" → ");
      facts.prepend(place);
    }
  } catch {
    // The routers do not say; the answer stands without its instance.
  }
  meta.append(why);
}

function append(...turns) {
  const log = byId("chat-log");
  log.append(...turns);
  while (log.querySelectorAll(".turn").length > 2 * TURNS_KEPT) log.querySelector(".turn").remove();
  scroll();
}

function scroll() {
  const log = byId("chat-log");
  log.scrollTop = log.scrollHeight;
}

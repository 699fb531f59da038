// The stream of snapshots, and questions to the same server. A key is sent as a header, which EventSource cannot do.

import { byId, write } from "./dom.js";

const KEY = "headrace-key";
const LINE_LIMIT = 4 << 20;
const PAUSES_MS = [500, 1000, 2000, 4000, 8000];
/** A stream that says nothing for so long is opened again. */
const SILENCE_MS = 8000;

/** An answer that is no success; its text is for people. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin", referrerPolicy: "no-referrer" });
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // The body is no error of this API, perhaps that of a proxy; the status says enough.
  }
  throw new Refused(response.status, message);
}

/** Yields the data of each server-sent event of a response. */
export async function* events(response, heard = () => {}, limit = LINE_LIMIT) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      rest += value;
      if (rest.length > limit) throw new Error("an event is too long");
      const found = rest.split("\n\n");
      rest = found.pop();
      for (const event of found) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function show(state, text) {
  byId("live").dataset.state = state;
  write(byId("live-text"), text);
}

/** Asks for a key; resolves once there is one to try. */
export function askForKey(why) {
  const dialog = byId("key-dialog");
  if (sessionStorage.getItem(KEY)) write(byId("key-why"), why);
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    byId("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        const input = byId("key-input");
        sessionStorage.setItem(KEY, input.value.trim());
        input.value = "";
        dialog.close();
        resolve();
      },
      { once: true },
    );
  });
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const visible = () =>
  document.visibilityState === "visible"
    ? Promise.resolve()
    : new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));

/** Follows the stream for ever, while the page is seen, and passes each snapshot on. */
export async function follow(receive) {
  for (let failures = 0; ; ) {
    await visible();
    const controller = new AbortController();
    const hide = () => document.visibilityState === "hidden" && controller.abort();
    document.addEventListener("visibilitychange", hide);
    let watch = 0;
    const heard = () => {
      clearTimeout(watch);
      watch = setTimeout(() => controller.abort(), SILENCE_MS);
    };
    try {
      heard();
      const response = await ask("ui/events", { signal: controller.signal });
      for await (const data of events(response, heard)) {
        failures = 0;
        show("live", "live");
        receive(JSON.parse(data));
      }
    } catch (wrong) {
      if (wrong instanceof Refused && wrong.status === 401) {
        show("lost", "key needed");
        await askForKey(wrong.message);
        continue;
      }
      if (wrong instanceof Refused) show("lost", wrong.message);
    } finally {
      clearTimeout(watch);
      document.removeEventListener("visibilitychange", hide);
    }
    if (document.visibilityState !== "visible") continue;
    if (byId("live").dataset.state !== "lost") show("lost", "connecting again");
    await pause(PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)]);
    failures += 1;
  }
}

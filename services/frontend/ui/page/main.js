// Puts the page together: one stream of snapshots for all its parts.

import { showModels, start } from "./chat.js";
import { follow } from "./connection.js";
import { showDecision } from "./decision.js";
import { byId, write } from "./dom.js";
import { showFigures, showNotes, showServices, showStores, showWorkers } from "./fleet.js";
import { markChosen, showRequests } from "./requests.js";

const THEMES = { automatic: "light", light: "dark", dark: "automatic" };
const THEME = "headrace-theme";
/** Digits by which snapshots name requests: services/frontend/requests/way.py. */
const NAME_DIGITS = 12;

function useTheme(theme) {
  if (theme === "automatic") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  write(byId("theme-text"), `Theme: ${theme}`);
}

let theme = localStorage.getItem(THEME) ?? "automatic";
if (!(theme in THEMES)) theme = "automatic";
useTheme(theme);
byId("theme").addEventListener("click", () => {
  theme = THEMES[theme];
  localStorage.setItem(THEME, theme);
  useTheme(theme);
});

let untouched = true;

function choose(id) {
  untouched = false;
  markChosen(id);
  showDecision(id);
}

function explain(id) {
  choose(id.split("-").at(-1).slice(0, NAME_DIGITS));
  byId("decision-panel").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

byId("lookup").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("lookup-id").value.trim();
  if (id) choose(id);
});

start(explain);
follow((view) => {
  showNotes(view);
  showFigures(view);
  showWorkers(view);
  showServices(view);
  showStores(view);
  showRequests(view, choose);
  showModels(view);
  const routed = view.requests.findLast((one) => one.times[3] !== null);
  if (untouched && routed) choose(routed.id);
});

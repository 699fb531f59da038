// Small tools for the document. Text from the fleet enters it only through textContent.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Makes an element with a class and children, which are elements or texts. */
export function make(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Sets a text only where it differs, so that a selection in the page survives. */
export function write(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

/** Keeps one child for each item: makes new ones, updates all, removes the rest, and keeps their order. */
export function keep(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = old.get(name);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = name;
    }
    old.delete(name);
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of old.values()) child.remove();
}

/** Draws a line of numbers into an svg; null is a gap. The scale begins at 0. */
export function spark(svg, values, least = 1) {
  const width = 120;
  const height = 28;
  if (!svg.hasAttribute("viewBox")) {
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    for (const name of ["area", "line"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      svg.append(path);
    }
  }
  const [area, line] = svg.children;
  const top = Math.max(least, ...values.map((value) => value ?? 0));
  const points = [];
  values.forEach((value, at) => {
    if (value === null) return;
    const x = width - ((values.length - 1 - at) * width) / (HISTORY - 1);
    points.push(`${x.toFixed(1)} ${(height - 2 - (value / top) * (height - 5)).toFixed(1)}`);
  });
  const drawn = points.length > 1 ? `M${points.join("L")}` : "";
  line.setAttribute("d", drawn);
  const first = points[0]?.split(" ")[0];
  const last = points.at(-1)?.split(" ")[0];
  area.setAttribute("d", drawn ? `${drawn}L${last} ${height}L${first} ${height}Z` : "");
}

/** Seconds of history in a sparkline. */
export const HISTORY = 90;

/** Sets the parts of a stacked bar: [[kind, amount, words], …] of a whole. */
export function bar(node, parts, whole) {
  keep(
    node,
    parts.filter(([, amount]) => amount > 0),
    ([kind]) => kind,
    ([kind]) => make("i", `part ${kind}`),
    (child, [, amount]) => child.style.setProperty("width", `${Math.min(100, (100 * amount) / (whole || 1))}%`),
  );
  node.setAttribute("aria-label", parts.map(([, amount, words]) => `${words} ${amount}`).join(", "));
}

/** Fills a legend: [[kind, text], …]. */
export function legend(node, entries) {
  keep(
    node,
    entries,
    ([kind]) => kind,
    ([kind]) => make("li", "", make("i", `part ${kind}`), make("span")),
    (child, [, text]) => write(child.lastElementChild, text),
  );
}

// Making and changing elements. Text is only ever set as text: names come over the wire.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// el("p", {class: "dim", title: "..."}, "text", child, ...); a function under "on…" listens.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null));
  return made;
}

// Touches the document only where something is different.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === undefined || value === "" || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

// Puts new content into a box that is drawn anew every second. What somebody has the focus on keeps it: the button of the same text
// and place in it. What somebody marks inside of it, to copy it, stays until it is unmarked; a page that is marked as a whole goes on.
export function swap(box, ...children) {
  const marked = document.getSelection();
  if (!marked.isCollapsed && box.contains(marked.anchorNode) && box.contains(marked.focusNode)) return;
  const had = box.contains(document.activeElement) && document.activeElement !== box ? document.activeElement : null;
  const same = () => [...box.querySelectorAll(had.tagName)].filter((one) => one.textContent === had.textContent);
  const at = had ? same().indexOf(had) : 0;
  box.replaceChildren(...children);
  const now = had && (same()[at] || same()[0]);
  if (now) now.focus({ preventScroll: true });
}

// Shape before colour: a disc is whole, half of one lacks something, an arc is being repaired, a ring is silent, a cross is out.
const SHAPES = {
  synced: ["circle", { cx: 6, cy: 6, r: 4.5, class: "full" }],
  gap: ["path", { d: "M6 1.5a4.5 4.5 0 0 0 0 9z M6 1.5a4.5 4.5 0 0 1 0 9", class: "half" }],
  repairing: ["path", { d: "M10.5 6a4.5 4.5 0 1 1-1.6-3.4 M10.6 .8v2.4H8.2", class: "line" }],
  stale: ["circle", { cx: 6, cy: 6, r: 4, class: "line" }],
  fenced: ["path", { d: "M2.5 2.5l7 7 M9.5 2.5l-7 7", class: "line" }],
};

export function stateIcon(state) {
  const icon = document.createElementNS(SVG, "svg");
  icon.setAttribute("viewBox", "0 0 12 12");
  icon.setAttribute("class", "state");
  icon.setAttribute("aria-hidden", "true");
  icon.dataset.state = state;
  const [tag, attributes] = SHAPES[state] || SHAPES.stale;
  const shape = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
  icon.append(shape);
  return icon;
}

// A figure with the reason why it is not trusted, if it is not.
export function figureOf(pair, text) {
  const [, why] = pair;
  const made = el("span", { class: why ? "figure untrusted" : "figure", title: why ? `not trusted: ${why}` : undefined });
  made.append(text);
  if (why) made.append(el("span", { class: "sr" }, " (not trusted)"));
  return made;
}

export function table(heads, rows, attributes = {}) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col", class: text.endsWith("#") ? "number" : undefined }, text.replace(/ ?#$/, ""))));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, at) => el("td", { class: heads[at].endsWith("#") ? "number" : undefined }, cell))));
  return el("table", attributes, el("thead", {}, head), el("tbody", {}, ...body));
}

// Who read from whom, and the namespaces.
import { $, el, figureOf, setText, swap, table } from "./dom.js";
import { bytes, count, figure } from "./format.js";

const MOST = 16;

export function drawTransfers(picture, open) {
  const nodes = picture.nodes.filter((node) => !node.engine && node.state !== "fenced");
  const said = nodes.filter((node) => node.reads);
  const body = $("transfers-body");
  if (!said.some((node) => node.reads.bytes)) {
    body.replaceChildren(el("p", { class: "dim" }, nodes.length ? "No agent has read from another one yet." : "No agents yet."));
    return;
  }
  const sums = new Map();
  for (const node of said) {
    sums.set(node.node, (sums.get(node.node) || 0) + node.reads.bytes);
    for (const [source, size] of node.reads.sources) sums.set(source, (sums.get(source) || 0) + size);
  }
  const byBytes = [...sums.keys()].sort((one, other) => sums.get(other) - sums.get(one) || one.localeCompare(other, "en"));
  const names = byBytes.slice(0, MOST).sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  const rows = said.filter((node) => names.includes(node.node));
  const most = Math.max(...rows.flatMap((node) => node.reads.sources.map(([, size]) => size)), 1);
  const head = el("tr", {}, el("td", { class: "corner dim" }, "reader"), ...names.map((name) => el("th", { scope: "col" }, el("span", {}, name))), el("th", { scope: "col" }, el("span", {}, "others")), el("th", { scope: "col" }, el("span", {}, "all")));
  const lines = rows.map((node) => row(node, names, most, open));
  const hidden = said.length - rows.length;
  const rest = hidden > 0 ? [el("p", { class: "dim" }, `${count(hidden)} more nodes moved less.`)] : [];
  swap(body, el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, ...lines)), ...rest);
}

function row(node, names, most, open) {
  const given = new Map(node.reads.sources);
  let shown = 0;
  const cells = names.map((name) => {
    const size = given.get(name) || 0;
    shown += size;
    if (name === node.node) return el("td", { class: "self" });
    const cell = el("td", { class: size ? "cell" : "cell none", title: `${node.node} read ${bytes(size)} from ${name}` }, size ? bytes(size) : "·");
    if (size) cell.style.setProperty("--heat", (0.1 + 0.38 * (size / most)).toFixed(2));
    return cell;
  });
  const rest = node.reads.bytes - shown;
  return el("tr", {}, el("th", { scope: "row" }, el("button", { type: "button", class: "link", onclick: () => open(node.node) }, node.node)), ...cells,
    el("td", { class: "cell none" }, rest > 0 ? bytes(rest) : "·"), el("td", { class: "number" }, bytes(node.reads.bytes)));
}

export function drawNamespaces(picture) {
  const body = $("namespaces-body");
  const { namespaces } = picture;
  setText($("namespaces-more"), picture.more_namespaces ? `most bytes first; ${count(picture.more_namespaces)} more: kvdir trust` : "most bytes first");
  if (!namespaces.length) {
    body.replaceChildren(el("p", { class: "dim" }, "None announced yet: agents bring theirs along when they say hello."));
    return;
  }
  swap(body, table(["model", "", "tenant", "blocks #", "bytes #", "nodes #"], namespaces.map((item) => [
    el("span", { title: item.digest }, item.model || item.digest.slice(0, 16)),
    el("span", { class: "dim" }, item.words),
    el("span", { title: item.tenant }, item.tenant ? item.tenant.slice(0, 13) : "none"),
    figureOf(item.blocks, figure(item.blocks)),
    figureOf(item.bytes, figure(item.bytes, bytes)),
    count(item.nodes),
  ])));
}

// The lookup explainer: who is said to hold pasted blocks, position by position, and who is left out; or what became of a request.
import { $, el, figureOf, stateIcon, swap, table } from "./dom.js";
import { count, figure, share, span } from "./format.js";

export class Explainer {
  constructor(open) {
    this.open = open;
    this.known = "";
    $("explain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    $("explain-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.ask();
    });
  }

  draw(picture) {
    this.namespaces(picture.namespaces);
    const body = $("explain-recent");
    if (!picture.lookups.length) {
      const workers = picture.coordinator.lookup_workers;
      body.replaceChildren(el("p", { class: "dim" }, workers ? `None: ${workers} lookup workers answer, and keep no list.` : "None yet. Agents with a replica look up in that, without a call."));
      return;
    }
    swap(body, table(["", "request", "blocks #", "named #", "nodes"], picture.lookups.map((item) => [
      el("span", { class: "dim" }, `${span(item.age_s)} ago`),
      this.name(item),
      count(item.asked),
      share(item.hits, item.asked),
      nodesOf(item),
    ])));
  }

  name(item) {
    const name = item.request_id || item.trace_id;
    if (!name) return el("span", { class: "dim", title: "its caller gave no request id and no trace" }, "unnamed");
    const ask = () => {
      $("explain-text").value = name;
      this.ask();
    };
    return el("button", { type: "button", class: "link", onclick: ask }, name);
  }

  namespaces(namespaces) {
    const key = namespaces.map((item) => item.digest).join();
    if (key === this.known) return;
    this.known = key;
    const select = $("explain-namespace");
    const chosen = select.value;
    select.replaceChildren(el("option", { value: "" }, "any that is announced here"), ...namespaces.map((item) => el("option", { value: item.digest }, `${item.model || "?"} (${item.digest.slice(0, 8)}), ${item.words}`)));
    select.value = [...select.options].some((option) => option.value === chosen) ? chosen : "";
  }

  async ask() {
    const box = $("explain-answer");
    box.replaceChildren(el("p", { class: "dim" }, "asking …"));
    try {
      const answer = await fetch("/page/explain", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ text: $("explain-text").value, namespace: $("explain-namespace").value }),
      });
      const said = answer.headers.get("Content-Type").startsWith("application/json") ? await answer.json() : { error: await answer.text() };
      if (said.error) box.replaceChildren(el("p", { class: "notice bad" }, said.error));
      else if (said.request) box.replaceChildren(this.request(said.request));
      else box.replaceChildren(...said.lookups.map((item) => this.lookup(item)), ...remarks(said));
    } catch {
      box.replaceChildren(el("p", { class: "notice bad" }, "The coordinator does not answer."));
    }
  }

  request(item) {
    const named = item.nodes.length ? ["It named ", nodesOf(item), ", as trusted as it says here then."] : ["It named nobody."];
    const below = item.below_trust ? ` ${count(item.below_trust)} nodes were left out, because the caller asked for more trust.` : "";
    const partly = item.incomplete ? " Entries had been evicted, so what was not named was unknown rather than absent." : "";
    return el("div", { class: "answer" }, el("p", {}, el("strong", {}, `${count(item.hits)} of ${count(item.asked)} blocks`), ` were named ${span(item.age_s)} ago in namespace ${item.namespace.slice(0, 8)}. `, ...named, below, partly),
      el("p", { class: "dim" }, `request ${item.request_id || "–"}, trace ${item.trace_id || "–"}`));
  }

  lookup(item) {
    const { namespace } = item;
    const title = el("p", {}, el("strong", {}, `${count(item.hits)} of ${count(item.asked)} blocks`), ` are named in `, el("span", { title: namespace.digest }, `${namespace.model || "?"} (${namespace.digest.slice(0, 8)})`), el("span", { class: "dim" }, `, ${namespace.words}`));
    const claims = item.claims.map((claim, number) => this.claim(item, claim, number));
    const parts = [title];
    if (claims.length) parts.push(el("div", { class: "scroll" }, table(["node", "state", "heard #", "blocks #", "which", ""], claims, { class: "claims" })));
    if (item.more_claims) parts.push(el("p", { class: "dim" }, `and ${count(item.more_claims)} more nodes, with fewer of the blocks`));
    for (const node of item.doubtful) {
      parts.push(el("p", {}, stateIcon(node.state), ` ${node.node} has no entry of them, but may hold some all the same: it is ${node.state}${node.reason ? ` (${node.reason})` : ""}.`));
    }
    if (item.more_doubtful) parts.push(el("p", { class: "dim" }, `and ${count(item.more_doubtful)} more like it`));
    return el("div", { class: "answer" }, ...parts);
  }

  claim(item, claim, number) {
    const tiers = Object.entries(claim.tiers).map(([tier, many]) => `${count(many)} ${tier}`).join(", ");
    const blocks = [claim.blocks, claim.state === "synced" ? "" : claim.reason || claim.state];
    const left = claim.left_out ? `left out: ${claim.left_out}` : claim.reason || (claim.confirmed === 1 ? "confirmed by the owner in sum" : `${share(claim.confirmed, 1)} of its entries confirmed by the owner`);
    return [
      el("button", { type: "button", class: "link", onclick: () => this.open(claim.node) }, claim.node),
      el("span", { class: "nowrap" }, stateIcon(claim.state), ` ${claim.state}`),
      span(claim.age_s),
      el("span", { title: tiers }, figureOf(blocks, figure(blocks))),
      strip(item, number, Boolean(claim.left_out)),
      el("span", { class: claim.left_out ? "differs" : "dim" }, left),
    ];
  }
}

// Positions from left to right; filled where this node is said to hold the block.
function strip(item, number, leftOut) {
  const bar = el("span", { class: leftOut ? "positions out" : "positions", role: "img", "aria-label": "which of the blocks, in their order" });
  for (const [start, many, claims] of item.runs) {
    if (!claims.includes(number)) continue;
    const part = el("i", { title: many === 1 ? `block ${start}` : `blocks ${start} to ${start + many - 1}` });
    part.style.left = `${(100 * start) / item.asked}%`;
    part.style.width = `max(2px, ${(100 * many) / item.asked}%)`;
    bar.append(part);
  }
  return bar;
}

function nodesOf(item) {
  const parts = item.nodes.flatMap((node) => [stateIcon(node.state), `${node.node} `]);
  return el("span", {}, ...parts, item.more ? `and ${count(item.more)} more` : "", item.nodes.length ? "" : "–");
}

function remarks(said) {
  const out = [];
  if (said.lookups.some((item) => item.incomplete)) out.push("Entries were evicted from the directory: what nobody is named for is unknown, not absent.");
  if (said.lookups.some((item) => item.warming)) out.push("The coordinator is warming up: some node has not restated what it holds.");
  if (said.tried < said.known) out.push(`Only ${said.tried} of ${said.known} namespaces were tried: choose one.`);
  out.push("This is what the directory says. Whether the owners really have the blocks now: kvdir explain.");
  return out.map((words) => el("p", { class: "dim" }, words));
}

// One node in full: what the directory believes beside what the owner says, and its story. Asked for anew while it is open.
import { $, el, figureOf, setText, stateIcon, swap, table } from "./dom.js";
import { bytes, count, figure, share, span } from "./format.js";

const EVERY_MS = 2000;

export class NodePanel {
  constructor() {
    this.dialog = $("node");
    this.body = $("node-body");
    this.name = "";
    this.timer = 0;
    $("node-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.closed());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    window.addEventListener("hashchange", () => this.route());
  }

  // #node=NAME opens it, so that an address can be sent to somebody.
  route() {
    const name = new URLSearchParams(location.hash.slice(1)).get("node");
    if (name && name !== this.name) this.open(name);
    else if (!name && this.dialog.open) this.dialog.close();
  }

  open(name) {
    this.name = name;
    setText($("node-title"), name);
    this.body.replaceChildren(el("p", { class: "dim" }, "asking …"));
    if (!this.dialog.open) this.dialog.showModal();
    const hash = `#node=${encodeURIComponent(name)}`;
    if (location.hash !== hash) history.replaceState(null, "", hash);
    this.ask();
  }

  closed() {
    clearTimeout(this.timer);
    this.name = "";
    history.replaceState(null, "", location.pathname);
  }

  async ask() {
    clearTimeout(this.timer);
    const name = this.name;
    try {
      const answer = await fetch(`/page/node?name=${encodeURIComponent(name)}`);
      const node = await answer.json();
      if (this.name !== name) return;
      if (node.error) this.body.replaceChildren(el("p", { class: "notice bad" }, node.error));
      else this.draw(node);
    } catch {
      if (this.name === name && !this.body.querySelector(".bad")) this.body.prepend(el("p", { class: "notice bad" }, "The coordinator does not answer: this is what it said last."));
    }
    if (this.name === name) this.timer = setTimeout(() => this.ask(), EVERY_MS);
  }

  draw(node) {
    const at = this.body.scrollTop;
    const heading = el("p", { class: "verdict" }, stateIcon(node.state), el("strong", {}, node.state), node.reason ? `: ${node.reason}` : "", node.hidden ? ` · left out of answers` : "");
    swap(this.body, heading, facts(node), el("h3", {}, "Holdings, beside what the owner says itself"), holdings(node), el("h3", {}, "What its engines got"), reads(node), el("h3", {}, "Story"), story(node));
    this.body.scrollTop = at;
  }
}

function facts(node) {
  const [replays, sketches, snapshots] = node.repairs;
  const pairs = [
    ["heard", `${span(node.age_s)} ago`],
    ["confirmed by the owner", share(node.confirmed, 1)],
    ["memory", node.capacity ? `${bytes(node.used)} of ${bytes(node.capacity)}` : "not stated"],
    ["agent", node.address || "none"],
    ["epoch", node.epoch],
    ["running for", node.started_unix_ms ? span(Math.max(0, Date.now() - node.started_unix_ms) / 1000) : "unknown"],
    ["applied, announced", `${count(node.last_seq)} of ${count(node.announced_seq)}`],
    ["missing now", `${count(node.missing)} events`],
    ["gaps", `${count(node.gaps)}, ${count(node.missed)} events`],
    ["repairs asked for", `${count(replays)} replay, ${count(sketches)} sketch, ${count(snapshots)} snapshot`],
    ["dropped by its own queue", `${count(node.dropped)} events`],
    ["not trusted for", span(node.untrusted_s)],
  ];
  return el("dl", { class: "facts" }, ...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function holdings(node) {
  if (!node.holdings.length) return el("p", { class: "dim" }, "It is not known to hold anything.");
  return el("div", { class: "scroll" }, table(["namespace", "tier", "directory #", "owner #", "bytes #"], node.holdings.map((item) => [
    el("span", { title: `${item.digest} ${item.words}` }, item.model || item.digest.slice(0, 16)),
    item.tier,
    figureOf(item.blocks, figure(item.blocks)),
    el("span", { class: differs(node, item) ? "differs" : "", title: `as of event ${count(item.owner_at_seq)}; applied are ${count(node.last_seq)}` }, count(item.owner_blocks)),
    figureOf(item.bytes, figure(item.bytes, bytes)),
  ])));
}

// The owner's count is as of its newest heartbeat: what came since is no difference.
function differs(node, item) {
  return item.owner_at_seq === node.last_seq && item.blocks[0] !== item.owner_blocks;
}

function reads(node) {
  if (!node.reads) return el("p", { class: "dim" }, node.engine ? "An engine's stream tells of its own blocks only." : "This agent does not say (an earlier release).");
  const names = [["hit_local", "hit here"], ["hit_peer", "hit at a peer"], ["miss", "missed"], ["stale", "stale"], ["corrupt", "corrupt"], ["late", "late"], ["skipped", "skipped as dearer than recomputing"]];
  const all = names.reduce((sum, [key]) => sum + node.reads[key], 0);
  const rows = names.filter(([key]) => node.reads[key]).map(([key, label]) => [label, count(node.reads[key]), share(node.reads[key], all)]);
  if (!rows.length) return el("p", { class: "dim" }, "Its engines have not asked for anything yet.");
  const from = node.reads.sources.map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
  return el("div", {}, table(["blocks", "since its start #", "share #"], rows), el("p", { class: "dim" }, `${bytes(node.reads.bytes)} from peers${from ? `: ${from}` : ""}`));
}

function story(node) {
  if (!node.story.length) return el("p", { class: "dim" }, "Nothing is known of it, as far back as the log goes.");
  return el("ol", { class: "story" }, ...node.story.map((entry) => el("li", {}, el("span", { class: "dim when" }, `${span(entry.age_s)} ago`), el("span", { class: "kind" }, entry.kind), el("span", { class: "words" }, entry.words))));
}

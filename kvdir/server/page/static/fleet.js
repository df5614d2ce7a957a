// The map of nodes: tiles, or with many nodes small squares; engine streams under their node. Arrow keys move, Enter opens.
import { $, el, setAttribute, setText, stateIcon, swap } from "./dom.js";
import { bytes, count, figure, share, short, span } from "./format.js";

const MANY = 120;
const TROUBLE_SHOWN = 12;
const STATES = ["synced", "gap", "repairing", "stale", "fenced"];

export class Fleet {
  constructor(open) {
    this.map = $("fleet-map");
    this.tiles = new Map();
    this.many = false;
    this.open = open;
    this.current = "";
    this.picture = null;
    this.map.addEventListener("keydown", (event) => this.key(event));
    this.map.addEventListener("click", (event) => this.click(event));
    this.map.addEventListener("focusin", (event) => this.focused(event));
    $("fleet-filter").addEventListener("input", () => this.picture && this.draw(this.picture));
  }

  draw(picture) {
    this.picture = picture;
    const groups = grouped(picture.nodes);
    const wanted = $("fleet-filter").value.trim().toLowerCase();
    const shown = groups.filter((group) => !wanted || group.text.includes(wanted));
    this.shape(shown.length > MANY);
    let before = null;
    const present = new Set();
    for (const group of shown) {
      present.add(group.name);
      let tile = this.tiles.get(group.name);
      if (!tile) {
        tile = this.many ? new Square(group.name) : new Tile(group.name);
        this.tiles.set(group.name, tile);
      }
      tile.draw(group, picture.coordinator);
      const next = before ? before.nextSibling : this.map.firstChild;
      if (next !== tile.root) this.map.insertBefore(tile.root, next);
      before = tile.root;
    }
    for (const [name, tile] of this.tiles) {
      if (!present.has(name)) {
        tile.root.remove();
        this.tiles.delete(name);
      }
    }
    this.rove(shown);
    this.states(picture);
    this.trouble(groups);
    this.hint(groups, shown);
  }

  // Another kind of tile: the old ones go.
  shape(many) {
    if (many === this.many) return;
    this.many = many;
    for (const tile of this.tiles.values()) tile.root.remove();
    this.tiles.clear();
    this.map.classList.toggle("many", many);
  }

  // One tile is in the tab order; arrows go to the others.
  rove(shown) {
    if (!this.tiles.has(this.current)) this.current = shown.length ? shown[0].name : "";
    for (const [name, tile] of this.tiles) setAttribute(tile.button, "tabindex", name === this.current ? "0" : "-1");
  }

  states({ states }) {
    const parts = STATES.filter((state) => states[state]).map((state) => el("span", { class: "count" }, stateIcon(state), `${count(states[state])} ${state}`));
    $("fleet-states").replaceChildren(...parts);
  }

  trouble(groups) {
    const box = $("fleet-trouble");
    const bad = this.many ? groups.filter((group) => group.worst.state !== "synced") : [];
    box.hidden = !bad.length;
    if (!bad.length) return;
    const items = bad.slice(0, TROUBLE_SHOWN).map(({ worst: node }) => {
      return el("button", { type: "button", class: "chip", title: node.reason, onclick: () => this.open(node.node) }, stateIcon(node.state), `${node.node} ${node.state} ${span(node.age_s)}`);
    });
    if (bad.length > TROUBLE_SHOWN) items.push(el("span", { class: "dim" }, `and ${count(bad.length - TROUBLE_SHOWN)} more`));
    swap(box, ...items);
  }

  hint(groups, shown) {
    const hint = $("fleet-hint");
    if (!groups.length) {
      hint.replaceChildren("No agents yet. Start one on every node: ", el("code", {}, "peer-agent serve --coordinators HOST:PORT"));
    } else if (!shown.length) {
      setText(hint, "No node's name or state contains this.");
    } else if (this.many) {
      const tile = this.tiles.get(this.current);
      setText(hint, tile ? tile.words : "");
    } else {
      setText(hint, "");
    }
  }

  key(event) {
    const buttons = [...this.map.querySelectorAll(".node")];
    const at = buttons.indexOf(document.activeElement);
    if (at < 0) return;
    const columns = buttons.filter((button) => Math.abs(top(button) - top(buttons[0])) < 4).length;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (buttons[to]) buttons[to].focus();
  }

  click(event) {
    const button = event.target.closest("button");
    if (button && button.dataset.opens) this.open(button.dataset.opens);
  }

  focused(event) {
    const button = event.target.closest(".node");
    if (!button || button.dataset.name === this.current) return;
    this.current = button.dataset.name;
    for (const [name, tile] of this.tiles) setAttribute(tile.button, "tabindex", name === this.current ? "0" : "-1");
    if (this.many) setText($("fleet-hint"), this.tiles.get(this.current).words);
  }
}

class Tile {
  constructor(name) {
    this.signature = "";
    this.icon = el("span", { class: "icon" });
    this.title = el("span", { class: "name" }, name);
    this.state = el("span", { class: "word" });
    this.bar = el("i");
    this.fill = el("span", { class: "fill", role: "presentation" }, this.bar);
    this.blocks = el("span");
    this.memory = el("span", { class: "dim" });
    this.reason = el("span", { class: "reason" });
    this.button = el("button", { type: "button", class: "node", "data-name": name },
      el("span", { class: "row" }, this.icon, this.title, this.state), this.fill, el("span", { class: "row" }, this.blocks, this.memory), this.reason);
    this.engines = el("div", { class: "engines" });
    this.root = el("div", { class: "tile" }, this.button, this.engines);
  }

  draw(group, coordinator) {
    const signature = JSON.stringify(group.streams.map((stream) => [stream.state, stream.reason, shownAge(stream, coordinator), stream.used, stream.capacity, stream.tiers, stream.hidden]));
    if (signature === this.signature) return;
    this.signature = signature;
    const node = group.own || group.worst;
    this.button.dataset.opens = node.node;
    this.icon.replaceChildren(stateIcon(node.state));
    this.root.dataset.state = node.state;
    setText(this.state, stateWords(node, coordinator));
    this.bar.style.width = node.capacity ? `${Math.min(100, (100 * node.used) / node.capacity)}%` : "0";
    this.fill.hidden = !node.capacity;
    const blocks = sumOfTiers(node);
    setText(this.blocks, group.own ? `${figure(blocks, short)} blocks` : "no agent of this name");
    this.blocks.classList.toggle("untrusted", Boolean(blocks[1]));
    setAttribute(this.blocks, "title", blocks[1] && `not trusted: ${blocks[1]}`);
    const used = [node.used, node.state === "stale" ? `as of ${span(node.age_s)} ago` : ""];
    setText(this.memory, node.capacity ? figure(used, bytes) : "");
    this.memory.classList.toggle("untrusted", Boolean(used[1]));
    setAttribute(this.memory, "title", used[1]);
    setAttribute(this.fill, "title", node.capacity ? `${share(node.used, node.capacity)} of ${bytes(node.capacity)}` : "");
    setText(this.reason, node.hidden ? `left out of answers: not heard for ${span(node.age_s)}` : node.reason);
    this.reason.hidden = !this.reason.textContent;
    setAttribute(this.button, "aria-label", wordsOf(node, coordinator));
    this.engines.replaceChildren(...group.engines.map((stream) => {
      const held = sumOfTiers(stream);
      const words = `${stream.engine}${stream.rank === null ? "" : `@${stream.rank}`} ${figure(held, short)}`;
      return el("button", { type: "button", class: "chip", "data-opens": stream.node, title: wordsOf(stream, coordinator) }, stateIcon(stream.state), words);
    }));
  }
}

class Square {
  constructor(name) {
    this.bar = el("i");
    this.icon = el("span", { class: "icon" });
    this.button = el("button", { type: "button", class: "node square", "data-name": name }, this.bar, this.icon);
    this.root = this.button;
    this.signature = "";
    this.words = "";
  }

  draw(group, coordinator) {
    const node = group.worst;
    this.button.dataset.opens = node.node;
    this.words = wordsOf(node, coordinator);
    const full = group.own || node;
    const height = full.capacity ? Math.round((100 * full.used) / full.capacity) : 0;
    const signature = `${node.node} ${node.state} ${node.reason} ${height} ${shownAge(node, coordinator)}`;
    if (signature === this.signature) return;
    this.signature = signature;
    this.bar.style.height = `${Math.min(100, height)}%`;
    this.root.dataset.state = node.state;
    this.icon.replaceChildren(...(node.state === "synced" ? [] : [stateIcon(node.state)]));
    setAttribute(this.button, "aria-label", this.words);
    setAttribute(this.button, "title", this.words);
  }
}

// Streams by the node that they are of, in the order of names.
export function grouped(nodes) {
  const groups = new Map();
  for (const stream of nodes) {
    const name = stream.of || stream.node;
    if (!groups.has(name)) groups.set(name, { name, own: null, engines: [], streams: [], worst: stream, text: "" });
    const group = groups.get(name);
    group.streams.push(stream);
    if (stream.of) group.engines.push(stream);
    else group.own = stream;
    if (STATES.indexOf(stream.state) > STATES.indexOf(group.worst.state)) group.worst = stream;
    group.text += ` ${stream.node} ${stream.state}`.toLowerCase();
  }
  return [...groups.values()].sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
}

export function sumOfTiers(node) {
  return Object.values(node.tiers).reduce(([value, why], [blocks]) => [value + blocks[0], why || blocks[1]], [0, node.state === "synced" ? "" : node.reason || node.state]);
}

function top(element) {
  return element.getBoundingClientRect().top;
}

// An age within two heartbeats says nothing, and would change every tile every second.
function shownAge(node, coordinator) {
  return node.age_s > 2 * coordinator.heartbeat_s || node.state !== "synced" ? Math.round(node.age_s) : 0;
}

function stateWords(node, coordinator) {
  const age = shownAge(node, coordinator);
  return age ? `${node.state} · ${span(node.age_s)}` : node.state;
}

function wordsOf(node, coordinator) {
  const fill = node.capacity ? `, ${share(node.used, node.capacity)} of ${bytes(node.capacity)}` : "";
  const why = node.reason ? `: ${node.reason}` : "";
  return `${node.node}: ${stateWords(node, coordinator)}${why}; ${figure(sumOfTiers(node))} blocks${fill}`;
}

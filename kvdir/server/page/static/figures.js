// The strip of figures on top: the directory as a whole.
import { $, el, setAttribute, setText } from "./dom.js";
import { bytes, count, figure, share, short } from "./format.js";

const cards = new Map();

function card(key, label) {
  if (!cards.has(key)) {
    const parts = { value: el("strong"), note: el("span", { class: "dim" }), bar: el("i"), root: null };
    parts.root = el("div", { class: "card", id: `card-${key}` }, el("span", { class: "label" }, label), parts.value, parts.note);
    $("figures").append(parts.root);
    cards.set(key, parts);
  }
  return cards.get(key);
}

function show(key, label, value, note, why = "") {
  const parts = card(key, label);
  setText(parts.value, value);
  setText(parts.note, note);
  parts.value.classList.toggle("untrusted", Boolean(why));
  setAttribute(parts.root, "title", why ? `not trusted: ${why}` : "");
}

export function drawFigures(picture, recent) {
  const { coordinator, states, tiers } = picture;
  const live = Object.entries(states).reduce((sum, [state, many]) => sum + (state === "fenced" ? 0 : many), 0);
  const synced = states.synced || 0;
  show("nodes", "streams", count(live), !live ? "none yet" : synced === live ? "all synced" : `${count(synced)} synced, ${count(live - synced)} not`);

  const parts = Object.entries(tiers);
  const total = parts.reduce(([value, why], [, [blocks]]) => [value + blocks[0], why || blocks[1]], [0, ""]);
  const words = parts.map(([tier, [blocks]]) => `${tier} ${figure(blocks, short)}`).join(", ");
  show("blocks", "blocks held", figure(total), words || "none yet", total[1]);

  const [used, old] = picture.used_bytes;
  const room = picture.capacity_bytes;
  show("memory", "agents' memory", figure(picture.used_bytes, bytes), room ? `${share(used, room)} of ${bytes(room)}` : "none stated", old);
  show("index", "directory", `${count(coordinator.blocks)}`, `different blocks, ${bytes(coordinator.index_bytes)}`);

  const { took, sum } = recent;
  const rate = (name) => (took ? sum(name) / took : 0);
  show("lookups", "lookups", took ? `${short(rate("lookups"))} /s` : "–", took ? `${share(sum("named"), sum("asked"))} of blocks named` : "measuring");
  const loaded = ["hit_local", "hit_peer", "miss", "stale", "corrupt", "late", "skipped"].reduce((total, name) => total + sum(name), 0);
  const hits = sum("hit_local") + sum("hit_peer");
  show("hits", "engines' hits", took ? share(hits, loaded) : "–", took ? `${share(sum("hit_peer"), loaded)} from peers` : "measuring");
  show("refuted", "named, not there", took ? share(sum("refuted"), sum("named")) : "–", took ? `${short(sum("refuted"))} of ${short(sum("named"))} blocks` : "measuring");
  show("peers", "from peers", took ? `${bytes(rate("read_bytes"))}/s` : "–", "all agents together");
}

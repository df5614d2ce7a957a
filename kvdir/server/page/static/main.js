// Puts the parts together: one picture a second comes in, and every part draws what changed.
import { $, el, setText } from "./dom.js";
import { clock, span } from "./format.js";
import { Feed } from "./feed.js";
import { drawFigures } from "./figures.js";
import { Fleet } from "./fleet.js";
import { Log } from "./log.js";
import { Chart } from "./chart.js";
import { drawNamespaces, drawTransfers } from "./tables.js";
import { Explainer } from "./explain.js";
import { NodePanel } from "./node.js";

const FIELDS = ["at", "took_s", "lookups", "asked", "named", "refuted", "hit_local", "hit_peer", "miss", "stale", "corrupt", "late", "skipped", "read_bytes"];
const POINTS = 900;
const RECENT_S = 10;
const LATE_S = 4;

const panel = new NodePanel();
const open = (name) => panel.open(name);
const fleet = new Fleet(open);
const log = new Log(open);
const explainer = new Explainer(open);
const loads = new Chart($("loads"), [
  { label: "hit here", colour: "--series-1", sum: (point) => point.hit_local, title: "in the node's own memory" },
  { label: "hit at a peer", colour: "--series-2", sum: (point) => point.hit_peer, title: "read from another node and verified" },
  { label: "missed", colour: "--series-3", sum: (point) => point.miss + point.skipped, title: "nobody had it, or fetching was dearer than recomputing" },
  { label: "stale", colour: "--warn", sum: (point) => point.stale, hatch: true, title: "the directory named an owner that did not have it any more" },
  { label: "late", colour: "--bad", sum: (point) => point.late + point.corrupt, hatch: true, title: "not there by the deadline, or did not pass its check" },
], { stacked: true });
const lookups = new Chart($("lookups"), [
  { label: "asked for", colour: "--series-3", sum: (point) => point.asked },
  { label: "named", colour: "--series-2", sum: (point) => point.named, title: "blocks for which some node was named" },
  { label: "named, not there", colour: "--bad", sum: (point) => point.refuted, hatch: true, title: "and the owner did not hold them" },
], { stacked: false });

let points = [];
let last = null;
let lastMs = 0;
let state = "waiting";
let stuck = "";

function pointOf(values) {
  return Object.fromEntries(FIELDS.map((name, at) => [name, values[at]]));
}

function onHistory(history) {
  points = history.map(pointOf);
}

function onPicture(picture) {
  const started = performance.now();
  lastMs = Date.now();
  stuck = "";
  if (picture.point) points.push(pointOf(picture.point));
  if (points.length > POINTS) points.splice(0, points.length - POINTS);
  last = picture;
  $("main").hidden = false;
  $("main").classList.remove("old");
  const since = points.filter((point) => point.at > picture.at_ms - 1000 * RECENT_S);
  const sum = (name) => since.reduce((total, point) => total + point[name], 0);
  drawHeader(picture);
  drawFigures(picture, { took: sum("took_s"), sum });
  fleet.draw(picture);
  log.draw(picture);
  if (points.length) {
    loads.show(points);
    lookups.show(points);
  }
  drawTransfers(picture, open);
  drawNamespaces(picture);
  explainer.draw(picture);
  say("live", "live");
  document.documentElement.dataset.picture = picture.number;
  document.documentElement.dataset.drawMs = (performance.now() - started).toFixed(1);
}

function drawHeader({ coordinator, states }) {
  setText($("who"), `${coordinator.name} · ${coordinator.version} · up ${span(coordinator.uptime_s)}${coordinator.store === "memory" ? "" : ` · ${coordinator.store}`}`);
  const bad = Object.entries(states).reduce((sum, [name, many]) => sum + (name === "synced" || name === "fenced" ? 0 : many), 0);
  document.title = `${bad ? `(${bad} not synced) ` : ""}kvdir ${coordinator.name}`;
}

function say(now, words) {
  state = now;
  $("live").dataset.state = now;
  setText($("live-words"), words);
  notices();
}

// What stands in the way, in words; the page stays as it was, and says how old that is.
function notices() {
  const silent_s = (Date.now() - lastMs) / 1000;
  const out = [];
  const said = $("live-words").textContent;
  const why = said === "connection lost" ? "" : ` (${said})`;
  if (state === "lost" && lastMs) out.push(["bad", `Connection lost${why}. What you see is ${span(silent_s)} old, as of ${clock(lastMs)}; trying again.`]);
  else if (state === "lost") out.push(["bad", `The coordinator does not answer${why}: is it running? Trying again.`]);
  else if (stuck) out.push(["bad", `${stuck}. What you see is as of ${lastMs ? clock(lastMs) : "never"}.`]);
  else if (state === "live" && silent_s > LATE_S) out.push(["warn", `No picture for ${span(silent_s)}: the coordinator is busy, or the way to it is cut. What you see is as of ${clock(lastMs)}.`]);
  $("main").classList.toggle("old", out.length > 0);
  if (last) {
    const { coordinator } = last;
    if (coordinator.store_fault) out.push(["bad", `The store does not answer: ${coordinator.store_fault}`]);
    for (const words of coordinator.remarks) out.push(["warn", words]);
    if (coordinator.restored_blocks) out.push(["warn", `${coordinator.restored_blocks.toLocaleString("en-US")} blocks are from a checkpoint and not confirmed by their nodes yet: hints.`]);
  }
  const box = $("notices");
  const text = JSON.stringify(out);
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(...out.map(([kind, words]) => el("p", { class: `notice ${kind}` }, words)));
}

new Feed("/page/events", {
  picture: onPicture,
  history: onHistory,
  stuck: (words) => {
    stuck = words;
    say("stuck", "no answer");
  },
  state: say,
});
setInterval(() => document.hidden || notices(), 1000);
panel.route();

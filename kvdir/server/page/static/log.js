// What happened, newest first. What belongs together is one line: a stream that loses something, what was asked for, and how it ended.
import { $, el, setText, stateIcon } from "./dom.js";
import { clock, count, span } from "./format.js";

const KEPT = 200;
const MOST_CHARACTERS = 120;
const CHANGE = /^(\w+) -> (\w+)(?:: (.*))?$/s;

export class Log {
  constructor(open) {
    this.list = $("log-list");
    this.open = open;
    this.seen = 0;
    this.episodes = new Map();
    this.asked = new Map();
    this.life = "";
    this.shown = 0;
  }

  draw(picture) {
    if (picture.coordinator.life !== this.life) this.begin(picture);
    const news = picture.notes.filter((note) => note.number > this.seen).reverse();
    const missed = news.length ? news[0].number - this.seen - 1 : 0;
    if (this.seen && missed > 0) this.row(el("li", { class: "dim" }, `${count(missed)} more in between: kvdir story --node tells them`));
    for (const note of news) this.note(note, picture.at_ms);
    this.seen = Math.max(this.seen, picture.noted);
    while (this.list.childElementCount > KEPT) this.list.lastElementChild.remove();
    for (const [node, episode] of this.episodes) if (!episode.root.isConnected) this.episodes.delete(node);
    setText($("log-count"), picture.noted ? `${count(picture.noted)} since the start` : "");
    if (!this.list.childElementCount) this.list.append(el("li", { class: "dim empty" }, "Nothing yet: registrations, gaps, repairs and evictions appear here as they happen."));
  }

  // Another life of the coordinator has numbers of its own.
  begin({ coordinator }) {
    if (this.life) this.row(el("li", { class: "dim" }, "The coordinator was restarted: it knows nothing of what was before."));
    this.life = coordinator.life;
    this.seen = 0;
    this.episodes.clear();
    this.asked.clear();
  }

  note(note, atMs) {
    const at = atMs - 1000 * note.age_s;
    const change = note.kind === "state" ? CHANGE.exec(note.words) : null;
    const running = this.episodes.get(note.node);
    if (change && change[2] !== "synced") {
      if (running) running.worse(change[2], change[3] || "", note.epoch);
      else this.begins(note, at, change);
    } else if (change && running) {
      running.ends(at);
      this.episodes.delete(note.node);
    } else if ((note.kind === "repair" || note.kind === "snapshot") && running) {
      running.repaired(note.words);
    } else {
      const row = line(at, this.link(note.node), change ? change[2] : iconOf(note.kind), wordsOf(note, change));
      if (note.kind === "repair") this.asked.set(note.node, { at, row, words: note.words });
      this.row(row);
    }
  }

  begins(note, at, change) {
    const episode = new Episode(at, this.link(note.node), change[2], change[3] || "");
    const asked = this.asked.get(note.node);  // a repair may be asked for in the moment before the state is said
    if (asked && at - asked.at < 1000) {
      asked.row.remove();
      episode.repaired(asked.words);
    }
    this.asked.delete(note.node);
    this.episodes.set(note.node, episode);
    this.row(episode.root);
  }

  link(node) {
    return el("button", { type: "button", class: "link", onclick: () => this.open(node) }, node);
  }

  row(item) {
    const empty = this.list.querySelector(".empty");
    if (empty) empty.remove();
    this.list.prepend(item);
  }
}

// A stream is not synced, from `at` until it ends.
class Episode {
  constructor(at, link, state, reason) {
    this.at = at;
    this.means = [];
    this.state = state;
    this.reason = reason;
    this.icon = el("span", { class: "icon" }, stateIcon(state));
    this.words = el("span", { class: "words" });
    this.root = el("li", { class: "open" }, el("time", {}, clock(at)), this.icon, link, this.words);
    this.say("");
  }

  worse(state, reason) {
    this.state = state;
    if (reason && !this.reason) this.reason = reason;
    if (state === "stale" || state === "fenced") this.reason = reason;
    this.icon.replaceChildren(stateIcon(state));
    this.say("");
  }

  repaired(words) {
    const mean = /snapshot/.test(words) ? "snapshot" : /[Ss]ketch/.test(words) ? "sketch" : "replay";
    if (this.means[this.means.length - 1] !== mean) this.means.push(mean);
    this.say("");
  }

  ends(at) {
    this.icon.replaceChildren(stateIcon("synced"));
    this.root.classList.remove("open");
    this.say(`, synced after ${span(Math.max(0, at - this.at) / 1000)}`);
  }

  say(end) {
    const how = this.means.join(", then ");
    const what = [end ? "" : this.state, this.reason.replace(/^\w+ under way; /, ""), how].filter(Boolean).join(": ");
    setText(this.words, `${what}${end}`);
  }
}

function line(at, link, icon, words) {
  return el("li", {}, el("time", {}, clock(at)), el("span", { class: "icon" }, icon ? stateIcon(icon) : ""), link, el("span", { class: "words", title: words }, words.length > MOST_CHARACTERS ? `${words.slice(0, MOST_CHARACTERS)}…` : words));
}

function iconOf(kind) {
  return { fenced: "fenced", orphan: "stale" }[kind];
}

function wordsOf(note, change) {
  if (change) return `${change[2]}${change[3] ? `: ${change[3]}` : ""}`;
  return `${note.kind}: ${note.words}`;
}

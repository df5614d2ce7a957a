// Rates over the last minutes: areas on top of each other, or lines. The legend has the figures, so colour carries nothing alone.
import { el, setText } from "./dom.js";
import { clock, short } from "./format.js";

const LEAST_S = 60;
const MOST_S = 300;
const SMOOTH = 5;

export class Chart {
  // series: [{key, label, colour, sum(point) -> number, hatch?}]; stacked: areas, first at the bottom.
  constructor(root, series, { stacked }) {
    this.canvas = root.querySelector("canvas");
    this.legend = root.querySelector(".legend");
    this.series = series;
    this.stacked = stacked;
    this.points = [];
    this.hover = null;
    this.values = series.map((item) => {
      const value = el("strong");
      const swatch = el("span", { class: `swatch ${item.hatch ? "hatch" : ""}`, "aria-hidden": "true" });
      swatch.style.setProperty("--colour", `var(${item.colour})`);
      this.legend.append(el("li", { title: item.title || "" }, swatch, item.label, " ", value));
      return value;
    });
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    window.addEventListener("kvdir-theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  show(points) {
    this.points = smooth(points.filter((point) => point.at > points[points.length - 1].at - 1000 * (MOST_S + SMOOTH)), this.series);
    this.draw();
  }

  point(x) {
    this.hover = x;
    this.draw();
  }

  draw() {
    const box = this.canvas.parentElement.getBoundingClientRect();
    if (!box.width) return;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(box.width), Math.round(box.height)];
    if (this.canvas.width !== width * ratio || this.canvas.height !== height * ratio) {
      this.canvas.width = width * ratio;
      this.canvas.height = height * ratio;
    }
    const pen = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const window_s = Math.min(MOST_S, Math.max(LEAST_S, this.points.length ? (this.points[this.points.length - 1].at - this.points[0].at) / 1000 : 0));
    const end = this.points.length ? this.points[this.points.length - 1].at : Date.now();
    const most = nice(Math.max(...this.points.map((point) => (this.stacked ? total(point.values) : Math.max(...point.values))), 1));
    const plot = { left: 40, right: width - 4, top: 6, bottom: height - 18 };
    const x = (at) => plot.right - ((end - at) / 1000 / window_s) * (plot.right - plot.left);
    const y = (value) => plot.bottom - (value / most) * (plot.bottom - plot.top);
    grid(pen, plot, most, window_s, end, x, y, colour);
    pen.save();
    pen.beginPath();
    pen.rect(plot.left, 0, plot.right - plot.left, height);
    pen.clip();
    for (const stretch of stretches(this.points)) this.stretch(pen, stretch, x, y, colour);
    pen.restore();
    this.figures(pen, plot, x, end, colour);
  }

  stretch(pen, points, x, y, colour) {
    let below = points.map(() => 0);
    this.series.forEach((item, at) => {
      const above = points.map((point, number) => (this.stacked ? below[number] : 0) + point.values[at]);
      pen.beginPath();
      points.forEach((point, number) => pen.lineTo(x(point.at), y(above[number])));
      if (this.stacked) {
        for (let number = points.length - 1; number >= 0; number -= 1) pen.lineTo(x(points[number].at), y(below[number]));
        pen.closePath();
        pen.fillStyle = item.hatch ? hatched(pen, colour(item.colour)) : colour(item.colour);
        pen.fill();
        below = above;
      } else {
        pen.strokeStyle = colour(item.colour);
        pen.lineWidth = 1.5;
        pen.setLineDash(item.hatch ? [3, 2] : []);
        pen.stroke();
        pen.setLineDash([]);
      }
    });
  }

  figures(pen, plot, x, end, colour) {
    let shown = this.points[this.points.length - 1];
    let when = "now";
    if (this.hover !== null && this.points.length) {
      shown = this.points.reduce((best, point) => (Math.abs(x(point.at) - this.hover) < Math.abs(x(best.at) - this.hover) ? point : best));
      pen.strokeStyle = colour("--dim");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x(shown.at), plot.top);
      pen.lineTo(x(shown.at), plot.bottom);
      pen.stroke();
      when = clock(shown.at);
    }
    this.values.forEach((value, at) => setText(value, shown ? short(shown.values[at]) : "–"));
    const words = this.series.map((item, at) => `${item.label} ${shown ? short(shown.values[at]) : "unknown"}`).join(", ");
    this.canvas.setAttribute("aria-label", `${when}: ${words}`);
  }
}

// Means over SMOOTH points: heartbeats and pictures both come once a second, and not in step.
function smooth(points, series) {
  return points.map((point, at) => {
    const span = points.slice(Math.max(0, at - SMOOTH + 1), at + 1).filter((other) => point.at - other.at < 1000 * 3 * SMOOTH);
    const took = span.reduce((sum, other) => sum + other.took_s, 0);
    return { at: point.at, took_s: point.took_s, values: series.map((item) => span.reduce((sum, other) => sum + item.sum(other), 0) / took) };
  });
}

// Where nobody watched, nothing is drawn.
function stretches(points) {
  const out = [];
  points.forEach((point, at) => {
    if (!at || point.at - points[at - 1].at > 1000 * (point.took_s + 5)) out.push([]);
    out[out.length - 1].push(point);
  });
  return out;
}

function grid(pen, plot, most, window_s, end, x, y, colour) {
  pen.font = `11px ${colour("--sans")}`;
  pen.fillStyle = colour("--dim");
  pen.strokeStyle = colour("--line");
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(most * part)) + 0.5;
    pen.beginPath();
    pen.moveTo(plot.left, at);
    pen.lineTo(plot.right, at);
    pen.stroke();
    pen.textAlign = "right";
    pen.fillText(short(most * part), plot.left - 6, at);
  }
  pen.textBaseline = "alphabetic";
  const step_s = window_s > 120 ? 60 : 30;
  for (let ago_s = 0; ago_s < window_s - step_s / 4; ago_s += step_s) {
    pen.textAlign = ago_s ? "center" : "right";
    const words = step_s < 60 ? `−${ago_s} s` : `−${ago_s / 60} min`;
    pen.fillText(ago_s ? words : "now", x(end - 1000 * ago_s), plot.bottom + 14);
  }
}

function hatched(pen, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const inner = tile.getContext("2d");
  inner.strokeStyle = colour;
  inner.lineWidth = 2;
  inner.beginPath();
  for (const shift of [-6, 0, 6]) {
    inner.moveTo(shift, 6);
    inner.lineTo(shift + 6, 0);
  }
  inner.stroke();
  return pen.createPattern(tile, "repeat");
}

function nice(most) {
  const unit = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 4, 5, 10].map((step) => step * unit).find((step) => step >= most);
}

function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

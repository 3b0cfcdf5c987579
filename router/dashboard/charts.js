// Charts of the last minutes: uPlot draws, the legend and the figures are ours.

import { byId, el, setText } from "./dom.js";
import { clock, minute, NONE, percent, rate, time } from "./format.js";

const HEIGHT = 132;
const answered = (p) => p.requests - p.failed - p.shed - p.refused - p.cancelled;
const perSecond = (part) => (p) => part(p) / p.span_s;
const share = (part, whole) => (p) => (whole(p) ? part(p) / whole(p) : null);

const CHARTS = [
  {
    title: "Requests", unit: "per second", format: rate,
    series: [
      ["answered", perSecond(answered), 0],
      ["failed", perSecond((p) => p.failed), 1],
      ["shed", perSecond((p) => p.shed), 3],
    ],
  },
  {
    title: "Time to first token", unit: "", format: time,
    series: [
      ["p50", (p) => p.ttft_p50_s, 0],
      ["p95", (p) => p.ttft_p95_s, 3],
      ["p99", (p) => p.ttft_p99_s, 1],
    ],
  },
  {
    title: "Cache hits", unit: "share", format: percent, most: 1,
    series: [
      ["tokens", share((p) => p.reported_tokens, (p) => p.told_tokens), 2],
      ["requests", share((p) => p.hits, (p) => p.told), 0],
      ["predicted tokens", share((p) => p.predicted_tokens, (p) => p.prompt_tokens), 3],
    ],
  },
  {
    title: "Not answered", unit: "share of requests", format: percent, floor: 0.01,
    series: [
      ["failed", share((p) => p.failed, (p) => p.requests), 1],
      ["shed", share((p) => p.shed, (p) => p.requests), 3],
      ["left", share((p) => p.cancelled, (p) => p.requests), 4],
    ],
  },
  {
    title: "Open requests", unit: "", format: rate,
    series: [
      ["open at the end", (p) => p.inflight, 0],
      ["spills per second", perSecond((p) => p.spills), 4],
    ],
  },
  {
    title: "Event loop lag", unit: "longest", format: time, floor: 0.01,
    series: [["lag", (p) => p.loop_lag_s, 4]],
  },
];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2]];

/** A short piece of a series' line: colour and dashes. */
function key(look) {
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  for (const [name, value] of [["width", 20], ["height", 4], ["class", `key s${look}`], ["aria-hidden", "true"]]) picture.setAttribute(name, value);
  for (const [name, value] of [["x1", 0], ["x2", 20], ["y1", 2], ["y2", 2], ["stroke-dasharray", DASHES[look].join(" ")]]) line.setAttribute(name, value);
  picture.append(line);
  return picture;
}

class Chart {
  constructor(parent, spec) {
    this.spec = spec;
    this.at = null;
    this.data = null;
    this.values = spec.series.map(([label, , look]) => {
      const value = el("b", {}, NONE);
      const item = el("li", {}, key(look), `${label} `, value);
      return { item, value };
    });
    this.plotBox = el("div", { class: "plot", "aria-hidden": "true" });
    const note = spec.unit ? el("span", { class: "note" }, ` ${spec.unit}`) : null;
    parent.append(
      el("figure", {}, el("figcaption", {}, spec.title, note), this.plotBox, el("ul", { class: "legend" }, ...this.values.map((one) => one.item))),
    );
    new ResizeObserver(() => this.#fit()).observe(this.plotBox);
  }

  /** Show points of a ring whose newest is at `end`, over `span` seconds. */
  show(points, span, end) {
    this.data = [points.map((p) => p.start_unix_s), ...this.spec.series.map(([, value]) => points.map(value))];
    this.range = [end - span, end];
    if (!this.plot) this.draw();
    else if (this.plot) this.plot.setData(this.data);
    this.#legend();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    const width = Math.floor(this.plotBox.clientWidth);
    if (!width || !this.data) return;
    this.plot = new window.uPlot(this.#options(width), this.data, this.plotBox);
  }

  #options(width) {
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(name).trim();
    const axis = {
      stroke: color("--soft"), font: "11px system-ui, sans-serif",
      grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false },
    };
    const { series, format, most, floor } = this.spec;
    return {
      width, height: HEIGHT, legend: { show: false }, padding: [6, 6, 0, 0],
      cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: true, range: () => this.range },
        y: { range: (_, __, high) => [0, most ?? (Math.max(floor ?? 0, (high ?? 0) * 1.08) || 1)] },
      },
      axes: [
        { ...axis, size: 22, gap: 4, space: 70, values: (_, ticks) => ticks.map((at) => this.#when(at)) },
        { ...axis, size: 54, gap: 4, space: 28, values: (_, ticks) => ticks.map((value) => format(value).replace(/\.0+(?= |$)/, "")) },
      ],
      series: [
        {},
        ...series.map(([label, , look]) => ({
          label, stroke: color(`--s${look}`), width: 1.5, dash: DASHES[look], spanGaps: false,
          points: { size: 4, fill: color(`--s${look}`) },
        })),
      ],
      hooks: {
        setCursor: [(plot) => { this.at = plot.cursor.idx; this.#legend(); }],
      },
    };
  }

  /** The time at a tick; none where it would be cut off at the edge. */
  #when(at) {
    const [from, to] = this.range;
    const isAtEdge = (to - at) / (to - from) < 0.06 || (at - from) / (to - from) < 0.02;
    if (isAtEdge) return "";
    return to - from > 300 ? minute(at) : clock(at);
  }

  #legend() {
    const length = this.data[0].length;
    const at = this.at ?? length - 1;
    this.values.forEach(({ value }, index) => setText(value, length ? this.spec.format(this.data[index + 1][at]) : NONE));
  }

  #fit() {
    const width = Math.floor(this.plotBox.clientWidth);
    if (!this.plot) this.draw();
    else if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}

export class Charts {
  constructor() {
    const parent = byId("charts");
    this.charts = CHARTS.map((spec) => new Chart(parent, spec));
    this.rings = { 1: [], 10: [] };
    this.range = byId("range");
    this.isChosen = false;
    this.range.addEventListener("change", () => {
      this.isChosen = true;
      this.show();
    });
    byId("figures").addEventListener("toggle", () => this.show());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.forEach((one) => one.draw()));
  }

  /** Take both rings anew. */
  take(history) {
    this.rings = { 1: history.seconds, 10: history.tens };
  }

  /** Take what was added to them. */
  add({ seconds, tens }) {
    for (const [span, kept, points] of [[1, 120, seconds], [10, 90, tens]]) {
      const ring = this.rings[span];
      const newest = ring.length ? ring[ring.length - 1].start_unix_s : -Infinity;
      ring.push(...points.filter((point) => point.start_unix_s > newest));
      ring.splice(0, Math.max(0, ring.length - kept));
    }
  }

  show() {
    if (!this.isChosen) this.range.value = this.rings[10].length < 12 ? "1" : "10"; // a young router
    const step = Number(this.range.value);
    const ring = this.rings[step];
    const newest = this.rings[1].length ? this.rings[1].at(-1).start_unix_s : Date.now() / 1000;
    for (const chart of this.charts) chart.show(ring, step === 1 ? 120 : 900, newest);
    if (byId("figures").open) this.#figures(ring);
  }

  /** The same as a table, for whoever does not see charts: the newest first. */
  #figures(ring) {
    const columns = CHARTS.flatMap(({ title, series, format }) => series.map(([label, value]) => [`${title}: ${label}`, value, format]));
    const head = el("tr", {}, el("th", { scope: "col" }, "From"), ...columns.map(([name]) => el("th", { scope: "col", class: "num" }, name)));
    const body = el("tbody");
    for (const point of ring.slice(-30).reverse()) {
      body.append(el("tr", {}, el("th", { scope: "row" }, clock(point.start_unix_s)), ...columns.map(([, value, format]) => el("td", { class: "num" }, format(value(point))))));
    }
    byId("figures-table").replaceChildren(el("table", {}, el("thead", {}, head), body));
  }
}

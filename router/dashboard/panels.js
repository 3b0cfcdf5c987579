// Tiles, what needs attention, hot prefixes, tenants, diagnoses: all from one snapshot.

import { byId, el, Keyed, setText } from "./dom.js";
import { finding, isServing, noteText } from "./fleet.js";
import { age, count, digits, many, NONE, percent, rate, time } from "./format.js";
import { Table } from "./table.js";

const SLOW_LOOP_S = 0.25;
const STALE_S = 2;
const LASTS_MS = 10_000;
const NAMED = 4;

const TILES = [
  ["Requests", (s) => [`${rate(s.last.requests / Math.max(1, s.last.span_s))}/s`, `${count(s.open_requests)} open${s.held_requests ? `, ${count(s.held_requests)} held` : ""}`]],
  ["TTFT p50", (s) => [time(s.last.ttft_p50_s), `p95 ${time(s.last.ttft_p95_s)}`]],
  ["Token hits", (s) => [percent(s.last.measured_share), `predicted ${percent(s.last.predicted_share)}`]],
  ["Request hits", (s) => [percent(s.last.hit_share), "had anything cached"]],
  ["Failed", (s) => [percent(share(s.last.failed, s.last.requests)), `${count(s.last.failed)} of ${count(s.last.requests)}, ${many(s.last.retries, "retry").replace("retrys", "retries")}`]],
  ["Shed", (s) => [percent(share(s.last.shed, s.last.requests)), `${count(s.last.shed)} without a place`]],
  ["Spills", (s) => [percent(share(s.last.spills, s.last.requests)), "left the warmest replica"]],
  ["Loop lag", (s) => [time(s.loop_lag_s), "event loop held"]],
];

/** What the router stops doing when it is short of memory or time. */
const OVERLOAD = {
  shed_low: "Requests of low priority are refused.",
  close: "Requests of low priority are refused, and every answer ends its connection.",
  refuse: "All requests are refused.",
};

const share = (part, whole) => (whole ? part / whole : null);

export class Panels {
  constructor() {
    this.tiles = TILES.map(([name, read]) => {
      const value = el("b", {}, NONE);
      const note = el("span", { class: "note" });
      byId("tiles").append(el("div", { class: "tile" }, el("span", { class: "name" }, name), value, note));
      return { read, value, note };
    });
    this.attention = [];
    this.held = new Map();
    this.alerts = new Keyed(byId("alerts"), makeAlert, updateAlert);
    this.findings = new Keyed(byId("diagnoses"), (one) => (one ? finding(one) : el("p", { class: "empty" }, "Nothing is wrong with predictions, as far as requests tell.")), () => {});
    this.hot = new Table(byId("hot-table"), {
      label: "Hot prefixes", key: (row) => row.prefix + row.tokens, sort: "work", descending: true,
      columns: [
        { id: "prefix", label: "Prefix", value: (r) => r.prefix, text: (r) => r.prefix },
        { id: "tokens", label: "Tokens", numeric: true, value: (r) => r.tokens, text: (r) => count(r.tokens) },
        { id: "rate", label: "Rate", numeric: true, hint: "arrivals a second, decayed", value: (r) => r.rate_per_s, text: (r) => `${digits(r.rate_per_s)}/s` },
        { id: "work", label: "Cold work", numeric: true, hint: "prompt tokens a second that it would cost without a cache", value: (r) => r.tokens * r.rate_per_s, text: (r) => `${count(Math.round(r.tokens * r.rate_per_s))} tok/s` },
        { id: "spills", label: "Spills", numeric: true, hint: "requests of the last minute that left the warmest replica", value: (r) => r.spills, text: (r) => `${count(r.spills)} of ${count(r.requests)}` },
        { id: "holders", label: "Holders", value: (r) => r.holders.length, text: (r) => `${r.holders.length}: ${names(r.holders)}` },
      ],
      empty: () => "No prefix is hot: none brings more work than one replica should spend on it.",
    });
    this.tenants = new Table(byId("tenants-table"), {
      label: "Tenants", key: (row) => row.tenant, sort: "requests", descending: true,
      columns: [
        { id: "tenant", label: "Tenant", value: (r) => r.tenant, text: (r) => r.tenant },
        { id: "open", label: "Open", numeric: true, value: (r) => r.inflight, text: (r) => count(r.inflight) },
        { id: "requests", label: "Requests", numeric: true, value: (r) => r.last?.requests ?? 0, text: (r) => count(r.last?.requests ?? 0) },
        { id: "hits", label: "Token hits", numeric: true, value: (r) => r.last?.measured_share, text: (r) => percent(r.last?.measured_share) },
        { id: "p95", label: "TTFT p95", numeric: true, value: (r) => r.last?.ttft_p95_s, text: (r) => time(r.last?.ttft_p95_s) },
        { id: "failed", label: "Failed", numeric: true, value: (r) => r.last?.failed ?? 0, text: (r) => count(r.last?.failed ?? 0) },
        { id: "shed", label: "Shed", numeric: true, value: (r) => r.last?.shed ?? 0, text: (r) => count(r.last?.shed ?? 0) },
      ],
      empty: () => ["No tenants are configured: everybody is one. ", el("code", {}, "tenants:"), " gives each a key and prefixes of its own."],
    });
  }

  show(snapshot) {
    for (const { read, value, note } of this.tiles) {
      const [text, small] = read(snapshot);
      setText(value, text);
      setText(note, small);
    }
    this.attention = this.#steady(alertsOf(snapshot));
    this.alerts.show(this.attention.map((one) => [one.key, one]));
    this.hot.show(snapshot.hot_prefixes);
    this.tenants.show(snapshot.tenants);
    const found = snapshot.diagnoses.map((one) => [[one.replica, one.model, one.kind].join(), one]);
    this.findings.show(found.length ? found : [["none", null]]);
  }

  /** What comes and goes stays for a while: nothing jumps, and screen readers are not told twice. */
  #steady(found) {
    const now = performance.now();
    const held = new Map(found.map((one) => [one.key, { one, untilMs: now + LASTS_MS }]));
    for (const [key, kept] of this.held) {
      if (!held.has(key) && kept.untilMs > now) held.set(key, kept);
    }
    this.held = held;
    return [...held.values()].map(({ one }) => one);
  }
}

function names(all) {
  const shown = all.slice(0, NAMED).join(", ");
  return all.length > NAMED ? `${shown} and ${all.length - NAMED} more` : shown;
}

/** What needs attention, the worst first. */
function alertsOf({ replicas, router, last, loop_lag_s: lag, diagnoses, is_draining: isDraining, open_requests: open }) {
  const found = [];
  const add = (level, key, title, text) => found.push({ level, key, title, text });
  const down = replicas.filter((one) => one.state === "down").map((one) => one.replica);
  const ejected = replicas.filter((one) => one.state === "ejected").map((one) => one.replica);
  const isServed = replicas.some(isServing);
  if (!isServed && replicas.length) add("error", "none", "No replica is up", "Every request is answered with 503 until one is.");
  if (down.length) add("error", "down", `${many(down.length, "replica")} down`, names(down));
  if (ejected.length) add("warn", "ejected", `${many(ejected.length, "replica")} ejected`, `${names(ejected)}: requests failed there.`);
  if (isDraining) add("warn", "drain", "The router drains", `${many(open, "request")} may still finish; it takes no new connections.`);
  if (router.rung === "stale" && router.state_age_s >= STALE_S) add("warn", "rung", "The shared state is away", `Decisions go by what was known ${age(router.state_age_s)} ago; nothing fails because of it.`);
  if (router.rung === "local") add("warn", "rung", "There is no shared state", `Decisions go by what this router sent where itself${router.state_age_s > 0 ? `, for ${age(router.state_age_s)}` : ""}.`);
  if (last.failed) add("warn", "failed", `${many(last.failed, "request")} failed`, `of ${count(last.requests)} in the last minute.`);
  if (last.shed) add("warn", "shed", `${many(last.shed, "request")} shed`, `of ${count(last.requests)} in the last minute: no place, or no replica.`);
  const rung = router.admission?.rung ?? "normal";
  if (rung !== "normal") add(rung === "shed_low" ? "warn" : "error", "load", "The router is overloaded", OVERLOAD[rung] ?? rung);
  if (lag > SLOW_LOOP_S) add("warn", "lag", "The event loop is held", `for ${time(lag)}: every request waits for so long.`);
  for (const one of diagnoses) add("warn", `why ${one.replica} ${one.model} ${one.kind}`, `${one.replica}: ${noteText(one.kind)}`, one.finding);
  return found.slice(0, 8);
}

const LEVELS = { error: "Error", warn: "Warning" };

function makeAlert({ level }) {
  return el("p", { class: "alert", "data-level": level }, el("b", {}), " ", el("span"));
}

function updateAlert(element, { level, title, text }) {
  element.dataset.level = level;
  setText(element.children[0], `${LEVELS[level]}: ${title}.`);
  setText(element.children[1], text);
}

// Decisions as they happen; each opens with every candidate's terms, as `warmroute explain` has it.

import { ask, plainTable, show } from "./dialog.js";
import { byId, el, setText } from "./dom.js";
import { clock, count, digits, many, NONE, time } from "./format.js";
import { Table } from "./table.js";

const KEPT = 1_000;
const SHOWN = 100;
const isWrong = (one) => one.status >= 400 || one.attempts > 1;

const COLUMNS = [
  { id: "request", label: "Request", text: (d) => d.request_id.slice(0, 10) },
  { id: "at", label: "Began", numeric: true, text: (d) => clock(d.at_unix_s) },
  { id: "replica", label: "Replica", text: (d) => (d.attempts > 1 ? `${d.replica} (try ${d.attempts})` : (d.replica ?? NONE)) },
  { id: "reason", label: "Why", text: (d) => d.reason ?? NONE },
  { id: "model", label: "Model", text: (d) => d.model ?? NONE },
  { id: "tenant", label: "Tenant", text: (d) => d.tenant ?? NONE },
  { id: "prompt", label: "Prompt", numeric: true, hint: "tokens", text: (d) => count(d.prompt_tokens) },
  { id: "predicted", label: "Predicted", numeric: true, hint: "tokens predicted to be cached", text: (d) => count(d.predicted_tokens) },
  { id: "reported", label: "Cached", numeric: true, hint: "tokens that the engine reported as cached", text: (d) => count(d.reported_tokens) },
  { id: "ttft", label: "TTFT", numeric: true, hint: "time to first token", text: (d) => time(d.ttft_s) },
  { id: "took", label: "Took", numeric: true, text: (d) => time(d.duration_s) },
  { id: "end", label: "End", draw: drawEnd },
];

function drawEnd(cell, one) {
  const text = one.status >= 400 ? `${one.outcome}, ${one.status}` : one.outcome;
  if (cell.textContent.endsWith(text)) return;
  cell.dataset.state = one.status >= 400 ? "down" : one.outcome === "done" ? "up" : "draining";
  cell.className = "state";
  cell.replaceChildren(el("span", { "aria-hidden": "true" }, one.status >= 400 ? "✕" : one.outcome === "done" ? "●" : "◐"), ` ${text}`);
}

export class Decisions {
  constructor() {
    this.kept = [];
    this.leftOut = 0;
    this.listen = null;
    this.table = new Table(byId("decisions-table"), {
      label: "Decisions", columns: COLUMNS, key: (one) => one.request_id, unsorted: true, most: SHOWN,
      open: (one) => explain(one.request_id),
      empty: () => [
        el("b", {}, "No request has ended yet. "), "Send one: ",
        el("code", {}, `curl ${this.listen ?? "http://HOST:PORT"}/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]}'`),
      ],
    });
    const words = byId("decisions-filter");
    const kind = byId("decisions-kind");
    const filter = () => {
      const wanted = words.value.trim().toLowerCase();
      this.table.filter((one) => {
        const fits = kind.value === "wrong" ? isWrong(one) : kind.value === "spill" ? one.reason === "spill" : true;
        return fits && (!wanted || [one.request_id, one.replica, one.model, one.tenant].join(" ").toLowerCase().includes(wanted));
      });
    };
    words.addEventListener("input", filter);
    kind.addEventListener("change", filter);
  }

  take({ decisions, left_out: leftOut }) {
    const known = new Set(this.kept.map((one) => one.request_id));
    const fresh = decisions.filter((one) => !known.has(one.request_id)).reverse();
    this.kept = [...fresh, ...this.kept].slice(0, KEPT);
    this.leftOut += leftOut;
  }

  show(snapshot) {
    this.listen = snapshot?.router.listen ?? this.listen;
    const shown = this.table.show(this.kept);
    const some = shown < this.kept.length ? `, ${count(shown)} of them shown` : "";
    const left = this.leftOut ? ` · ${count(this.leftOut)} more were too many to show` : "";
    setText(byId("decisions-note"), this.kept.length ? `the last ${many(this.kept.length, "request")}${some}${left}` : "");
  }
}

/** Open one decision by its request id. */
export function explain(id) {
  show(`Request ${id}`, async () => {
    const { lines, record } = await ask(`admin/explain?request=${encodeURIComponent(id)}`);
    const words = el("pre", { class: "words" }, lines.map((line) => line.replace(/^ {2}/, "")).join("\n"));
    return [words, ...record.attempts.map((attempt, at) => candidates(attempt, at, record.attempts.length))];
  });
}

function candidates(attempt, at, tries) {
  const { decision, credits } = attempt;
  const names = [...new Set(decision.candidates.flatMap((one) => Object.keys(one.terms)))].sort();
  const hasLower = decision.candidates.some((one) => one.lower_tier_tokens);
  const hasCredits = Object.keys(credits).length > 0;
  const heads = ["Replica", "Score", ...names, "cached tokens"];
  if (hasLower) heads.push("in lower tiers");
  if (hasCredits) heads.push("credit");
  const sorted = [...decision.candidates].sort((a, b) => a.score - b.score);
  const rows = sorted.map((one) => {
    const isChosen = one.replica === decision.replica;
    const cells = [isChosen ? `${one.replica} (chosen)` : one.replica, digits(one.score), ...names.map((name) => digits(one.terms[name] ?? 0)), count(one.cached_tokens)];
    if (hasLower) cells.push(count(one.lower_tier_tokens));
    if (hasCredits) cells.push(digits(credits[one.replica] ?? 1));
    return { cells, mark: isChosen ? "chosen" : null };
  });
  const title = `${tries > 1 ? `Try ${at + 1}: ` : ""}${many(sorted.length, "candidate")}, lowest score wins`;
  return plainTable(title, heads, rows, new Set([...heads.keys()].slice(1)));
}

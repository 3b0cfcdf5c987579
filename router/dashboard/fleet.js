// The fleet: a row for each replica, and everything known of one in the dialog.

import { ask, facts, plainTable, show } from "./dialog.js";
import { byId, el, setAttribute, setText } from "./dom.js";
import { age, clock, count, many, NONE, percent, time } from "./format.js";
import { Table } from "./table.js";

/** States, the worst first, and their shapes. */
const SHAPES = { down: "✕", ejected: "⊘", probation: "◔", draining: "◐", back_pressure: "◑", slow_start: "◕", up: "●" };
const ORDER = Object.keys(SHAPES);
const OUT = new Set(["down", "ejected", "draining"]);

/** Whether requests may go there. */
export const isServing = (row) => !OUT.has(row.state);

/** What the names of notes and findings mean. */
const NOTES = {
  events_off: ["no events", "its engine tells nothing of its cache: what it holds is guessed"],
  no_sidecar: ["no sidecar", "nobody tells what it holds: it is guessed from what was sent there"],
  events_silent: ["events silent", "it works, and its KV events were never heard"],
  page_mismatch: ["page mismatch", "its pages do not fit the blocks of the index"],
  unknown_medium: ["unknown tier", "it names a tier that gets no credit"],
  keys_differ: ["keys differ", "its sidecar derives other block ids than this router"],
  prompt_mismatch: ["prompt mismatch", "it counts other prompt lengths than the router"],
  no_hits: ["no hits", "it reports nothing of what is predicted"],
  constant_ratio: ["constant ratio", "it reports a constant multiple of what is predicted"],
  low_precision: ["low precision", "it reports less than is predicted"],
  missing_events: ["missing events", "it reports more than is predicted"],
};

/** No faults, but good to know. */
const GUESSED = new Set(["no_sidecar", "events_off"]);

export const noteText = (note) => NOTES[note]?.[0] ?? note.replaceAll("_", " ");
const noteHint = (note) => NOTES[note]?.[1] ?? "";

const inflight = (row) => row.inflight + row.inflight_elsewhere;

const COLUMNS = [
  { id: "replica", label: "Replica", value: (r) => r.replica, text: (r) => r.replica },
  { id: "state", label: "State", value: (r) => ORDER.indexOf(r.state), draw: drawState },
  {
    id: "inflight", label: "In flight", numeric: true, hint: "open requests of all routers / how many there may be; in brackets those of other routers",
    value: inflight, text: inflightText,
  },
  { id: "queued", label: "Queued", numeric: true, hint: "requests that wait in the engine, as it reports", value: (r) => r.queued, text: (r) => count(r.queued) },
  { id: "kv", label: "KV in use", numeric: true, hint: "part of the KV cache that requests occupy, as the engine reports", value: (r) => r.kv_used_fraction, draw: drawKv },
  { id: "blocks", label: "Blocks", numeric: true, hint: "resident prefix blocks that are known, or guessed without a sidecar", value: (r) => r.resident_blocks, text: (r) => count(r.resident_blocks) },
  { id: "requests", label: "Req/min", numeric: true, hint: "requests of this router in the last minute", value: (r) => perMinute(r.last), text: (r) => count(perMinute(r.last)) },
  { id: "predicted", label: "Predicted", numeric: true, hint: "prompt tokens that were predicted to be cached, last minute", value: (r) => r.last?.predicted_share, text: (r) => percent(r.last?.predicted_share) },
  { id: "measured", label: "Hits", numeric: true, hint: "prompt tokens that the engine reported as cached, last minute", value: (r) => r.last?.measured_share, text: (r) => percent(r.last?.measured_share) },
  { id: "p50", label: "TTFT p50", numeric: true, hint: "time to first token, last minute", value: (r) => r.last?.ttft_p50_s, text: (r) => time(r.last?.ttft_p50_s) },
  { id: "p95", label: "p95", numeric: true, hint: "time to first token, last minute", value: (r) => r.last?.ttft_p95_s, text: (r) => time(r.last?.ttft_p95_s) },
  { id: "trust", label: "Trust", numeric: true, hint: "part of a prediction that counts in decisions", value: (r) => r.credit, text: (r) => percent(r.credit) },
  { id: "age", label: "Cache age", numeric: true, hint: "how long this life of its cache is known", value: (r) => r.generation_age_s, text: (r) => (r.is_age_least ? `≥ ${age(r.generation_age_s)}` : age(r.generation_age_s)) },
  { id: "notes", label: "Notes", value: (r) => (r.notes.length ? r.notes.map(noteText).join(", ") : null), draw: drawNotes },
];

function inflightText(row) {
  const limit = row.limit == null ? "" : ` / ${count(row.limit)}`;
  const others = row.inflight_elsewhere ? ` (${count(row.inflight_elsewhere)})` : "";
  return count(inflight(row)) + others + limit;
}

function perMinute(last) {
  return last ? Math.round((last.requests * 60) / Math.max(1, last.span_s)) : 0;
}

function drawState(cell, row) {
  const left = row.left_s == null ? "" : `, ${age(row.left_s)}`;
  const text = `${row.state.replaceAll("_", " ")}${left}`;
  setAttribute(cell, "title", row.why || null);
  if (cell.dataset.text === text) return;
  Object.assign(cell.dataset, { state: row.state, text });
  cell.className = "state";
  cell.replaceChildren(el("span", { "aria-hidden": "true" }, SHAPES[row.state] ?? "○"), ` ${text}`);
}

function drawKv(cell, row) {
  const used = row.kv_used_fraction;
  if (cell.firstElementChild === null) cell.append(el("span", { class: "meter", "aria-hidden": "true" }, el("i")), el("span"));
  const [meter, text] = cell.children;
  meter.hidden = used == null;
  if (used != null) meter.firstElementChild.style.width = `${Math.min(100, used * 100)}%`;
  setAttribute(meter, "data-level", used > 0.95 ? "full" : null);
  setAttribute(text, "class", used == null ? "note" : null);
  setText(text, used == null ? "unknown" : percent(used));
}

function drawNotes(cell, row) {
  const key = row.notes.join();
  if (cell.dataset.notes === key) return;
  cell.dataset.notes = key;
  cell.className = "notes";
  const chips = row.notes.map((note) => el("span", { class: "chip", title: noteHint(note), "data-level": GUESSED.has(note) ? "info" : "warn" }, noteText(note)));
  cell.replaceChildren(...chips);
}

export class Fleet {
  constructor() {
    this.listen = null;
    this.diagnoses = [];
    this.table = new Table(byId("fleet-table"), {
      label: "Replicas", columns: COLUMNS, key: (row) => row.replica, sort: "replica",
      open: (row) => this.#open(row),
      empty: () => [
        el("b", {}, "No replica is known. "), "Name engines with ", el("code", {}, "warmroute serve --replica http://HOST:PORT"),
        ", or run a sidecar beside each: ", el("code", {}, "warmroute sidecar --redis URL --engine URL"), ".",
      ],
    });
    const words = byId("fleet-filter");
    const state = byId("fleet-state");
    const filter = () => {
      const wanted = words.value.trim().toLowerCase();
      this.table.filter((row) => {
        const fits = fitsState(row, state.value);
        return fits && (!wanted || haystack(row).includes(wanted));
      });
      this.#count();
    };
    words.addEventListener("input", filter);
    state.addEventListener("change", filter);
  }

  show(snapshot) {
    this.diagnoses = snapshot.diagnoses;
    this.table.show(snapshot.replicas);
    this.#count();
  }

  #count() {
    const rows = this.table.rows;
    const shown = rows.filter(this.table.matches).length;
    const up = rows.filter(isServing).length;
    const all = rows.length ? `${count(up)} of ${many(rows.length, "replica")} up` : "";
    setText(byId("fleet-count"), shown === rows.length ? all : `${all} · ${count(shown)} shown`);
  }

  #open(row) {
    show(row.replica, async () => {
      const views = await ask("admin/replicas");
      const view = views.find((one) => one.replica === row.replica);
      if (!view) throw new Error("This replica has left the fleet.");
      return details(view, row, this.diagnoses.filter((one) => one.replica === row.replica));
    });
  }
}

function fitsState(row, wanted) {
  if (wanted === "noted") return row.notes.length > 0;
  if (wanted === "other") return !["up", "down", "draining"].includes(row.state);
  return !wanted || row.state === wanted;
}

function haystack(row) {
  return [row.replica, row.endpoint, ...row.models, ...row.notes, ...row.notes.map(noteText)].join(" ").toLowerCase();
}

function details(view, row, findings) {
  const engine = view.facts;
  const events = engine?.counts;
  const nodes = findings.map((one) => finding(one));
  for (const note of row.notes.filter((name) => noteHint(name) && !findings.some((one) => one.kind === name))) {
    nodes.push(el("p", { class: "alert", "data-level": GUESSED.has(note) ? "info" : "warn" }, el("b", {}, noteText(note)), ` ${noteHint(note)}`));
  }
  nodes.push(
    facts([
      ["State", [row.state.replaceAll("_", " "), row.left_s == null ? "" : `for ${age(row.left_s)} more`, row.why].filter(Boolean).join(", ")],
      ["Endpoint", view.endpoint + (view.rank == null ? "" : `, rank ${view.rank}`)],
      ["Models", view.models.length > 12 ? `${view.models.slice(0, 12).join(", ")} and ${view.models.length - 12} more` : view.models.join(", ")],
      ["Engine", engine ? `${engine.engine} ${engine.engine_version ?? ""}`.trim() : "unknown: no sidecar tells of it"],
      ["In flight", `${count(view.inflight)} of this router, ${count(view.inflight_elsewhere)} of others`],
      ["May have", row.limit == null ? null : `${count(row.limit)} in flight`],
      ["Engine's load", view.load ? `${count(view.load.running)} running, ${count(view.load.queued)} queued, KV cache ${view.load.kv_used_fraction == null ? "unknown" : percent(view.load.kv_used_fraction)} in use` : "unknown"],
      ["Index", `${count(view.resident_blocks)} blocks of ${view.block_tokens ?? NONE} tokens` + (view.registered ? "" : ", guessed")],
      ["Capacity", view.capacity_tokens == null ? "unknown" : `${count(view.capacity_tokens)} tokens` + (view.page_tokens ? `, pages of ${view.page_tokens}` : "")],
      ["Generation", view.generation ? `${view.generation}, for ${row.is_age_least ? "at least " : ""}${age(row.generation_age_s)}` + (engine?.reason ? ` (${engine.reason})` : "") : null],
      ["Events", engine ? (engine.events ? `${engine.events}${engine.has_replay ? "" : ", no replay"}` : "none") : null],
      ["Event batches", events ? `${count(events.batches)}, last sequence ${events.last_sequence ?? NONE}, ${count(events.gaps)} gaps, ${count(events.missed_batches)} missed` : null],
      ["Pages held", events ? `${count(events.held_pages)}; ${count(events.stored_pages)} stored, ${count(events.removed_pages)} removed, ${count(events.returned_pages)} computed again` : null],
      ["Fetches pages", view.can_fetch ? "yes" : "no"],
    ]),
  );
  if (view.trust.length) {
    const rows = view.trust.map((one) => ({
      cells: [one.model ?? NONE, one.ground, percent(one.precision), percent(one.recall), percent(one.credit), count(one.predicted_tokens), count(one.reported_tokens)],
    }));
    nodes.push(plainTable("How far predictions come true", ["Model", "Known by", "Precision", "Recall", "Credit", "Predicted tokens", "Reported tokens"], rows, new Set([2, 3, 4, 5, 6])));
  }
  return nodes;
}

export function finding(one) {
  return el(
    "article", { class: "finding" },
    el("h3", {}, `${noteText(one.kind)} · `, el("span", {}, one.replica)),
    el("p", {}, one.finding), el("p", {}, one.advice),
    el("p", { class: "note" }, `model ${one.model || NONE} · since ${clock(one.since_unix_s)}` + (one.times > 1 ? ` · ${one.times} times` : "")),
  );
}


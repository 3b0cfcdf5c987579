// Policy and state in force: all that /admin/router tells, and what it will tell later, too.
//
// Fields that this page does not know are shown as they are, nested ones as lists: weights that
// become part of the answer appear here without a change.

import { byId, el, setText } from "./dom.js";
import { facts } from "./dialog.js";
import { isServing } from "./fleet.js";
import { age, bytes, count, NONE } from "./format.js";

const KNOWN = new Set(["rung", "state_age_s", "state", "lookup", "policy", "models", "default_tokens", "has_tenants", "listen", "recent", "admission"]);
const RUNGS = {
  live: "live: the shared state is followed",
  stale: "stale: the last known view counts, less with time",
  local: "local: what this router sent where, and load",
};

const TOKENS = {
  engine: "asked of engines, no model has a tokenizer here",
  bytes: "none, prompts are read as bytes",
  off: "none, requests go by load",
};

let shown = "";

export function showPolicy(snapshot) {
  showFacts(snapshot);
  const { router, replica_connections: connections, viewers } = snapshot;
  const key = JSON.stringify([{ ...router, state_age_s: Math.floor(router.state_age_s) }, connections, viewers]);
  if (key === shown) return;
  shown = key;
  const recent = router.recent;
  const pairs = [
    ["Policy", router.policy],
    ...Object.entries(router).filter(([name]) => !KNOWN.has(name)).map(([name, value]) => [words(name), tree(value)]),
    ["Shared state", `${router.state ?? "a private server"} · ${router.lookup}`],
    ["Rung", `${RUNGS[router.rung] ?? router.rung}${router.rung === "live" ? "" : `, ${age(router.state_age_s)} old`}`],
    ["Tokens", router.models.length ? null : TOKENS[router.default_tokens] ?? router.default_tokens],
    ...router.models.map((model) => [`Model ${model.name}`, model.tokenizer ? `tokenizer ${model.tokenizer}` : `tokens from ${model.tokens ?? router.default_tokens}`]),
    ...admission(router.admission),
    ["Last requests", recent.requests ? `${count(recent.requests)}, of them ${count(recent.short)} shorter than a block, ${count(recent.inexact)} long ones read as bytes` : null],
    ...Object.entries(recent.unroutable).map(([why, requests]) => ["Routed by load", `${count(requests)}: ${why}`]),
    ["Connections", `${count(connections)} to replicas, ${count(viewers)} to pages like this one`],
  ];
  byId("policy").replaceChildren(facts(pairs));
}

/** What is admitted now; its figures change often. */
function admission(view) {
  if (!view) return [];
  const memory = view.memory_bytes == null ? null : `${bytes(view.memory_bytes)}${view.memory_limit_bytes == null ? "" : ` of ${bytes(view.memory_limit_bytes)}`}`;
  return [
    ["Admission", `${view.rung.replaceAll("_", " ")}: ${count(view.inflight)} of ${count(view.places)} places taken, ${count(view.waiting)} of ${count(view.pending)} may wait`],
    ["Routers", `${count(view.routers)} live`],
    ["Memory", memory],
  ];
}

function tree(value) {
  if (value === null) return NONE;
  if (Array.isArray(value)) return value.length ? el("ul", { class: "tree" }, ...value.map((one) => el("li", {}, tree(one)))) : NONE;
  if (typeof value === "object") return facts(Object.entries(value).map(([name, one]) => [words(name), tree(one)]));
  return String(value);
}

const words = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");

const FACTS = ["Policy", "State", "Replicas", "Clients", "Up for", "Version"];
let cells = null;

function showFacts({ router, replicas, version, unix_s: now, started_unix_s: started }) {
  if (!cells) {
    cells = FACTS.map((name) => {
      const value = el("dd");
      byId("facts").append(el("div", {}, el("dt", {}, name), value));
      return value;
    });
  }
  const up = replicas.filter(isServing).length;
  const rung = router.rung === "live" ? "live" : `${router.rung}, ${age(router.state_age_s)}`;
  const texts = [router.policy, rung, `${up}/${replicas.length} up`, router.listen ?? NONE, age(now - started), version];
  texts.forEach((text, at) => setText(cells[at], text));
  cells[1].dataset.level = router.rung === "live" ? "good" : "warn";
  cells[2].dataset.level = up === replicas.length && up ? "good" : "warn";
}

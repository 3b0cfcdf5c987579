// A canary: how it stands in words and numbers, and what may be done about it.

import { ask, facts, plainTable } from "./dialog.js";
import { byId, el, setText } from "./dom.js";

const PATH = "admin/canary";
const FORM = byId("canary-form");
const SAID = byId("canary-said");
const AGAIN_MS = 2_000;
const UNPROVEN = "canary_unproven";
const GROUPS = 32;
const NAMES = { ttft_mean: "mean TTFT", ttft_p95: "p95 of TTFT", errors: "errors", token_hits: "token hits", imbalance: "imbalance" };

let version = null;
let nextMs = 0;
let shown = "";

/** Follow it: often while it runs, else when the settings change. */
export function showCanary({ router }) {
  const now = performance.now();
  if (router.settings_version === version && now < nextMs) return;
  version = router.settings_version;
  nextMs = now + AGAIN_MS;
  refresh().catch((error) => setText(byId("canary-note"), error.message));
}

async function refresh() {
  const view = await ask(PATH);
  const key = JSON.stringify({ ...view, unix_s: 0 });
  if (key === shown) return;
  shown = key;
  const { state, settings, last } = view;
  const isThere = state !== "none";
  setText(byId("canary-note"), isThere ? `${settings.id}: ${state}` : "none");
  for (const button of FORM.querySelectorAll("button")) button.disabled = (button.value === "start") === isThere;
  const verdict = view.verdict ?? last?.verdict;
  byId("canary-now").replaceChildren(
    facts([
      ["Candidate", isThere ? JSON.stringify(settings.policy) : null],
      ["Share", isThere ? (settings.tenants.length ? settings.tenants.join(", ") : `${settings.percent} % of ${settings.split === "tenant" ? "tenants" : "conversations"}`) : null],
      ["Left", view.left_s == null ? null : `${Math.round(view.left_s)} s, then ${settings.at_end}`],
      [view.processes.length ? "Of one process alone" : "This router alone", view.fault],
      ["Processes", view.processes.map((one) => `${one.process}: ${one.state}${one.own ? `, ${one.own.candidate} of the candidate, ${one.own.control} of the control` : ""}${one.fault ? ", cut off" : ""}`).join("; ")],
      ["Last", last ? `version ${last.version}, ${last.author}: ${last.reason}` : null],
      ["Split", view.note],
      ["Groups", verdict?.candidate_groups == null ? null : `with any request: ${verdict.candidate_groups} of ${GROUPS} of the candidate, ${verdict.control_groups} of ${GROUPS} of the control`],
      ["Verdict", verdict ? `${verdict.word}: ${verdict.candidate_requests} requests of the candidate, ${verdict.control_requests} of the control` : null],
    ]),
    verdict ? plainTable("Candidate beside control", ["figure", "word", "control", "candidate", "change", "interval", "limit"], verdict.measures.map(row)) : "",
  );
}

function row(one) {
  const isRatio = one.kind === "ratio";
  const number = (value) => (value == null ? "\u2013" : isRatio ? value.toFixed(3) : `${(100 * value).toFixed(2)} points`);
  const side = (value) => (value == null ? "\u2013" : one.name.startsWith("ttft") ? `${(1000 * value).toPrecision(4)} ms` : isRatio ? value.toFixed(3) : `${(100 * value).toFixed(2)} %`);
  const limit = one.limit == null ? "none" : `${number(one.limit)}${one.is_broken ? ", broken" : one.is_within ? ", within" : ""}`;
  const interval = one.change == null ? one.why : `${one.low == null ? "0" : number(one.low)} to ${one.high == null ? "any" : number(one.high)}`;
  return { cells: [NAMES[one.name], one.word, side(one.control), side(one.candidate), number(one.change), interval, limit], mark: one.is_broken ? "chosen" : null };
}

/** "w_copy=0.8 kind=weighted" as an object; a value that is no JSON is text. */
function policyOf(text) {
  const pairs = text.trim().split(/\s+/).filter(Boolean).map((word) => word.split("="));
  return Object.fromEntries(pairs.map(([name, value]) => {
    try {
      return [name, JSON.parse(value)];
    } catch {
      return [name, value];
    }
  }));
}

FORM.addEventListener("submit", async (event) => {
  event.preventDefault();
  const action = event.submitter?.value ?? "start";
  const fields = new FormData(FORM);
  const body = { author: fields.get("author"), reason: fields.get("reason") };
  if (action === "start") Object.assign(body, { policy: policyOf(fields.get("policy")), percent: Number(fields.get("percent")), duration_s: Number(fields.get("duration")) });
  await send(action, body);
});

/** Ask for a change. A promotion that the verdict does not carry is told with it, and may be asked for all the same. */
async function send(action, body) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  try {
    const told = await ask(action === "start" ? PATH : `${PATH}/${action}`, request);
    SAID.replaceChildren(el("p", {}, `Version ${told.version} is in force.`));
    await refresh();
  } catch (error) {
    SAID.replaceChildren(el("div", { class: "alert", "data-level": "error" }, el("b", {}, "Refused"), ` ${error.message}`));
    if (error.code !== UNPROVEN) return;
    const anyway = el("button", { type: "button" }, "Promote all the same");
    anyway.addEventListener("click", () => send(action, { ...body, force: true }));
    SAID.append(anyway);
  }
}

// Settings: what is in force and why, a change that is tried first, and the way back.
//
// The router checks every value; this page only sends what was typed and shows what it answers.

import { ask, facts, plainTable, show } from "./dialog.js";
import { byId, el, setText } from "./dom.js";

const PATH = "admin/settings";
const FORM = byId("settings-form");
const SAID = byId("settings-said");
const APPLY = byId("settings-apply");
const AGAIN_MS = 10_000;

let seen = null;
let nextMs = 0;
let shown = "";
let tried = null;

/** Follow the version that a snapshot tells; the settings themselves are asked for when it changes. */
export function showSettings({ router }) {
  const now = performance.now();
  if (router.settings_version === seen && now < nextMs) return;
  seen = router.settings_version;
  nextMs = now + AGAIN_MS;
  refresh().catch((error) => setText(byId("settings-note"), error.message));
}

async function refresh() {
  const [view, history] = await Promise.all([ask(PATH), ask(`${PATH}/history`)]);
  const key = JSON.stringify([view, history]);
  if (key === shown) return;
  shown = key;
  setText(byId("settings-note"), view.version ? `version ${view.version}` : "the configuration file alone");
  const values = leaves(view.values);
  byId("settings-now").replaceChildren(
    facts([
      ["By", view.author],
      ["Reason", view.reason],
      ["Refused", view.fault],
    ]),
    plainTable("Settings in force", ["key", "value", "from"], values.map(([name, value]) => {
      const from = view.sources[name] ?? "file";
      return { cells: [name, JSON.stringify(value), from], mark: from === "document" ? "chosen" : null };
    })),
  );
  byId("settings-keys").replaceChildren(...values.map(([name]) => el("option", { value: name })));
  byId("settings-history").replaceChildren(
    history.length ? plainTable("Changes of settings", ["version", "when", "by", "reason", "changes", "back"], history.map((one) => row(one, view.version))) : el("p", { class: "note" }, "nothing was changed yet"),
  );
}

function row(one, version) {
  const back = one.version !== version ? el("button", { type: "button", onclick: () => askBack(one.version) }, `Roll back to ${one.version}`) : "in force";
  const when = new Date(one.unix_s * 1000).toISOString().replace("T", " ").slice(0, 19);
  return { cells: [one.version, when, one.author, one.reason, changes(one.changes), back] };
}

function changes(rows) {
  if (!rows) return "not known";
  if (!rows.length) return "none";
  const text = (value) => (value == null ? "–" : JSON.stringify(value));
  return el("ul", { class: "tree" }, ...rows.map(({ key, before, after }) => el("li", {}, `${key}: ${text(before)} → ${text(after)}`)));
}

function leaves(values, prefix = "") {
  return Object.entries(values).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) ? leaves(value, `${prefix}${name}.`) : [[prefix + name, value]],
  );
}

function post(path, body) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

// A change: tried first, and made only as it was tried.

function say(level, ...content) {
  SAID.replaceChildren(...(level ? [el("div", { class: "alert", "data-level": level }, ...content)] : content));
}

async function wanted() {
  const fields = new FormData(FORM);
  let value = fields.get("value");
  try {
    value = JSON.parse(value);
  } catch {
    // text, as a kind of policy is
  }
  const patch = fields.get("key").trim().split(".").reduceRight((inner, name) => ({ [name]: inner }), value);
  const { stored_version: expected } = await ask(PATH);
  return { patch, author: fields.get("author"), reason: fields.get("reason"), expected_version: expected };
}

function forget() {
  tried = null;
  APPLY.disabled = true;
}

FORM.addEventListener("input", forget);
FORM.addEventListener("submit", async (event) => {
  event.preventDefault();
  forget();
  try {
    const body = await wanted();
    const { changes: rows } = await post(PATH, { ...body, dry_run: true });
    say(null, el("p", {}, rows.length ? "This would change in all routers:" : "This changes nothing that is in force."), rows.length ? changes(rows) : "");
    tried = body;
    APPLY.disabled = false;
  } catch (error) {
    say("error", el("b", {}, "Refused"), ` ${error.message}`);
  }
});
APPLY.addEventListener("click", async () => {
  const body = tried;
  forget();
  if (!body) return;
  try {
    const { version } = await post(PATH, body);
    say(null, el("p", {}, `Version ${version} is in force.`));
    await refresh();
  } catch (error) {
    say("error", el("b", {}, "Refused"), ` ${error.message}`);
  }
});

// The way back: what it would change, why, and a button that says what it does.

function askBack(version) {
  show(`Roll back to version ${version}`, async () => {
    const author = FORM.elements.author.value || "page";
    const { stored_version: expected } = await ask(PATH);
    const trial = { version, author, reason: "a trial", expected_version: expected, dry_run: true };
    const { changes: rows } = await post(`${PATH}/rollback`, trial);
    const reason = el("input", { name: "reason", required: true, maxlength: 500, autocomplete: "off" });
    const who = el("input", { name: "author", required: true, maxlength: 128, value: FORM.elements.author.value, autocomplete: "off" });
    const said = el("p", { role: "status" });
    const form = el("form", { class: "change" }, el("label", {}, "Reason ", reason), el("label", {}, "Author ", who), el("button", { type: "submit" }, `Roll back to version ${version}`), said);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        const told = await post(`${PATH}/rollback`, { version, author: who.value, reason: reason.value, expected_version: expected });
        setText(said, `Version ${told.version} is in force.`);
        await refresh();
      } catch (error) {
        setText(said, `Refused: ${error.message}`);
      }
    });
    return [el("p", {}, "In all routers this changes:"), changes(rows), form];
  });
}

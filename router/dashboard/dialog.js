// The one dialog. A native modal one: the rest is inert, Escape closes it, focus goes back.

import { byId, el, setText } from "./dom.js";

const dialog = byId("dialog");
const body = byId("dialog-body");
let onClose = null;

byId("dialog-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // the backdrop
});
dialog.addEventListener("close", () => {
  body.replaceChildren();
  onClose?.();
  onClose = null;
});

/** Open it with a title and a promise of what to show. */
export async function show(title, content) {
  const before = document.activeElement;
  setText(byId("dialog-title"), title);
  body.replaceChildren(el("p", { class: "note" }, "asking the router"));
  onClose = () => before?.isConnected && before.focus({ preventScroll: true });
  if (!dialog.open) dialog.showModal();
  body.scrollTop = 0;
  let nodes;
  try {
    nodes = await content();
  } catch (error) {
    nodes = [el("p", { class: "alert", "data-level": "error" }, el("b", {}, "Error"), ` ${error.message}`)];
  }
  if (dialog.open && byId("dialog-title").textContent === title) body.replaceChildren(...nodes);
}

/** Return what a path of the operators' listener answers; throws with its own words and code. */
export async function ask(path, request = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...request });
  } catch {
    throw new Error("The router does not answer.");
  }
  const said = await answer.json().catch(() => null);
  if (!answer.ok) throw Object.assign(new Error(said?.error?.message ?? `The router answered ${answer.status}.`), { code: said?.error?.code });
  return said;
}

/** A list of names and values; values may be elements, null ones are left out. */
export function facts(pairs) {
  const list = el("dl", { class: "pairs" });
  for (const [name, value] of pairs) {
    if (value == null || value === "") continue;
    list.append(el("dt", {}, name), el("dd", {}, value));
  }
  return list;
}

/** A plain table of strings; the columns in `numeric` are aligned to the right. */
export function plainTable(caption, names, rows, numeric = new Set()) {
  const side = (at) => (numeric.has(at) ? "num" : null);
  const head = el("tr", {}, ...names.map((name, at) => el("th", { scope: "col", class: side(at) }, name)));
  const body = el("tbody");
  for (const { cells, mark } of rows) {
    const line = el("tr", { class: mark ?? null });
    cells.forEach((cell, at) => line.append(el(at ? "td" : "th", { class: side(at), scope: at ? null : "row" }, cell)));
    body.append(line);
  }
  const table = el("table", {}, el("caption", {}, caption), el("thead", {}, head), body);
  return el("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, table);
}

// A table that sorts and filters, and changes only the cells that changed.
//
// A column: { id, label, hint?, numeric?, value(row), text?(row), draw?(cell, row), fixed? }.
// value(row) sorts (null comes last, whichever way); text(row) is shown; draw(cell, row) in its place.

import { arrange, el, setAttribute, setText } from "./dom.js";

export class Table {
  constructor(parent, { label, columns, key, empty, open, sort, descending = false, unsorted = false, most = Infinity }) {
    this.columns = columns;
    this.key = key;
    this.open = open;
    this.sort = sort ?? (unsorted ? null : columns[0].id);
    this.descending = descending;
    this.most = most;
    this.rows = [];
    this.kept = new Map();
    this.matches = () => true;
    this.heads = new Map();
    const head = el("tr");
    for (const column of columns) head.append(this.#head(column, unsorted));
    this.body = el("tbody");
    this.empty = el("div", { class: "empty", hidden: true });
    this.emptyText = empty;
    this.table = el("table", {}, el("caption", { class: "unseen" }, label), el("thead", {}, head), this.body);
    this.scroll = el("div", { class: "scroll", role: "region", "aria-label": `Table: ${label}`, tabindex: "0" }, this.table);
    parent.append(this.scroll, this.empty);
  }

  #head(column, unsorted) {
    const head = el("th", { scope: "col", class: column.numeric ? "num" : null, title: column.hint });
    if (unsorted || column.fixed) {
      head.append(column.label);
      return head;
    }
    const button = el("button", { type: "button", class: "sort", onclick: () => this.#sortBy(column) }, column.label);
    head.append(button);
    this.heads.set(column.id, head);
    return head;
  }

  #sortBy(column) {
    if (this.sort === column.id) this.descending = !this.descending;
    else [this.sort, this.descending] = [column.id, Boolean(column.numeric)];
    this.show(this.rows);
  }

  filter(matches) {
    this.matches = matches;
    this.show(this.rows);
  }

  /** Show these rows, as far as they match and there is room; return how many are shown. */
  show(rows) {
    this.rows = rows;
    const shown = this.#sorted(rows.filter(this.matches)).slice(0, this.most);
    for (const [id, head] of this.heads) {
      const order = this.descending ? "descending" : "ascending";
      setAttribute(head, "aria-sort", id === this.sort ? order : "none");
    }
    const kept = new Map();
    const elements = shown.map((row) => {
      const key = this.key(row);
      const line = this.kept.get(key) ?? this.#line(key);
      this.#fill(line, row);
      kept.set(key, line);
      return line.element;
    });
    this.kept = kept;
    arrange(this.body, elements);
    this.#hint(rows.length, shown.length);
    return shown.length;
  }

  #hint(all, shown) {
    this.scroll.hidden = shown === 0;
    this.empty.hidden = shown > 0;
    if (shown > 0) return;
    const nodes = all > 0 ? ["Nothing matches the filter."] : [this.emptyText()].flat();
    const text = nodes.map((node) => node.textContent ?? node).join("");
    if (this.empty.textContent !== text) this.empty.replaceChildren(...nodes);
  }

  #sorted(rows) {
    const column = this.columns.find((one) => one.id === this.sort);
    if (!column) return rows;
    const sign = this.descending ? -1 : 1;
    const valued = rows.map((row, at) => ({ row, at, value: column.value(row) }));
    valued.sort((a, b) => {
      if (a.value == null || b.value == null) return (a.value == null) - (b.value == null) || a.at - b.at;
      if (typeof a.value === "string") return sign * collator.compare(a.value, b.value) || a.at - b.at;
      return sign * (a.value - b.value) || a.at - b.at;
    });
    return valued.map((one) => one.row);
  }

  #line(key) {
    const element = el("tr", { "data-key": key });
    const cells = this.columns.map((column, at) => {
      const cell = at === 0 ? el("th", { scope: "row" }) : el("td", { class: column.numeric ? "num" : null });
      element.append(cell);
      return cell;
    });
    const line = { element, cells, button: null, row: null };
    if (this.open) {
      line.button = el("button", { type: "button", class: "open", onclick: () => this.open(line.row) });
      cells[0].append(line.button);
    }
    return line;
  }

  #fill(line, row) {
    line.row = row;
    this.columns.forEach((column, at) => {
      const target = at === 0 && line.button ? line.button : line.cells[at];
      if (column.draw) column.draw(target, row, line.cells[at]);
      else setText(target, column.text(row));
    });
  }
}

const collator = new Intl.Collator("en", { numeric: true });

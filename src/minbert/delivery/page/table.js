// A table whose columns sort: by a button in the head, told to screen readers by aria-sort.

import { el, scrolling } from "./dom.js";

/** Columns are {name, value: row => sortable, cell: row => node or text, figure}. */
export class SortedTable {
  constructor(caption, columns) {
    this.columns = columns;
    this.by = { column: 0, up: true };
    this.heads = columns.map((column, number) =>
      el(
        "th",
        { scope: "col", class: column.figure && "figure" },
        el("button", { type: "button", onclick: () => this.sort(number) }, column.name),
      ),
    );
    this.body = el("tbody");
    const head = el("thead", {}, el("tr", {}, ...this.heads));
    const title = el("caption", { class: "unseen" }, caption);
    this.node = scrolling(caption, el("table", { class: "sorted" }, title, head, this.body), "tall");
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  sort(column) {
    const first = !this.columns[column].figure || column === 0; // figures are wanted largest first
    this.by = { column, up: this.by.column === column ? !this.by.up : first };
    this.draw();
  }

  get sorted() {
    const { column, up } = this.by;
    const { value } = this.columns[column];
    const order = (one, other) => (typeof one === "string" ? one.localeCompare(other) : one - other);
    return [...this.rows].sort((one, other) => order(value(one), value(other)) * (up ? 1 : -1));
  }

  draw() {
    this.heads.forEach((head, number) => {
      if (number === this.by.column) head.setAttribute("aria-sort", this.by.up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    const cell = (column, row) => el("td", { class: column.figure ? "figure" : column.class }, column.cell(row));
    const rows = this.sorted.map((row) => el("tr", {}, ...this.columns.map((column) => cell(column, row))));
    this.body.replaceChildren(...rows);
  }
}

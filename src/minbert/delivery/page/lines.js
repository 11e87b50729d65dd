// Many lines: a table, a heat map, the nearest pairs, a file to take away, and the lines nearest to a question.

import { ask, cosine, embed, Latest } from "./api.js";
import { csv, download } from "./csv.js";
import { byId, card, cost, debounce, el, examples, fixed, grow, percent, plural, say } from "./dom.js";
import { Finder } from "./find.js";
import { HeatMap } from "./heatmap.js";
import { clear, fail } from "./notice.js";
import { SortedTable } from "./table.js";

const PAIRS = 8;
const EXAMPLES = [
  [
    "Guests of a café",
    `The cake was wonderful and the staff were kind.
Lovely place, and the best lemon cake in town!
We waited forty minutes, and then they forgot our order.
Nobody came to our table for half an hour.
The coffee is fine, nothing special.
An ordinary cup of coffee at an ordinary price.
It opens at eight and closes at six.
My favourite corner to read in the whole city.`,
  ],
  [
    "Questions",
    `How do I remove a coffee stain from a carpet?
What gets coffee out of a rug?
How can I learn to swim as an adult?
Is it too late to take up swimming at forty?
Why does my bicycle chain keep falling off?
How often should a bicycle chain be oiled?
What is a good name for a black cat?
Where can I repair my bicycle on a Sunday?
How do I keep basil alive in winter?`,
  ],
];

export class LinesPanel {
  constructor(model, remember, openPair) {
    this.model = model;
    this.tasks = model.tasks.filter((task) => task.reads === "text");
    this.names = this.tasks.map((task) => task.name);
    this.field = byId("lines");
    this.fit = grow(this.field, 260);
    this.remember = remember;
    this.openPair = openPair;
    this.answers = new Latest((error) => fail(error, () => this.update()));
    this.parts = null;
    this.finder = new Finder(model, (error) => fail(error, () => this.finder.update()));
    const soon = debounce(() => this.update(), 350);
    this.field.addEventListener("input", soon);
    examples(byId("lines-examples"), EXAMPLES, (lines) => {
      this.set(lines);
      soon.now();
    });
  }

  get state() {
    return { lines: this.field.value, find: this.finder.field.value };
  }

  set(lines) {
    this.field.value = lines;
    this.fit();
  }

  load(state) {
    this.set(state.get("lines") ?? "");
    this.finder.field.value = state.get("find") ?? "";
  }

  update() {
    this.remember();
    const all = this.field.value.split("\n").map((line) => line.trim()).filter(Boolean);
    const lines = all.slice(0, this.model.allowed.texts);
    if (!lines.length) {
      this.answers.stop();
      clear();
      this.parts = null;
      cost(byId("lines-cost"));
      this.finder.over([], []);
      byId("lines-results").replaceChildren(
        el("p", { class: "empty" }, "A table, a heat map and the nearest pairs appear here."),
        this.model.index ? this.finder.node : "",
      );
      return;
    }
    this.answers.run(async (signal, current) => {
      const found = await Promise.all([
        this.tasks.length ? ask("v1/predict", { texts: lines, tasks: this.names }, signal) : null,
        this.model.embeddings ? embed(lines, signal) : null,
      ]);
      if (!current()) return;
      clear();
      this.show(lines, all.length, ...found);
    });
  }

  show(lines, given, answered, embedded) {
    const matrix = embedded?.vectors.map((one) => embedded.vectors.map((other) => cosine(one, other)));
    const rows = lines.map((text, number) => ({
      number,
      text,
      answers: answered?.data.texts[number] ?? {},
      nearest: matrix && lines.length > 1 ? nearest(matrix[number], number) : null,
    }));
    this.rows = rows;
    this.parts ??= this.build();
    this.parts.table.show(rows);
    const left = given > lines.length ? ` of ${given}; the server takes ${lines.length} at once` : "";
    this.parts.count.textContent = plural(lines.length, "line") + left;
    this.parts.alike.hidden = !matrix || lines.length < 2;
    if (matrix) {
      this.parts.heat.show(lines, matrix);
      this.drawPairs(lines, matrix);
      this.finder.over(lines, embedded.vectors);
    }
    cost(byId("lines-cost"), ["Answers", [answered]], ["Vectors", [embedded]]);
    say(`${plural(lines.length, "line")} answered.`);
  }

  build() {
    const table = new SortedTable("Answers, one row a line", this.columns());
    const heat = new HeatMap((row, column) => this.openPair(this.rows[row].text, this.rows[column].text));
    const count = el("p", { class: "muted" });
    const pairs = el("ol", { class: "pairs" });
    const alike = el(
      "div",
      { class: "two wide" },
      card("How alike they are", heat.node),
      card("Nearest pairs", pairs),
    );
    const save = el("button", { type: "button", id: "download", onclick: () => this.save() }, "Download CSV");
    const head = el("div", { class: "headed" }, el("h2", {}, "Answers"), count, save);
    byId("lines-results").replaceChildren(
      el("article", { class: "card" }, head, table.node),
      alike,
      this.model.embeddings ? this.finder.node : "",
    );
    return { table, heat, count, pairs, alike };
  }

  columns() {
    const columns = [
      { name: "#", figure: true, value: (row) => row.number, cell: (row) => String(row.number + 1) },
      { name: "text", class: "text", value: (row) => row.text, cell: (row) => row.text },
    ];
    for (const { name, classes } of this.tasks) {
      const score = (row) => row.answers[name].score;
      const rank = (row) => classes.indexOf(row.answers[name].label) + row.answers[name].probability / 2;
      const label = (row) => labelled(row.answers[name]);
      if (classes.length) columns.push({ name, class: "label", value: rank, cell: label });
      else columns.push({ name, figure: true, value: score, cell: (row) => fixed(score(row)) });
    }
    if (this.model.embeddings)
      columns.push({
        name: "nearest",
        figure: true,
        value: (row) => row.nearest?.value ?? -2,
        cell: (row) => (row.nearest ? `${fixed(row.nearest.value)} with ${row.nearest.number + 1}` : "–"),
      });
    return columns;
  }

  drawPairs(lines, matrix) {
    const found = [];
    for (let one = 0; one < lines.length; one++)
      for (let other = one + 1; other < lines.length; other++) found.push([matrix[one][other], one, other]);
    found.sort((a, b) => b[0] - a[0]);
    this.parts.pairs.replaceChildren(
      ...found.slice(0, PAIRS).map(([value, one, other]) =>
        el(
          "li",
          {},
          el(
            "button",
            { type: "button", class: "pair", onclick: () => this.openPair(lines[one], lines[other]) },
            el("b", {}, fixed(value)),
            el("span", { class: "text" }, `${one + 1}. ${lines[one]}`),
            el("span", { class: "text" }, `${other + 1}. ${lines[other]}`),
          ),
        ),
      ),
    );
  }

  save() {
    const header = ["line", "text"];
    for (const task of this.tasks) header.push(task.name, ...task.classes.map((name) => `${task.name}: ${name}`));
    if (this.model.embeddings) header.push("nearest line", "nearest text", "cosine");
    const rows = this.parts.table.sorted.map((row) => {
      const cells = [row.number + 1, row.text];
      for (const task of this.tasks) {
        const answer = row.answers[task.name];
        cells.push(answer.label ?? answer.score, ...task.classes.map((name) => answer.probabilities[name]));
      }
      if (!this.model.embeddings) return cells;
      const near = row.nearest;
      return [...cells, ...(near ? [near.number + 1, this.rows[near.number].text, near.value] : [null, null, null])];
    });
    download("minbert.csv", csv(header, rows));
  }
}

const labelled = (answer) => {
  const bar = el("span", { class: "tiny", "aria-hidden": "true", css: { "--share": answer.probability } });
  return el("span", {}, answer.label, el("span", { class: "muted" }, ` ${percent(answer.probability)}`), bar);
};

function nearest(values, own) {
  let best = null;
  values.forEach((value, number) => {
    if (number !== own && (!best || value > best.value)) best = { number, value };
  });
  return best;
}

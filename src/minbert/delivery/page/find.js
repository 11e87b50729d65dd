// The sentences nearest to a question: among the pasted lines and, where the server has one, in its index.

import { ask, cosine, embed, Latest } from "./api.js";
import { clear } from "./notice.js";
import { debounce, el, fixed, plural } from "./dom.js";

const COUNT = 5;

export class Finder {
  constructor(model, failed) {
    this.model = model;
    this.lines = [];
    this.vectors = [];
    this.latest = new Latest(failed);
    const soon = debounce(() => this.update(), 200);
    const hint = "Say it in your own words";
    this.field = el("input", { type: "search", id: "find", autocomplete: "off", placeholder: hint, oninput: soon });
    this.found = el("div", { class: "two wide found" });
    const size = model.index && plural(model.index.sentences, "sentence");
    const where = model.index ? ` Also searches the server's index of ${size}.` : "";
    this.node = el(
      "article",
      { class: "card", id: "finder" },
      el("h2", {}, el("label", { for: "find" }, "Find the nearest")),
      el("p", { class: "muted" }, `By meaning, not by words.${where}`),
      this.field,
      this.found,
    );
  }

  over(lines, vectors) {
    Object.assign(this, { lines, vectors });
    this.update();
  }

  update() {
    const text = this.field.value.trim();
    if (!text) {
      this.latest.stop();
      this.found.replaceChildren();
      return;
    }
    this.latest.run(async (signal, current) => {
      const [asked, searched] = await Promise.all([
        this.lines.length ? embed([text], signal) : null,
        this.model.index ? ask("v1/search", { texts: [text], count: COUNT }, signal) : null,
      ]);
      if (!current()) return;
      clear();
      const lists = [];
      if (asked) {
        const score = (number) => cosine(asked.vectors[0], this.vectors[number]);
        const scored = this.lines.map((text, number) => ({ score: score(number), row: number + 1, text }));
        lists.push(list("In your lines", scored.sort((one, other) => other.score - one.score).slice(0, COUNT)));
      }
      if (searched) lists.push(list("In the index", searched.data.matches[0]));
      this.found.replaceChildren(...lists);
    });
  }
}

function list(title, matches) {
  const shown = matches.map((one) =>
    el("li", {}, el("b", {}, fixed(one.score)), el("span", { class: "text" }, `${one.row}. ${one.text}`)),
  );
  return el("div", {}, el("h3", {}, title), el("ol", { class: "matches" }, ...shown));
}

// One text: every task that reads one, live, and the words that mattered.

import { ask, Latest } from "./api.js";
import { Bars, Gauge } from "./charts.js";
import { byId, cost, debounce, el, examples, fixed, grow, percent, say, tellCut } from "./dom.js";
import { clear, fail } from "./notice.js";
import { drawWords } from "./words.js";

const EXAMPLES = [
  ["A good evening", "What a delightful evening, I loved every minute of it."],
  ["A long wait", "We waited an hour for cold soup, and nobody said sorry."],
  ["Mixed feelings", "A charming little film, slow at times but full of warmth."],
  ["Just a fact", "The train leaves at nine from platform four."],
  ["Not so bad", "It was not bad at all, although I had expected worse."],
];

export class TextPanel {
  constructor(model, remember) {
    this.tasks = model.tasks.filter((task) => task.reads === "text");
    this.field = byId("text");
    this.fit = grow(this.field);
    this.remember = remember;
    this.answers = new Latest((error) => fail(error, () => this.update()));
    this.effects = new Latest((error) => fail(error, () => this.update()));
    this.chosen = {}; // the class that was pressed, by task
    this.cards = null;
    const soon = debounce(() => this.update(), 120);
    this.explainSoon = debounce(() => this.explain(), 350);
    this.field.addEventListener("input", () => {
      this.chosen = {};
      soon();
    });
    examples(byId("text-examples"), EXAMPLES, (text) => {
      this.set(text);
      soon.now();
    });
  }

  get state() {
    return { text: this.field.value };
  }

  set(text) {
    this.field.value = text;
    this.chosen = {};
    this.fit();
  }

  load(state) {
    this.set(state.get("text") ?? "");
  }

  update() {
    this.remember();
    this.explainSoon.cancel();
    this.effects.stop();
    const text = this.field.value;
    if (!text.trim()) {
      this.answers.stop();
      clear();
      this.cards = null;
      cost(byId("text-cost"));
      byId("text-results").replaceChildren(el("p", { class: "empty" }, "The answers will appear here."));
      return;
    }
    this.answers.run(async (signal, current) => {
      const found = await ask("v1/predict", { texts: [text], tasks: this.tasks.map((task) => task.name) }, signal);
      if (!current()) return;
      clear();
      this.show(found);
      this.explainSoon();
    });
  }

  show(found) {
    this.cards ??= this.build();
    this.found = found;
    this.answer = found.data.texts[0];
    for (const task of this.tasks) {
      const answer = this.answer[task.name];
      this.cards[task.name].draw(answer, this.chosen[task.name] ?? answer.label);
    }
    tellCut(byId("text-cut"), found.data.truncated);
    cost(byId("text-cost"), ["Answer", [found]]);
    say(this.tasks.map((task) => described(task, this.answer[task.name])).join(". "));
  }

  build() {
    const cards = {};
    const nodes = this.tasks.map((task) => {
      const chart = task.classes.length
        ? new Bars(task, (name) => this.choose(task.name, name))
        : new Gauge(task.name, task.low, task.high, `Score from ${task.low} to ${task.high}`);
      const words = el("div", { class: "words" }, el("p", { class: "empty" }, "Looking at the words."));
      const draw = (answer, chosen) => {
        if (task.classes.length) chart.show(answer, chosen);
        else chart.show(answer.score);
      };
      cards[task.name] = { draw, words };
      return el(
        "article",
        { class: "card answer" },
        el("div", {}, task.classes.length ? el("h2", {}, task.name) : "", chart.node),
        el("div", {}, el("h2", {}, "Which words mattered"), words),
      );
    });
    byId("text-results").replaceChildren(el("p", { id: "text-cut", class: "hint", hidden: true }), ...nodes);
    return cards;
  }

  choose(task, name) {
    this.chosen[task] = name;
    this.cards[task].draw(this.answer[task], name);
    this.explainSoon.now();
  }

  explain() {
    const text = this.field.value;
    this.effects.run(async (signal, current) => {
      const names = this.tasks.map((task) => task.name);
      const plain = names.filter((name) => !this.chosen[name]);
      const chosen = names.filter((name) => this.chosen[name]);
      const bodies = chosen.map((name) => ({ text, tasks: [name], label: this.chosen[name] }));
      if (plain.length) bodies.push({ text, tasks: plain }); // which share their encodings
      const found = await Promise.all(bodies.map((body) => ask("v1/importance", body, signal)));
      if (!current()) return;
      const effects = Object.assign({}, ...found.map((one) => one.data.tasks));
      const spoken = this.tasks.map((task) => {
        const best = drawWords(this.cards[task.name].words, task, effects[task.name], [text]);
        return `${described(task, this.answer[task.name])}. Words: ${best}`;
      });
      say(spoken.join(". "));
      cost(byId("text-cost"), ["Answer", [this.found]], ["Words", found]);
    });
  }
}

function described(task, answer) {
  const said = answer.label === undefined ? fixed(answer.score) : `${answer.label}, ${percent(answer.probability)}`;
  return `${task.name}: ${said}`;
}

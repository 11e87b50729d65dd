// Two texts: every task that compares, the cosine of their embeddings, and the words that mattered.

import { ask, cosine, embed, Latest } from "./api.js";
import { Bars, Gauge } from "./charts.js";
import { byId, card, cost, debounce, el, examples, fixed, grow, percent, say, tellCut } from "./dom.js";
import { clear, fail } from "./notice.js";
import { drawWords } from "./words.js";

const EXAMPLES = [
  ["The same question", "How do I get ink out of a shirt?", "What removes pen stains from cotton?"],
  ["Almost", "How long does bread stay fresh?", "How long does it take to bake bread?"],
  ["Unrelated", "Why do cats purr?", "Which bus goes to the harbour?"],
  ["Turned around", "The dog chased the boy through the park.", "The boy chased the dog through the park."],
];

export class PairPanel {
  constructor(model, remember) {
    this.tasks = model.tasks.filter((task) => task.reads === "pair");
    this.embeds = model.embeddings;
    this.first = byId("first");
    this.second = byId("second");
    this.fits = [grow(this.first), grow(this.second)];
    this.remember = remember;
    this.answers = new Latest((error) => fail(error, () => this.update()));
    this.effects = new Latest((error) => fail(error, () => this.update()));
    this.shown = this.tasks[0]?.name;
    this.charts = null;
    const soon = debounce(() => this.update(), 150);
    this.explainSoon = debounce(() => this.explain(), 400);
    for (const field of [this.first, this.second]) field.addEventListener("input", soon);
    examples(byId("pair-examples"), EXAMPLES, (one, other) => {
      this.set(one, other);
      soon.now();
    });
  }

  get state() {
    return { a: this.first.value, b: this.second.value };
  }

  set(one, other) {
    this.first.value = one;
    this.second.value = other;
    for (const fit of this.fits) fit();
  }

  load(state) {
    this.set(state.get("a") ?? "", state.get("b") ?? "");
  }

  update() {
    this.remember();
    this.explainSoon.cancel();
    this.effects.stop();
    const pair = [this.first.value, this.second.value];
    if (!pair.every((text) => text.trim())) {
      this.answers.stop();
      clear();
      this.charts = null;
      cost(byId("pair-cost"));
      const nothing = "Two texts, and how they compare appears here.";
      const missing = pair.some((text) => text.trim()) ? "Now the other text." : nothing;
      byId("pair-results").replaceChildren(el("p", { class: "empty" }, missing));
      return;
    }
    this.answers.run(async (signal, current) => {
      const found = await Promise.all([
        this.tasks.length ? ask("v1/predict", { pairs: [pair] }, signal) : null,
        this.embeds ? embed(pair, signal) : null,
      ]);
      if (!current()) return;
      clear();
      this.show(...found);
      if (this.tasks.length) this.explainSoon();
    });
  }

  show(answered, embedded) {
    this.charts ??= this.build();
    this.found = [answered, embedded];
    const spoken = [];
    for (const task of this.tasks) {
      const answer = answered.data.pairs[0][task.name];
      const chart = this.charts[task.name];
      if (!task.classes.length) chart.show(answer.score);
      else if (chart instanceof Gauge) showShare(chart, answer, task.classes[1]);
      else chart.show(answer, answer.label);
      spoken.push(`${task.name}: ${answer.label ?? fixed(answer.score)}`);
    }
    if (embedded) {
      const value = cosine(...embedded.vectors);
      this.charts[""].show(value);
      spoken.push(`cosine ${fixed(value)}`);
    }
    tellCut(byId("pair-cut"), answered?.data.truncated);
    cost(byId("pair-cost"), ["Answer", this.found]);
    say(spoken.join(". "));
  }

  build() {
    const charts = {};
    const nodes = this.tasks.map((task) => {
      if (task.classes.length > 2) {
        charts[task.name] = new Bars(task, () => this.pick(task.name));
        return card(task.name, charts[task.name].node);
      }
      charts[task.name] = task.classes.length
        ? new Gauge(task.name, 0, 100)
        : new Gauge(task.name, task.low, task.high, `Score from ${task.low} to ${task.high}`);
      return charts[task.name].node;
    });
    if (this.embeds) {
      charts[""] = new Gauge("embeddings", 0, 1, "Cosine of the two vectors");
      nodes.push(charts[""].node);
    }
    const results = [
      el("p", { id: "pair-cut", class: "hint", hidden: true }),
      el("div", { class: "gauges" }, ...nodes),
    ];
    if (this.tasks.length) {
      const options = this.tasks.map((task) => {
        const pick = () => this.pick(task.name);
        const input = el("input", { type: "radio", name: "explained", value: task.name, onchange: pick });
        input.checked = task.name === this.shown;
        return el("label", {}, input, el("span", {}, task.name));
      });
      const choice = el("fieldset", { class: "choice" }, el("legend", { class: "unseen" }, "Task"), ...options);
      results.push(
        el(
          "article",
          { class: "card" },
          el("div", { class: "headed" }, el("h2", {}, "Which words mattered"), this.tasks.length > 1 && choice),
          el("div", { id: "pair-words", class: "words" }, el("p", { class: "empty" }, "Looking at the words.")),
        ),
      );
    }
    byId("pair-results").replaceChildren(...results);
    return charts;
  }

  pick(name) {
    this.shown = name;
    for (const input of document.querySelectorAll("input[name=explained]")) input.checked = input.value === name;
    if (this.importance) this.drawWords();
    else this.explainSoon.now();
  }

  explain() {
    const [text, second] = [this.first.value, this.second.value];
    this.importance = null;
    this.effects.run(async (signal, current) => {
      const found = await ask("v1/importance", { text, second }, signal);
      if (!current()) return;
      this.importance = { tasks: found.data.tasks, texts: [text, second] };
      this.drawWords();
      cost(byId("pair-cost"), ["Answer", this.found], ["Words", [found]]);
    });
  }

  drawWords() {
    const task = this.tasks.find((one) => one.name === this.shown);
    drawWords(byId("pair-words"), task, this.importance.tasks[task.name], this.importance.texts);
  }
}

/** Of two classes the second's probability, such as that of a paraphrase. */
function showShare(gauge, answer, name) {
  const share = answer.probabilities[name];
  gauge.show(share * 100, percent(share, 0), `Probability of “${name}”. Answer: ${answer.label}`);
}

// The model's card: what it is, how good it was on dev, what it was made of, and what not to trust it with.

import { byId, card, el, fixed, plural, scrolling } from "./dom.js";

export function drawCard(model) {
  const facts = [
    ["Encoder", model.encoder],
    ["Recipe", model.recipe || "–"],
    ["Reads", `${model.max_tokens} tokens`],
    ["Pooling", model.pooling],
    ...(model.members > 1 ? [["Ensemble of", plural(model.members, "model")]] : []),
    ...(model.index ? [["Index", plural(model.index.sentences, "sentence")]] : []),
    ["minbert", model.version],
  ];
  const shown = facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  byId("panel-model").replaceChildren(
    card(model.name, el("dl", { class: "facts" }, ...shown)),
    card("What it answers", table("Tasks", ["task", "reads", "answers"], model.tasks.map(answers))),
    card("How good it was on dev", ...scores(model.scores)),
    card("What it was trained on", table("Data", ["task", "data", "terms"], model.data.map(Object.values))),
    card("Its limits", el("ul", {}, ...model.limits.map((line) => el("li", {}, line)))),
  );
}

const answers = (task) => [
  task.name,
  task.reads === "pair" ? "two texts" : "one text",
  task.classes.length ? task.classes.join(", ") : `a score from ${task.low} to ${task.high}`,
];

function scores(found) {
  if (!found.length) return [el("p", { class: "muted" }, "None are recorded in this model's folder.")];
  const rows = found.map((one) => {
    const known = one.value !== null;
    const bounded = one.low !== null && one.high !== null;
    return [
      one.task,
      one.metric,
      known ? fixed(one.value, 3) : "undefined",
      bounded ? `${fixed(one.low, 3)} to ${fixed(one.high, 3)}` : "none",
      known ? interval(one.value, one.low ?? one.value, one.high ?? one.value) : "",
      one.rows.toLocaleString("en"),
    ];
  });
  const note =
    "The bar is the 95% interval on a scale from 0 to 1. The model, its temperatures and its thresholds were chosen " +
    "on dev, so these figures flatter a little.";
  const heads = ["task", "metric", "dev", "95% interval", "", "rows"];
  return [table("Scores on dev", heads, rows), el("p", { class: "muted" }, note)];
}

function interval(value, ...ends) {
  const [at, low, high] = [value, ...ends].map((one) => Math.max(0, Math.min(1, one)));
  return el("span", { class: "interval", "aria-hidden": "true", css: { "--at": at, "--low": low, "--high": high } });
}

function table(caption, heads, rows) {
  const head = el("tr", {}, ...heads.map((name) => (name ? el("th", { scope: "col" }, name) : el("td"))));
  const body = rows.map(([first, ...rest]) =>
    el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((value) => el("td", {}, value))),
  );
  const title = el("caption", { class: "unseen" }, caption);
  return scrolling(caption, el("table", {}, title, el("thead", {}, head), el("tbody", {}, ...body)));
}

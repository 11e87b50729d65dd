// The model's card: what it is, how good it was on dev, what it was made of, and what not to trust it with.

import { byId, el, fixed, plural } from "./dom.js";

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
  byId("panel-model").replaceChildren(
    el("article", { class: "card" }, el("h2", {}, model.name), el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))),
    el("article", { class: "card" }, el("h2", {}, "What it answers"), table("Tasks", ["task", "reads", "answers"], model.tasks.map((task) => [task.name, task.reads === "pair" ? "two texts" : "one text", task.classes.length ? task.classes.join(", ") : `a score from ${task.low} to ${task.high}`]))),
    el("article", { class: "card" }, el("h2", {}, "How good it was on dev"), ...scores(model.scores)),
    el("article", { class: "card" }, el("h2", {}, "What it was trained on"), table("Data", ["task", "data", "terms"], model.data.map((one) => [one.task, one.data, one.terms]))),
    el("article", { class: "card" }, el("h2", {}, "Its limits"), el("ul", {}, ...model.limits.map((line) => el("li", {}, line)))),
  );
}

function scores(found) {
  if (!found.length) return [el("p", { class: "muted" }, "None are recorded in this model's folder.")];
  const rows = found.map((one) => {
    const known = one.value !== null;
    const [low, high] = [one.low ?? one.value ?? 0, one.high ?? one.value ?? 0].map((value) => Math.max(0, Math.min(1, value)));
    const picture = el("span", { class: "interval", "aria-hidden": "true", css: { "--low": low, "--high": high, "--at": Math.max(0, Math.min(1, one.value ?? 0)) } });
    const interval = one.low === null || one.high === null ? "none" : `${fixed(one.low, 3)} to ${fixed(one.high, 3)}`;
    return [one.task, one.metric, known ? fixed(one.value, 3) : "undefined", interval, known ? picture : "", one.rows.toLocaleString("en")];
  });
  const note = "The bar is the 95% interval on a scale from 0 to 1. The model, its temperatures and its thresholds were chosen on dev, so these figures flatter a little.";
  return [table("Scores on dev", ["task", "metric", "dev", "95% interval", "", "rows"], rows), el("p", { class: "muted" }, note)];
}

function table(caption, heads, rows) {
  const head = el("tr", {}, ...heads.map((name) => (name ? el("th", { scope: "col" }, name) : el("td"))));
  const body = rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((value) => el("td", {}, value))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, head), el("tbody", {}, ...body)));
}

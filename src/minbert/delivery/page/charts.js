// Bars and gauges, which move to new values instead of being drawn again.

import { el, fixed, percent, svg } from "./dom.js";

/** Class probabilities, a button a class: pressing one asks which words speak for it. */
export class Bars {
  constructor(task, choose) {
    this.rows = new Map();
    for (const name of task.classes) {
      const value = el("span", { class: "value" });
      const bar = el("span", { class: "bar" });
      const button = el(
        "button",
        { type: "button", class: "row", "aria-pressed": "false", onclick: () => choose(name) },
        el("span", { class: "name" }, name),
        el("span", { class: "track" }, bar),
        value,
      );
      this.rows.set(name, { button, bar, value });
    }
    this.node = el("div", { class: "bars", role: "group", "aria-label": `Classes of ${task.name}` });
    this.node.append(...[...this.rows.values()].map((row) => row.button));
  }

  show(answer, chosen) {
    for (const [name, row] of this.rows) {
      const share = answer.probabilities[name];
      row.bar.style.setProperty("--share", share);
      row.value.textContent = percent(share);
      row.button.classList.toggle("best", name === answer.label);
      row.button.setAttribute("aria-pressed", String(name === chosen));
    }
  }
}

/** Half a circle that fills from low to high. */
export class Gauge {
  constructor(title, low, high, about = "") {
    Object.assign(this, { low, high });
    this.number = svg("text", { x: 100, y: 88, class: "number" });
    this.arc = svg("path", { d: "M 18 96 A 82 82 0 0 1 182 96", pathLength: 100, class: "arc" });
    this.about = el("p", { class: "muted" }, about);
    const end = (x, value) => svg("text", { x, y: 116, class: "end" }, String(value));
    this.meter = svg(
      "svg",
      { viewBox: "0 0 200 122", role: "meter", "aria-label": title, "aria-valuemin": low, "aria-valuemax": high },
      svg("path", { d: "M 18 96 A 82 82 0 0 1 182 96", class: "rail" }),
      this.arc,
      this.number,
      end(18, low),
      end(182, high),
    );
    this.node = el("article", { class: "card gauge" }, el("h2", {}, title), this.meter, this.about);
  }

  show(value, text = fixed(value), about = this.about.textContent) {
    const share = Math.max(0, Math.min(1, (value - this.low) / (this.high - this.low)));
    this.arc.style.setProperty("--share", share);
    this.number.textContent = text;
    this.about.textContent = about;
    this.meter.setAttribute("aria-valuenow", fixed(Math.max(this.low, Math.min(this.high, value)), 3));
    this.meter.setAttribute("aria-valuetext", `${text}. ${about}`);
  }
}

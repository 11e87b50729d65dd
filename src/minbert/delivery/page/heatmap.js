// How alike all lines are, as a square of colours on a canvas: to look at, to point at, and to walk through by keys.

import { el, fixed } from "./dom.js";

const STEPS = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"];
const NUMBERS_FROM = 34; // pixels of a cell

export class HeatMap {
  /** `open` is called with the numbers of two lines. */
  constructor(open) {
    this.canvas = el("canvas", {
      tabindex: "0",
      role: "application",
      "aria-label": "Heat map of similarities. Arrow keys move, Enter opens the pair.",
      "aria-describedby": "heat-said",
    });
    this.said = el("p", { id: "heat-said", class: "readout", "aria-live": "polite" });
    const ramp = el("span", { class: "ramp", "aria-hidden": "true" });
    this.legend = el("p", { class: "scale" }, el("span"), ramp, el("span"));
    this.node = el("div", { class: "heat" }, this.canvas, this.legend, this.said);
    this.at = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => document.activeElement === this.canvas || this.move(null));
    this.canvas.addEventListener("click", (event) => {
      this.point(event);
      if (this.at) open(...this.at);
    });
    this.canvas.addEventListener("focus", () => this.move(this.at ?? [0, Math.min(1, this.lines.length - 1)]));
    this.canvas.addEventListener("blur", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => this.press(event, open));
    new ResizeObserver(() => this.draw()).observe(this.node);
    document.addEventListener("colours", () => this.draw());
  }

  show(lines, matrix) {
    Object.assign(this, { lines, matrix, at: null });
    const others = matrix.flatMap((row, i) => row.filter((_, j) => i !== j));
    this.low = others.length ? others.reduce((a, b) => Math.min(a, b)) : 0;
    this.high = others.length ? others.reduce((a, b) => Math.max(a, b)) : 1;
    this.legend.firstChild.textContent = fixed(this.low);
    this.legend.lastChild.textContent = fixed(this.high);
    this.move(null);
  }

  press(event, open) {
    const last = this.lines.length - 1;
    const [row, column] = this.at ?? [0, 0];
    const to = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, last],
    }[event.key];
    if (to) {
      event.preventDefault();
      this.move(to.map((place) => Math.max(0, Math.min(last, place))));
    } else if (event.key === "Enter" && this.at) open(...this.at);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - this.left) / this.cell);
    const y = Math.floor((event.clientY - box.top - this.head) / this.cell);
    const inside = x >= 0 && y >= 0 && x < this.lines.length && y < this.lines.length;
    this.move(inside ? [y, x] : null);
  }

  move(at) {
    this.at = at;
    this.said.replaceChildren();
    if (at) {
      const [row, column] = at;
      const line = (number) => el("span", { class: "text" }, `${number + 1}. ${this.lines[number]}`);
      this.said.append(el("b", {}, fixed(this.matrix[row][column])), line(row), line(column));
    } else this.said.append("Point at a square, or walk with the arrow keys. A click opens the pair.");
    this.draw();
  }

  draw() {
    if (!this.lines || !this.node.clientWidth) return;
    const count = this.lines.length;
    const width = this.node.clientWidth;
    this.head = 20;
    this.left = width > 420 && count <= 24 ? Math.min(170, width * 0.3) : 26;
    this.cell = Math.min(46, (width - this.left) / count);
    const [wide, high] = [this.left + this.cell * count, this.head + this.cell * count];
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.round(wide * ratio), height: Math.round(high * ratio) });
    this.canvas.style.width = `${wide}px`;
    this.canvas.style.height = `${high}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const colours = this.colours();
    this.drawCells(pen, colours);
    this.drawLabels(pen, colours);
    if (this.at) {
      const [row, column] = this.at;
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 2;
      const size = Math.max(2, this.cell - 2);
      pen.strokeRect(this.left + column * this.cell + 1, this.head + row * this.cell + 1, size, size);
    }
  }

  drawCells(pen, colours) {
    const gap = this.cell > 12 ? 1 : 0;
    pen.font = "12px sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    this.matrix.forEach((values, row) =>
      values.forEach((value, column) => {
        const share = row === column ? 1 : Math.max(0, Math.min(1, (value - this.low) / (this.high - this.low || 1)));
        const [x, y] = [this.left + column * this.cell, this.head + row * this.cell];
        const colour = mix(colours.steps, share);
        pen.fillStyle = `rgb(${colour})`;
        pen.fillRect(x, y, this.cell - gap, this.cell - gap);
        if (this.cell >= NUMBERS_FROM) {
          pen.fillStyle = light(colour) > 0.18 ? "#15161c" : "#ffffff";
          pen.fillText(fixed(value), x + this.cell / 2, y + this.cell / 2);
        }
      }),
    );
  }

  drawLabels(pen, colours) {
    const every = Math.ceil(16 / this.cell); // so that numbers do not touch
    pen.fillStyle = colours.muted;
    pen.font = "12px sans-serif";
    this.lines.forEach((line, number) => {
      if (number % every) return;
      const middle = (number + 0.5) * this.cell;
      pen.textAlign = "center";
      pen.fillText(String(number + 1), this.left + middle, this.head / 2);
      pen.textAlign = "left";
      const label = this.left > 30 ? `${number + 1}. ${line}` : String(number + 1);
      pen.fillText(fitting(pen, label, this.left - 8), 0, this.head + middle);
    });
  }

  colours() {
    const probe = el("span", { hidden: true });
    this.node.append(probe);
    const read = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    const numbers = (name) => read(name).match(/[\d.]+/g).slice(0, 3).map(Number);
    const found = { ink: read("--ink"), muted: read("--muted"), steps: STEPS.map(numbers) };
    probe.remove();
    return found;
  }
}

function mix(steps, share) {
  const place = share * (steps.length - 1);
  const from = Math.min(steps.length - 2, Math.floor(place));
  return steps[from].map((value, i) => Math.round(value + (steps[from + 1][i] - value) * (place - from)));
}

/** Relative luminance, by which black or white is chosen for the numbers. */
function light(colour) {
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = colour.map((value) => linear(value / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function fitting(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let kept = Array.from(text);
  while (kept.length > 1 && pen.measureText(`${kept.join("")}…`).width > width) kept = kept.slice(0, -1);
  return `${kept.join("").trimEnd()}…`;
}

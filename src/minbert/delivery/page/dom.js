// Elements, built from data. Texts become text nodes and never markup; styles go through the CSSOM, as the policy says.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), properties, children);

export const card = (title, ...children) => el("article", { class: "card" }, el("h2", {}, title), ...children);

/** Scrolls by itself where it is too large, also by keys. */
export const scrolling = (label, node, more = "") =>
  el("div", { class: `scroll ${more}`, tabindex: "0", role: "region", "aria-label": label }, node);

export const byId = (id) => document.getElementById(id);

export const percent = (value, digits = 1) => `${(value * 100).toFixed(digits)}%`;
export const fixed = (value, digits = 2) => (Math.abs(value) < 0.5 * 10 ** -digits ? 0 : value).toFixed(digits);
export const signed = (value, digits = 2) => `${value < 0 ? "−" : "+"}${fixed(Math.abs(value), digits)}`;
export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** Calls after a pause of so many milliseconds; `now` calls at once. */
export function debounce(call, wait) {
  let timer = 0;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(call, wait);
  };
  later.now = () => {
    clearTimeout(timer);
    call();
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

/** Tells a screen reader, when things have settled. */
let saying = 0;
export function say(text) {
  clearTimeout(saying);
  saying = setTimeout(() => {
    byId("said").textContent = text;
  }, 700);
}

/** Buttons with examples; each fills the fields it is given. */
export function examples(place, items, use) {
  place.replaceChildren(
    el("span", { class: "muted" }, "Try"),
    ...items.map(([name, ...values]) =>
      el("button", { type: "button", class: "chip", onclick: () => use(...values) }, name),
    ),
  );
}

/** A text field grows with what is in it. */
export function grow(area, most = 320) {
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${Math.min(most, area.scrollHeight + 2)}px`;
  };
  area.addEventListener("input", fit);
  return fit;
}

/** Says what the server left out of a text that is too long. */
export function tellCut(place, truncated) {
  place.hidden = !truncated;
  place.textContent = truncated ? `Only the first ${truncated.max_tokens} tokens were read.` : "";
}

/** What it cost: for each part its name and the requests that it took, which ran side by side. */
export function cost(place, ...parts) {
  const shown = parts.map(([name, asked]) => {
    const all = asked.filter(Boolean);
    if (!all.length) return "";
    const [server, round] = ["server", "round"].map((key) => Math.max(...all.map((one) => one[key])));
    const encodings = all.reduce((sum, one) => sum + one.encodings, 0);
    const figure = (value) => el("b", {}, `${fixed(value, value < 10 ? 1 : 0)} ms`);
    const times = [figure(server), " on the server, ", figure(round), " there and back, "];
    return el("span", {}, `${name}: `, ...times, el("b", {}, plural(encodings, "encoding")));
  });
  place.replaceChildren(...shown);
}

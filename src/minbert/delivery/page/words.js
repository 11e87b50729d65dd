// Which words mattered: the texts with their words shaded, and the same as numbers.

import { el, percent, scrolling, signed } from "./dom.js";

/** Draws what /v1/importance found for one task into `place`. */
export function drawWords(place, task, found, texts) {
  const largest = Math.max(1e-9, ...found.words.map((word) => Math.abs(word.effect)));
  const digits = found.answer ? 1 : 2;
  const shown = (effect) => (found.answer ? `${signed(effect * 100, digits)} points` : signed(effect, digits));
  const open = place.querySelector("details")?.open ?? false;
  const sides = texts.map((text, side) => {
    const own = found.words.filter((word) => word.side === side);
    return el("p", { class: "shaded", "aria-hidden": "true" }, ...shade(text, own, largest, shown));
  });
  const rows = [...found.words].sort((one, other) => Math.abs(other.effect) - Math.abs(one.effect));
  const numbers = table(`Effect of each word on ${found.answer || task.name}`, rows, texts.length > 1, shown);
  const asked = found.answer ? `“${found.answer}” (${percent(found.value)})` : "a higher score";
  place.replaceChildren(
    ...sides,
    el(
      "p",
      { class: "legend" },
      el("span", { class: "mark for" }, "for"),
      " and ",
      el("span", { class: "mark against" }, "against"),
      ` ${asked}: what each word adds.`,
      found.skipped ? ` ${found.skipped} more words were not measured.` : "",
    ),
    el("details", { open }, el("summary", {}, "The same as numbers"), scrolling("Effects of the words", numbers)),
  );
  const best = rows.filter((word) => Math.abs(word.effect) > 0.05 * largest).slice(0, 3);
  return best.map((word) => `${word.text} ${shown(word.effect)}`).join(", ");
}

function table(caption, words, paired, shown) {
  const head = (name, kind) => el("th", { scope: "col", class: kind }, name);
  const rows = words.map((word) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, word.text),
      paired && el("td", {}, word.side ? "second" : "first"),
      el("td", { class: "figure" }, shown(word.effect)),
    ),
  );
  const heads = el("tr", {}, head("Word"), paired && head("Text"), head("Effect", "figure"));
  const title = el("caption", { class: "unseen" }, caption);
  return el("table", {}, title, el("thead", {}, heads), el("tbody", {}, ...rows));
}

/** Pieces of a text, its words as marks. Places are code points, which JavaScript's strings do not count in. */
function shade(text, words, largest, shown) {
  const letters = Array.from(text);
  const pieces = [];
  let done = 0;
  for (const word of words) {
    pieces.push(letters.slice(done, word.start).join(""));
    const strength = Math.abs(word.effect) / largest;
    const kind = strength < 0.08 ? "" : word.effect > 0 ? "for" : "against";
    const title = `${word.text}: ${shown(word.effect)}`;
    pieces.push(el("span", { class: `mark ${kind}`, css: { "--strength": strength }, title }, word.text));
    done = word.end;
  }
  return [...pieces, letters.slice(done).join("")];
}

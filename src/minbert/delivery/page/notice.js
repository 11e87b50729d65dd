// What went wrong, and what can be done about it.

import { key, Refusal } from "./api.js";
import { byId, el } from "./dom.js";

let timer = 0;

export function clear() {
  clearTimeout(timer);
  byId("notice").replaceChildren();
}

/** Says what is wrong. `again` is called when there is hope: a key, a pause, a click. */
export function fail(error, again) {
  clear();
  if (!(error instanceof Refusal)) {
    show(el("p", {}, `The page made a mistake: ${error.message}`));
    throw error;
  }
  if (error.status === 401) askForKey(error.message, again);
  else if (error.status === 503) {
    const wait = Math.max(1, error.wait);
    show(el("p", {}, `${error.message} Trying again in ${wait} s.`));
    timer = setTimeout(again, wait * 1000);
  } else {
    show(el("p", {}, error.message), error.status !== 422 && tryAgain(again));
    if (error.status === 0) timer = setTimeout(again, 5000);
  }
}

const show = (...parts) => byId("notice").replaceChildren(el("div", { class: "notice", role: "alert" }, ...parts));

const tryAgain = (again) => el("button", { type: "button", onclick: again }, "Try again");

function askForKey(message, again) {
  const input = el("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false" });
  const form = el(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        key.set(input.value.trim());
        clear();
        again();
      },
    },
    el("label", { for: "key" }, "API key"),
    input,
    el("button", { type: "submit" }, "Use it"),
  );
  show(el("p", {}, `${message} It is kept until this tab is closed.`), form);
  input.focus();
}

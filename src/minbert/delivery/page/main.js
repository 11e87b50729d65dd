// The page: it asks the server what the model can do, and shows the panels that fit. What is typed is in the address.

import { ask } from "./api.js";
import { drawCard } from "./card.js";
import { setUpTheme } from "./colours.js";
import { byId, debounce, say } from "./dom.js";
import { LinesPanel } from "./lines.js";
import { clear, fail } from "./notice.js";
import { PairPanel } from "./pair.js";
import { TextPanel } from "./text.js";

const LONGEST = 6000; // letters of an address; more is not shared

class Page {
  constructor(model) {
    this.panels = { text: null, pair: null, lines: null, model: null };
    const remember = debounce(() => this.writeAddress(), 250);
    const texts = model.tasks.some((task) => task.reads === "text");
    const pairs = model.tasks.some((task) => task.reads === "pair");
    if (texts) this.panels.text = new TextPanel(model, remember);
    if (pairs || model.embeddings) this.panels.pair = new PairPanel(model, remember);
    const openPair = (one, other) => this.openPair(one, other);
    if (texts || model.embeddings) this.panels.lines = new LinesPanel(model, remember, openPair);
    this.names = Object.keys(this.panels).filter((name) => name === "model" || this.panels[name]);
    for (const name of Object.keys(this.panels)) byId(`tab-${name}`).hidden = !this.names.includes(name);
    this.remember = remember;
    this.updated = new Set();
    drawCard(model);
    byId("tagline").textContent = `One encoder reads. Small heads answer. This is “${model.name}”.`;
    this.setUpTabs();
    addEventListener("hashchange", () => this.readAddress());
    this.readAddress();
  }

  setUpTabs() {
    for (const name of this.names) {
      const tab = byId(`tab-${name}`);
      tab.addEventListener("click", () => this.open(name));
      tab.addEventListener("keydown", (event) => {
        const count = this.names.length;
        const at = this.names.indexOf(name);
        const [left, right] = [(at + count - 1) % count, (at + 1) % count];
        const to = { ArrowLeft: left, ArrowRight: right, Home: 0, End: count - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        this.open(this.names[to]);
        byId(`tab-${this.names[to]}`).focus();
      });
    }
  }

  open(name) {
    this.tab = name;
    for (const one of Object.keys(this.panels)) {
      const tab = byId(`tab-${one}`);
      tab.setAttribute("aria-selected", String(one === name));
      tab.tabIndex = one === name ? 0 : -1;
      byId(`panel-${one}`).hidden = one !== name;
    }
    this.panels[name]?.fit?.();
    for (const fit of this.panels[name]?.fits ?? []) fit();
    if (!this.updated.has(name)) {
      this.updated.add(name);
      this.panels[name]?.update();
    }
    this.remember();
  }

  openPair(one, other) {
    if (!this.panels.pair) return;
    this.panels.pair.set(one, other);
    this.updated.delete("pair");
    this.open("pair");
    byId("tab-pair").focus();
    scrollTo({ top: 0 });
  }

  readAddress() {
    if (location.hash && !location.hash.includes("=")) return; // a place in the page
    const state = new URLSearchParams(location.hash.slice(1));
    for (const panel of Object.values(this.panels)) panel?.load(state);
    this.updated.clear();
    this.open(this.names.includes(state.get("tab")) ? state.get("tab") : this.names[0]);
  }

  writeAddress() {
    const state = new URLSearchParams({ tab: this.tab });
    for (const [name, value] of Object.entries(this.panels[this.tab]?.state ?? {})) if (value) state.set(name, value);
    const address = `#${state}`;
    this.whole = address.length <= LONGEST;
    history.replaceState(null, "", this.whole ? address : `#tab=${this.tab}`);
  }
}

function setUpShare(page) {
  const button = byId("share");
  button.addEventListener("click", async () => {
    page.writeAddress();
    let said = page.whole ? "Copied" : "Too long to share";
    try {
      if (page.whole) await navigator.clipboard.writeText(location.href);
    } catch {
      said = "It is in the address bar";
    }
    button.textContent = said;
    say(said);
    setTimeout(() => (button.textContent = "Copy link"), 1800);
  });
}

async function start() {
  try {
    const { data } = await ask("v1/model");
    clear();
    setUpShare(new Page(data));
  } catch (error) {
    fail(error, start);
  }
}

setUpTheme();
start();

// The server's own description of itself, made readable. Everything here comes from /openapi.json.

import { ask, key } from "./api.js";
import { setUpTheme } from "./colours.js";
import { byId, el, fixed, scrolling } from "./dom.js";

/** The schema that a reference names. */
const resolve = (api, schema) =>
  schema?.$ref ? schema.$ref.slice(2).split("/").reduce((at, part) => at[part], api) : schema;

/** A schema's type in a few words: "list of pairs of text". */
function type(api, schema) {
  const found = resolve(api, schema);
  if (!found) return "";
  if (found.const !== undefined) return JSON.stringify(found.const);
  if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (found.anyOf) return found.anyOf.map((one) => type(api, one)).join(" or ");
  if (found.prefixItems) return `[${found.prefixItems.map((one) => type(api, one)).join(", ")}]`;
  if (found.type === "array") return `list of ${type(api, found.items)}`;
  if (found.type === "object" && found.additionalProperties) return `${type(api, found.additionalProperties)} by name`;
  if (found.type === "string") return "text";
  return schema.$ref ? schema.$ref.split("/").at(-1) : (found.type ?? "anything");
}

function limits(schema) {
  const range = [
    ["minItems", "at least"],
    ["maxItems", "at most"],
    ["minimum", "from"],
    ["maximum", "to"],
  ];
  const parts = range.filter(([name]) => schema[name] !== undefined).map(([name, word]) => `${word} ${schema[name]}`);
  if (schema.default !== undefined && schema.default !== null) parts.push(`default ${JSON.stringify(schema.default)}`);
  return parts.join(", ");
}

/** The fields of a schema, with those of the schemas it names below it. */
function fields(api, schema, caption, seen = new Set()) {
  const found = resolve(api, schema);
  if (!found?.properties) return [];
  const below = [];
  const rows = Object.entries(found.properties).map(([name, field]) => {
    for (const [reference] of JSON.stringify(field).matchAll(/#\/components\/schemas\/\w+/g))
      if (!seen.has(reference)) {
        seen.add(reference);
        below.push(...fields(api, { $ref: reference }, reference.split("/").at(-1), seen));
      }
    const needed = found.required?.includes(name) ? "needed" : "";
    const about = [needed, field.description, limits(field)].filter(Boolean).join(" · ");
    const head = el("th", { scope: "row" }, el("code", {}, name));
    return el("tr", {}, head, el("td", {}, type(api, field)), el("td", {}, about));
  });
  const table = el("table", {}, el("caption", { class: "unseen" }, caption), el("tbody", {}, ...rows));
  return [el("h3", {}, caption), scrolling(caption, table), ...below];
}

function operation(api, path, method, about) {
  const json = (content) => content?.content?.["application/json"]?.schema;
  const body = json(about.requestBody);
  const answer = json(about.responses["200"]);
  const refusals = Object.entries(about.responses).filter(([code]) => code !== "200");
  return el(
    "article",
    { class: "card operation", id: about.operationId },
    el("h2", {}, el("span", { class: "method" }, method.toUpperCase()), path),
    el("p", {}, about.description ?? ""),
    ...fields(api, body, "Reads"),
    ...tryOut(api, path, method, body),
    el(
      "details",
      {},
      el("summary", {}, "What it answers"),
      ...fields(api, answer, "Answers"),
      refusals.length > 0 && el("h3", {}, "Or refuses with"),
      el("ul", {}, ...refusals.map(([code, one]) => el("li", {}, `${code}: ${one.description}`))),
    ),
  );
}

function tryOut(api, path, method, body) {
  const example = resolve(api, body)?.examples?.[0];
  const id = `body-${path.replaceAll("/", "-")}`;
  const shown = JSON.stringify(example ?? {}, null, 2);
  const field = body && el("textarea", { id, spellcheck: "false", rows: shown.split("\n").length });
  if (field) field.value = shown;
  const output = el("pre", { hidden: true, tabindex: "0", "aria-live": "polite" });
  const send = async () => {
    output.hidden = false;
    try {
      if (path === "/metrics") {
        const response = await fetch("metrics", { headers: key.get() ? { authorization: `Bearer ${key.get()}` } : {} });
        output.textContent = await response.text();
        return;
      }
      const found = await ask(path.slice(1), field ? JSON.parse(field.value) : undefined);
      output.textContent = `${fixed(found.server, 1)} ms\n${JSON.stringify(found.data, null, 2)}`;
    } catch (error) {
      output.textContent = error.message;
    }
  };
  return [
    el("h3", {}, field ? el("label", { for: id }, "Try it") : "Try it"),
    field ?? "",
    el("button", { type: "button", "aria-label": `Send to ${path}`, onclick: send }, method === "get" ? "Ask" : "Send"),
    output,
  ];
}

async function start() {
  const { data: api } = await ask("openapi.json");
  const shown = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, about]) => operation(api, path, method, about)),
  );
  byId("operations").replaceChildren(...shown);
}

setUpTheme();
byId("key").value = key.get();
byId("key").addEventListener("input", () => key.set(byId("key").value.trim()));
document.querySelector(".keyed").addEventListener("submit", (event) => event.preventDefault());
start().catch((error) => {
  byId("operations").replaceChildren(el("p", { class: "notice", role: "alert" }, error.message));
});

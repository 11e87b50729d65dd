// Asking the server: one answer at a time, the newest question wins, and what went wrong is said in plain words.

const KEY = "minbert-key";

export class Refusal extends Error {
  constructor(status, message, wait = 0) {
    super(message);
    this.status = status;
    this.wait = wait; // seconds
  }
}

/** The API key, kept for this tab and no longer; where a browser keeps nothing, until the page is left. */
let held = "";
export const key = {
  get: () => held,
  set: (value) => {
    held = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      // It is held, and that is enough for now.
    }
  },
};
try {
  held = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Nothing was kept.
}

/** The answer's data, with the milliseconds on the server and there and back. */
export async function ask(path, body, signal) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const started = performance.now();
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError) throw new Refusal(0, "The server cannot be reached. Is it still running?");
    throw error;
  }
  const data = await response.json().catch(() => null);
  if (!response.ok) throw refusal(response, data);
  const server = Number(/dur=([\d.]+)/.exec(response.headers.get("server-timing") ?? "")?.[1] ?? NaN);
  return { data, server, round: performance.now() - started, encodings: data.encodings ?? 0 };
}

function refusal(response, data) {
  const said = data?.error?.message ?? response.statusText;
  const wait = Number(response.headers.get("retry-after") ?? 0);
  const messages = {
    401: key.get() ? "That API key is not known here." : "This server asks for an API key.",
    413: "That is more text than the server takes at once. Try a part of it.",
    500: `The server made a mistake. Its log has more under ${data?.error?.request_id ?? "this request"}.`,
    503: "The server is busy.",
    504: "That took too long. Try a shorter text.",
  };
  return new Refusal(response.status, messages[response.status] ?? `The server says: ${said}`, wait);
}

/** Vectors of length 1, a Float32Array a text. */
export async function embed(texts, signal) {
  const found = await ask("v1/embeddings", { input: texts, encoding_format: "base64" }, signal);
  const vectors = found.data.data.map(({ embedding }) => {
    const bytes = Uint8Array.from(atob(embedding), (letter) => letter.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  });
  return { ...found, vectors, encodings: new Set(texts).size };
}

export function cosine(one, other) {
  let sum = 0;
  for (let i = 0; i < one.length; i++) sum += one[i] * other[i];
  return Math.max(-1, Math.min(1, sum));
}

/** Runs the newest job only: the one before is aborted, and its answer, should it still come, is dropped. */
export class Latest {
  #controller = null;
  #failed;

  constructor(failed) {
    this.#failed = failed;
  }

  stop() {
    this.#controller?.abort();
    this.#controller = null;
  }

  async run(job) {
    this.stop();
    const controller = new AbortController();
    this.#controller = controller;
    const current = () => this.#controller === controller;
    try {
      await job(controller.signal, current);
    } catch (error) {
      if (current() && error.name !== "AbortError") this.#failed(error);
    }
  }
}

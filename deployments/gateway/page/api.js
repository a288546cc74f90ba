/** Calls to the server's API: the list of models, and streamed answers. */

/** A refused request, a failed stream or a lost connection. */
export class ApiError extends Error {
  /** @param {string} message @param {{status?: number, code?: string, retryAfter?: number}} facts */
  constructor(message, facts = {}) {
    super(message);
    Object.assign(this, facts);
  }
}

const LOST = "The connection to the server was lost.";

async function send(path, key, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const text = await response.text().catch(() => "");
  let problem = {};
  try {
    problem = JSON.parse(text).error ?? {};
  } catch {
    // Not OpenAI's form: a server in front of the gateway has answered.
  }
  throw new ApiError(problem.message ?? (text.slice(0, 300) || response.statusText), {
    status: response.status,
    code: problem.code,
    retryAfter: Number(response.headers.get("retry-after")) || undefined,
  });
}

/** Return the ids of the models that the key may use. */
export async function listModels(key) {
  const response = await send("v1/models", key);
  return (await response.json()).data.map((model) => model.id);
}

/** Yield the chunks of a streamed answer; aborting the signal cancels the request. */
export async function* stream(path, body, key, signal) {
  const response = await send(path, key, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new ApiError(LOST);
    }
    if (read.done) throw new ApiError(LOST);
    const events = (held + read.value).split(/\r?\n\r?\n/);
    held = events.pop();
    for (const event of events) {
      const data = event
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code });
      yield chunk;
    }
  }
}

/** Describe an error for its reader. */
export function described(error) {
  if (!(error instanceof ApiError)) return String(error);
  const status = error.status ? `Error ${error.status}: ` : "";
  const seconds = Math.ceil(error.retryAfter ?? 0);
  const hint = seconds ? ` Try again in ${seconds} s.` : "";
  return `${status}${error.message}${hint}`;
}

// The API: one function for JSON, one for server-sent events, and the key.

const KEY = "precis-key";
export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server refused, in its own words; code "offline" if it cannot be reached. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function request(method, path, { json, form, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (json !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: form ?? (json && JSON.stringify(json)) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Trying again ...", 0, "offline");
  }
  if (response.ok) return response;
  let body = {};
  try { body = await response.json(); } catch { /* not ours */ }
  throw new ApiError(body.detail || body.error?.message || response.statusText, response.status, body.code);
}

export async function call(method, path, options) {
  return (await request(method, path, options)).json();
}

/** Server-sent events as [name, data], and the response headers first as ["open", headers]. */
export async function* stream(method, path, options) {
  const response = await request(method, path, options);
  yield ["open", response.headers];
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value.replaceAll("\r\n", "\n");
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const lines = held.slice(0, end).split("\n");
      held = held.slice(end + 2);
      const name = lines.find((line) => line.startsWith("event:"))?.slice(6).trim() || "message";
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield [name, JSON.parse(data.join("\n"))];
    }
  }
}

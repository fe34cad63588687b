// Calls the server. URLs are relative to the page, so that they work if the server is mounted below another path.

export class Refused extends Error {
  // `status` is 0 for an error within a stream; `retryAfter` is in seconds.
  constructor(status, { message, code = null }, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

async function ask(path, key, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = body ? { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body), signal } : { headers, signal };
  const response = await fetch(new URL(path, document.baseURI), options);
  if (response.ok) return response;
  let said = { message: `the server answered with ${response.status}` };
  try {
    said = (await response.json()).error ?? said;
  } catch {
    // the error is a proxy's, in another form
  }
  const seconds = Number.parseFloat(response.headers.get("retry-after") ?? "");
  throw new Refused(response.status, said, Number.isFinite(seconds) ? seconds : null);
}

// Returns the models that generate text, without those that only embed or rank.
export async function models(key) {
  const { data } = await (await ask("v1/models", key)).json();
  return data.filter((model) => model.output_modalities?.includes("text") ?? true);
}

// Returns the server's status: "ready", "loading", "ending" or "failed"; null if there is no server.
export async function health() {
  try {
    return await (await fetch(new URL("ready", document.baseURI), { cache: "no-store" })).json();
  } catch {
    return null;
  }
}

// Streams an answer into a message, and calls back after every event. Throws the error that ends it early.
export async function stream(body, key, signal, message, changed) {
  const response = await ask("v1/chat/completions", key, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(0, chunk.error);
    take(message, chunk);
    changed(chunk);
  }
  throw new TypeError("the connection ended before the answer did");
}

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

export function take(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name = piece.function.name;
    if (piece.function?.arguments) call.arguments += piece.function.arguments;
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

// Returns the request for a conversation. Settings that were not made are left out: the server has defaults.
export function request(conversation, model) {
  const { system, tools, ...sampling } = conversation.settings;
  const messages = wire(conversation.messages);
  if (system) messages.unshift({ role: "system", content: system });
  const body = { model, messages };
  for (const [name, value] of Object.entries(sampling)) if (value !== null && value !== undefined) body[name] = value;
  if (tools?.length) body.tools = tools;
  return body;
}

// Returns messages in the form of OpenAI's API. Empty answers and calls without a result are left out: chat templates
// cannot render them.
export function wire(messages) {
  const answered = new Set(messages.filter((message) => message.role === "tool").map((message) => message.id));
  const said = [];
  for (const message of messages) {
    const { role, content, images } = message;
    const calls = (message.calls ?? []).filter((call) => answered.has(call.id));
    if (role === "tool") {
      said.push({ role, tool_call_id: message.id, content });
    } else if (calls.length) {
      const written = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      said.push({ role, content, tool_calls: written });
    } else if (images?.length) {
      const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
      said.push({ role, content: content ? [...parts, { type: "text", text: content }] : parts });
    } else if (content) {
      said.push({ role, content });
    }
  }
  return said;
}

// Describes an answer's usage and speed, as the server measured them: texts, each with an explanation.
export function figures(usage) {
  const said = [[`${usage.completion_tokens} tokens`, "Tokens of the answer, thoughts included"]];
  if (usage.avg_compl_tok_per_sec > 0) said.push([`${usage.avg_compl_tok_per_sec.toFixed(1)} tokens/s`, "Tokens of the answer per second"]);
  if (usage.time_to_first_token_sec > 0) said.push([`first after ${usage.time_to_first_token_sec.toFixed(2)} s`, "Time until the first token"]);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  said.push([`${cached} of ${usage.prompt_tokens} prompt tokens cached`, "These came from the prefix cache, and were not computed again"]);
  const details = usage.completion_tokens_details ?? {};
  const right = details.accepted_prediction_tokens ?? 0;
  const guessed = right + (details.rejected_prediction_tokens ?? 0);
  if (guessed) said.push([`${right} of ${guessed} drafts right`, "Speculation: tokens that were guessed, and were what the model says"]);
  return said;
}

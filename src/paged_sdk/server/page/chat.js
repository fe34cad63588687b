// Asks the server. Paths are beside the page, so that it works where the server is mounted below another path.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, key, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = body ? { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body), signal } : { headers };
  const response = await fetch(new URL(path, document.baseURI), options);
  if (response.ok) return response;
  let message = `the server answered with ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // something on the way answered, which has another form
  }
  throw new Refused(response.status, message);
}

export async function models(key) {
  return (await (await ask("v1/models", key)).json()).data;
}

// Writes an answer into a message as it comes, and calls back after every event. Throws what ends it early.
export async function stream(body, key, signal, message, changed) {
  const response = await ask("v1/chat/completions", key, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(0, chunk.error.message);
    take(message, chunk);
    changed(chunk);
  }
  throw new Refused(0, "the connection was lost before the end of the answer");
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

// Returns the request that a conversation stands for. What was not set is left out: the server knows better.
export function request(conversation, model) {
  const { system, tools, ...sampling } = conversation.settings;
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const message of conversation.messages) messages.push(wire(message));
  const body = { model, messages };
  for (const [name, value] of Object.entries(sampling)) if (value !== null && value !== undefined) body[name] = value;
  if (tools?.length) body.tools = tools;
  return body;
}

function wire(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.id, content: message.content };
  if (message.calls?.length) {
    const calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return { role: "assistant", content: message.content, tool_calls: calls };
  }
  if (!message.images?.length) return { role: message.role, content: message.content };
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: message.role, content: [...images, { type: "text", text: message.content }] };
}

// Says what an answer cost, of what the server measured.
export function figures(usage) {
  const said = [`${usage.completion_tokens} tokens`];
  if (usage.avg_compl_tok_per_sec > 0) said.push(`${usage.avg_compl_tok_per_sec.toFixed(1)} tokens/s`);
  if (usage.time_to_first_token_sec > 0) said.push(`first after ${usage.time_to_first_token_sec.toFixed(2)} s`);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  said.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  const details = usage.completion_tokens_details ?? {};
  const right = details.accepted_prediction_tokens ?? 0;
  const guessed = right + (details.rejected_prediction_tokens ?? 0);
  if (guessed) said.push(`${right} of ${guessed} drafts right`);
  return said.join(" · ");
}

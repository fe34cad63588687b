// The dialog for a conversation's settings: system prompt, sampling, tools.

import { at } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

// `opened()` returns the open conversation, `changed(conversation)` saves it.
export function settingsDialog(opened, changed) {
  at("settings-open").addEventListener("click", () => {
    fill(opened().settings);
    at("settings").showModal();
  });
  at("s-reset").addEventListener("click", () => fill({ system: at("s-system").value }));
  at("s-example").addEventListener("click", () => {
    at("s-tools").value = JSON.stringify(EXAMPLE, null, 2);
    at("s-tools").focus();
  });
  at("settings").querySelector("form").addEventListener("submit", (event) => {
    if (event.submitter?.value !== "keep") return;
    try {
      opened().settings = read();
      changed(opened());
    } catch (error) {
      event.preventDefault();
      at("s-problem").textContent = `The tools cannot be used: ${error.message}.`;
      at("s-tools").focus();
    }
  });
}

function fill(settings) {
  at("s-system").value = settings.system ?? "";
  for (const name of NUMBERS) at(`s-${name}`).value = settings[name] ?? "";
  at("s-stop").value = (settings.stop ?? []).join("\n");
  at("s-thinking").value = settings.enable_thinking === undefined ? "" : String(settings.enable_thinking);
  at("s-tools").value = settings.tools?.length ? JSON.stringify(settings.tools, null, 2) : "";
  at("s-problem").textContent = "";
}

function read() {
  const settings = { system: at("s-system").value.trim(), tools: readTools(at("s-tools").value) };
  for (const name of NUMBERS) if (at(`s-${name}`).value !== "") settings[name] = Number(at(`s-${name}`).value);
  const stop = at("s-stop").value.split("\n").filter(Boolean);
  if (stop.length) settings.stop = stop;
  if (at("s-thinking").value) settings.enable_thinking = at("s-thinking").value === "true";
  return settings;
}

// Parses a text into tools; throws an error that describes what is wrong.
export function readTools(text) {
  const tools = JSON.parse(text.trim() || "[]");
  if (!Array.isArray(tools)) throw new Error("they have to be a JSON list");
  for (const tool of tools) {
    if (typeof tool?.function?.name !== "string") throw new Error('each has to be {"type": "function", "function": {"name": ...}}');
  }
  return tools;
}

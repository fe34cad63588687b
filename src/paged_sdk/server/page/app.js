// The page: conversations at the side, messages, and where the next one is written.

import { Refused, figures, models, request, stream } from "./chat.js";
import { copyButton, drawMarkdown, element, icon } from "./dom.js";
import { Forgetful, Store } from "./store.js";

const at = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "max_tokens"];
const LONGEST_SIDE = 2048;

const state = {
  store: null,
  conversations: [],
  open: null,
  key: sessionStorage.getItem("paged-sdk-key") ?? "",
  images: [],
  running: null, // { conversation, message, abort }
};

// ---- light and dark

const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const said = localStorage.getItem("paged-sdk-theme") ?? "system";
  const shown = said === "system" ? (dark.matches ? "dark" : "light") : said;
  document.documentElement.dataset.theme = shown;
  at("theme").setAttribute("aria-label", `Colors: ${said}. Change them`);
  at("theme").title = `Colors: ${said}`;
}

applyTheme();
dark.addEventListener("change", applyTheme);
at("theme").addEventListener("click", () => {
  const said = localStorage.getItem("paged-sdk-theme") ?? "system";
  localStorage.setItem("paged-sdk-theme", THEMES[(THEMES.indexOf(said) + 1) % THEMES.length]);
  applyTheme();
});

// ---- conversations

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function begin() {
  if (state.open && !state.open.messages.length && !state.open.settings.system) return show(state.open);
  // What was set for the last one is likely meant for the next one too.
  const settings = { ...(state.open?.settings ?? {}) };
  return show({ id: newId(), title: "", changed: Date.now(), messages: [], settings });
}

function show(conversation) {
  state.open = conversation;
  drawList();
  drawMessages();
  closeSide();
  at("prompt").focus();
}

async function keep(conversation) {
  conversation.changed = Date.now();
  if (!state.conversations.includes(conversation)) state.conversations.unshift(conversation);
  state.conversations.sort((one, other) => other.changed - one.changed);
  drawList();
  try {
    await state.store.put(conversation);
  } catch (error) {
    say(`The browser could not keep the conversation: ${error.message}`);
  }
}

async function forget(conversation) {
  if (!confirm(`Delete “${titleOf(conversation)}”?`)) return;
  if (state.running?.conversation === conversation) state.running.abort.abort();
  state.conversations = state.conversations.filter((each) => each !== conversation);
  await state.store.remove(conversation.id);
  if (state.open === conversation) {
    state.open = null;
    begin();
  } else {
    drawList();
    at("new").focus();
  }
}

const titleOf = (conversation) => conversation.title || "New conversation";

function drawList() {
  at("list").replaceChildren(...state.conversations.map((conversation) => {
    const isOpen = conversation === state.open;
    const title = titleOf(conversation);
    const open = element("button", { type: "button", class: "open", "aria-current": isOpen && "true", onclick: () => show(conversation) }, element("span", {}, title));
    const bin = element("button", { type: "button", class: "icon", "aria-label": `Delete ${title}`, onclick: () => forget(conversation) }, icon("bin"));
    return element("li", { class: isOpen ? "is-open" : "" }, open, bin);
  }));
  document.title = state.open?.title ? `${state.open.title} – Chat` : "Chat";
}

// ---- messages

function drawMessages() {
  const { messages } = state.open;
  at("log").replaceChildren(...messages.filter((message) => message.role !== "tool").map(drawMessage));
  at("empty").hidden = messages.length > 0;
  drawComposer();
  at("scroll").scrollTop = at("scroll").scrollHeight;
}

function drawMessage(message) {
  const isUser = message.role === "user";
  const body = element("div", { class: "body" });
  const made = element("article", { class: `message ${message.role}`, "aria-label": isUser ? "You" : "The model" });
  if (message.images?.length) {
    made.append(element("div", { class: "pictures" }, ...message.images.map((url, place) => element("img", { src: url, alt: `Image ${place + 1} of the message` }))));
  }
  made.append(body);
  if (isUser) {
    body.textContent = message.content;
    const edit = element("button", { type: "button", class: "small", onclick: () => editMessage(message, made) }, icon("edit"), "Edit");
    made.append(element("div", { class: "tools-row" }, copyButton(() => message.content, "Copy your message"), edit));
  } else {
    drawAnswer(message, made);
  }
  return made;
}

function drawAnswer(message, made) {
  const isRunning = state.running?.message === message;
  made.classList.toggle("is-running", isRunning);
  made.setAttribute("aria-busy", String(isRunning));
  const body = made.querySelector(".body");
  if (message.reasoning) {
    let thought = made.querySelector("details.thought");
    if (!thought) {
      thought = element("details", { class: "thought" }, element("summary", {}), element("div", {}));
      body.before(thought);
    }
    thought.firstChild.textContent = isRunning && !message.content ? "Thinking …" : "Thoughts";
    thought.lastChild.textContent = message.reasoning;
  }
  drawMarkdown(body, message.content);
  if (isRunning) return;
  made.querySelectorAll(":scope > .call, :scope > .tools-row, :scope > .problem").forEach((each) => each.remove());
  for (const call of message.calls ?? []) made.append(drawCall(call, message));
  if (message.error) made.append(element("p", { class: "problem" }, message.error));
  const again = element("button", { type: "button", class: "small", onclick: () => regenerate(message) }, icon("again"), "Again");
  const row = element("div", { class: "tools-row" }, copyButton(() => message.content, "Copy the answer"), again);
  const said = [];
  if (message.usage) said.push(figures(message.usage));
  if (message.finish === "length") said.push("cut off at the most tokens");
  if (message.wasStopped) said.push("stopped");
  row.append(element("span", { class: "figures" }, said.join(" · ")));
  made.append(row);
}

function drawCall(call, message) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // half of a call, of an answer that was stopped
  }
  const made = element("section", { class: "call", "aria-label": `Call of ${call.name}` }, element("h3", {}, `Tool: ${call.name}`), element("pre", {}, shown));
  const answer = state.open.messages.find((each) => each.role === "tool" && each.id === call.id);
  if (answer) {
    made.append(element("pre", { class: "result" }, `→ ${answer.content}`));
  } else if (message.finish === "tool_calls") {
    const text = element("textarea", { rows: "2", "aria-label": `What ${call.name} returns`, placeholder: "What does it return?" });
    made.append(text, element("button", { type: "button", onclick: () => answerCall(call, message, text.value) }, "Give it to the model"));
  }
  return made;
}

async function answerCall(call, message, content) {
  if (state.running) return;
  state.open.messages.push({ role: "tool", id: call.id, content });
  const { messages } = state.open;
  const isAnswered = (each) => messages.some((other) => other.role === "tool" && other.id === each.id);
  if (message.calls.every(isAnswered)) {
    await run(state.open);
  } else {
    await keep(state.open);
    drawMessages();
  }
}

function editMessage(message, made) {
  if (state.running) return;
  const text = element("textarea", { class: "editing", "aria-label": "Edit your message" });
  text.value = message.content;
  const send = () => {
    const conversation = state.open;
    const place = conversation.messages.indexOf(message);
    conversation.messages.splice(place, Infinity, { role: "user", content: text.value, images: message.images });
    run(conversation);
  };
  const cancel = () => made.replaceWith(drawMessage(message));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
  });
  const buttons = [
    element("button", { type: "button", class: "strong", onclick: send }, "Send"),
    element("button", { type: "button", onclick: cancel }, "Cancel"),
  ];
  made.replaceChildren(text, element("div", { class: "row" }, ...buttons));
  text.focus();
}

function regenerate(message) {
  if (state.running) return;
  state.open.messages.splice(state.open.messages.indexOf(message), Infinity);
  run(state.open);
}

// ---- asking

async function run(conversation) {
  const message = { role: "assistant", content: "" };
  const body = request(conversation, at("model").value);
  conversation.messages.push(message);
  conversation.title ||= (conversation.messages[0].content || "An image").trim().slice(0, 60);
  state.running = { conversation, message, abort: new AbortController() };
  drawMessages();
  await keep(conversation);
  say("The model answers.");
  let events = 0;
  let first = 0;
  let frame = 0;
  const draw = () => {
    frame = 0;
    if (state.open !== conversation || state.running?.message !== message) return;
    const scroll = at("scroll");
    const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    drawAnswer(message, at("log").lastElementChild);
    if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
    const seconds = (performance.now() - first) / 1000;
    if (seconds > 0.3) at("live").textContent = `about ${((events - 1) / seconds).toFixed(0)} tokens/s`;
  };
  const { signal } = state.running.abort;
  try {
    await stream(body, state.key, signal, message, () => {
      if (!events) first = performance.now();
      events += 1;
      frame ||= requestAnimationFrame(draw);
    });
  } catch (error) {
    if (signal.aborted) message.wasStopped = true;
    else message.error = error instanceof Refused ? error.message : "the server cannot be reached";
    if (error.status === 401) askForKey();
  }
  if (frame) cancelAnimationFrame(frame);
  state.running = null;
  at("live").textContent = "";
  await keep(conversation);
  if (state.open === conversation) {
    const last = at("log").lastElementChild;
    const scroll = at("scroll");
    const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 120;
    drawAnswer(message, last);
    if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  }
  drawComposer();
  say(message.error ? `It failed: ${message.error}` : message.wasStopped ? "Stopped." : `The answer: ${message.content}`);
}

function drawComposer() {
  const isRunning = state.running !== null;
  const hadFocus = document.activeElement === at("send") || document.activeElement === at("stop");
  at("send").hidden = isRunning;
  at("stop").hidden = !isRunning;
  if (hadFocus) at("prompt").focus();
}

function say(text) {
  at("said").textContent = text.slice(0, 2000);
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = at("prompt").value.trim();
  if (state.running || !(content || state.images.length)) return;
  state.open.messages.push({ role: "user", content, images: state.images });
  at("prompt").value = "";
  state.images = [];
  drawImages();
  run(state.open);
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit();
});

const stop = () => state.running?.abort.abort();
at("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (at("side").classList.contains("is-shown")) closeSide();
    else stop();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    begin();
  }
});

// ---- images

async function addImages(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    try {
      state.images.push(await asDataUrl(file));
    } catch {
      say(`${file.name} is no image that the browser can read.`);
    }
  }
  drawImages();
  at("prompt").focus();
}

// Photographs are made smaller: models see fewer pixels than cameras take, and bodies have a limit.
async function asDataUrl(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return file.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", 0.92) : canvas.toDataURL("image/png");
}

function drawImages() {
  at("images").hidden = !state.images.length;
  at("images").replaceChildren(...state.images.map((url, place) => {
    const remove = () => {
      state.images.splice(place, 1);
      drawImages();
      at("prompt").focus();
    };
    const button = element("button", { type: "button", class: "icon", "aria-label": `Remove image ${place + 1}`, onclick: remove }, icon("close"));
    return element("div", { class: "thumb" }, element("img", { src: url, alt: `Image ${place + 1}` }), button);
  }));
}

at("attach").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", async () => {
  await addImages([...at("files").files]);
  at("files").value = "";
});
at("prompt").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  event.preventDefault();
  addImages(files);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    at("form").classList.toggle("is-target", kind === "dragover");
    if (kind === "drop") addImages([...event.dataTransfer.files]);
  });
}

// ---- settings and the key

at("settings-open").addEventListener("click", () => {
  const { settings } = state.open;
  at("s-system").value = settings.system ?? "";
  for (const name of SAMPLING) at(`s-${name}`).value = settings[name] ?? "";
  at("s-tools").value = settings.tools?.length ? JSON.stringify(settings.tools, null, 2) : "";
  at("s-problem").textContent = "";
  at("settings").showModal();
});
at("settings").querySelector("form").addEventListener("submit", (event) => {
  if (event.submitter?.value !== "keep") return;
  let tools = [];
  try {
    tools = JSON.parse(at("s-tools").value.trim() || "[]");
    if (!Array.isArray(tools)) throw new Error("it is no list");
  } catch (error) {
    event.preventDefault();
    at("s-problem").textContent = `The tools are no JSON list: ${error.message}`;
    return;
  }
  const settings = { system: at("s-system").value.trim(), tools };
  for (const name of SAMPLING) settings[name] = at(`s-${name}`).value === "" ? null : Number(at(`s-${name}`).value);
  state.open.settings = settings;
  if (state.open.messages.length) keep(state.open);
});

function askForKey() {
  if (!at("key").open) at("key").showModal();
}

at("key").addEventListener("close", () => {
  if (at("key").returnValue !== "keep") return;
  state.key = at("key-text").value.trim();
  at("key-text").value = "";
  sessionStorage.setItem("paged-sdk-key", state.key);
  loadModels();
});

// ---- the list on small screens

function closeSide() {
  at("side").classList.remove("is-shown");
  at("shade").hidden = true;
  at("side-open").setAttribute("aria-expanded", "false");
}

at("side-open").addEventListener("click", () => {
  at("side").classList.add("is-shown");
  at("shade").hidden = false;
  at("side-open").setAttribute("aria-expanded", "true");
  at("new").focus();
});
at("side-close").addEventListener("click", () => {
  closeSide();
  at("side-open").focus();
});
at("shade").addEventListener("click", closeSide);
at("new").addEventListener("click", begin);

// ---- the beginning

async function loadModels() {
  try {
    const found = await models(state.key);
    const chosen = localStorage.getItem("paged-sdk-model");
    at("model").replaceChildren(...found.map((model) => element("option", { value: model.id, selected: model.id === chosen }, model.id)));
  } catch (error) {
    if (error.status === 401) askForKey();
    else say(`The models cannot be listed: ${error.message}`);
  }
}

at("model").addEventListener("change", () => localStorage.setItem("paged-sdk-model", at("model").value));

try {
  state.store = await Store.open();
} catch {
  state.store = new Forgetful();
}
state.conversations = await state.store.all();
begin();
await loadModels();
document.documentElement.dataset.ready = "";

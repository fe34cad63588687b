// The page: connects the sidebar, the messages and the composer.

import { health, models, request, stream } from "./chat.js";
import { Composer } from "./composer.js";
import { at, button, element, say } from "./dom.js";
import { AnswerView, userView } from "./messages.js";
import { Drawing, Pace, pause } from "./pace.js";
import { patience, problem } from "./problems.js";
import { settingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { openStore, remember, remembered } from "./store.js";
import { followTheme } from "./theme.js";

const MOST_TRIES = 5;
const SAVE_EVERY = 5000; // milliseconds between saves of an answer that is being streamed
const IDEAS = [
  ["Explain a thing", "Explain to a newcomer how a language model writes one word after the other."],
  ["Write code", "Write a Python function that groups the lines of a file by their first word, with a test."],
  ["Compare", "Compare REST, gRPC and message queues in a table: when is each the better choice?"],
  ["Shorten a text", "Make three plain sentences of the following text:\n\n"],
];

const state = {
  store: null,
  conversations: [],
  open: null,
  key: remembered("key", true) ?? "",
  models: [],
  running: null, // { conversation, message, view, abort }
  isAtEnd: true,
};

// ---- conversations

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// A new conversation takes over the settings of the last one.
function begin(settings = state.open?.settings ?? {}) {
  if (state.open && !state.open.messages.length) return show(state.open);
  return show({ id: newId(), title: "", changed: Date.now(), messages: [], settings: { ...settings } });
}

function show(conversation) {
  state.open = conversation;
  if (conversation.model && state.models.some((model) => model.id === conversation.model)) at("model").value = conversation.model;
  drawModel();
  drawAll();
  sidebar.hide();
  at("prompt").focus();
}

async function keep(conversation) {
  conversation.changed = Date.now();
  if (!state.conversations.includes(conversation)) state.conversations.unshift(conversation);
  state.conversations.sort((one, other) => other.changed - one.changed);
  drawList();
  await store(conversation);
}

async function store(conversation) {
  try {
    await state.store.put(conversation);
    if (!state.store.isForgetful) at("kept").hidden = true;
  } catch (error) {
    const isFull = error?.name === "QuotaExceededError";
    tellNotKept(isFull
      ? "The browser's storage is full: this conversation lasts until the page is closed. Delete others, or export it."
      : `The browser cannot keep this conversation: ${error?.message}. It lasts until the page is closed.`);
  }
}

// Takes over another tab's changes, unless that would undo something in progress here.
async function refresh() {
  const isBusy = () => state.running || !at("kept").hidden || document.querySelector(".editing, .rename");
  if (isBusy()) return;
  const all = await state.store.all();
  if (isBusy()) return;
  state.conversations = all;
  const found = state.conversations.find(({ id }) => id === state.open.id);
  if (found && found.changed !== state.open.changed) {
    state.open = found;
    drawAll();
  } else {
    state.conversations = state.conversations.map((each) => (each === found ? state.open : each));
    drawList();
  }
}

function tellNotKept(text) {
  if (at("kept-text").textContent !== text) say(text);
  at("kept-text").textContent = text;
  at("kept").hidden = false;
}

at("kept-close").addEventListener("click", () => { at("kept").hidden = true; });

async function forget(conversation) {
  if (state.running?.conversation === conversation) state.running.abort.abort();
  state.conversations = state.conversations.filter((each) => each !== conversation);
  await state.store.remove(conversation.id);
  say("The conversation is deleted.");
  if (state.open === conversation) {
    state.open = null;
    begin(conversation.settings);
  } else {
    drawList();
    at("new").focus();
  }
}

function drawList() {
  sidebar.draw();
  document.title = state.open?.title ? `${state.open.title} – Chat` : "Chat";
}

const sidebar = new Sidebar({
  open: show,
  begin,
  keep,
  forget,
  opened: () => state.open,
  all: () => state.conversations,
});

// ---- messages

function drawAll() {
  const { messages } = state.open;
  at("log").replaceChildren(...messages.filter((message) => message.role !== "tool").map(viewOf));
  at("empty").hidden = messages.length > 0;
  composer.isRunning = state.running !== null;
  drawList();
  drawContext();
  state.isAtEnd = true;
  scrollToEnd();
}

function viewOf(message) {
  if (message.role === "user") return userView(message, actions);
  const isRunning = state.running?.message === message;
  const view = isRunning ? (state.running.view ??= new AnswerView(message, actions)) : new AnswerView(message, actions);
  view.show(isRunning ? "" : null);
  return view.node;
}

function scrollToEnd() {
  if (state.isAtEnd) at("scroll").scrollTop = 1e9;
  at("down").hidden = state.isAtEnd;
}

at("scroll").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = at("scroll");
  state.isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
  at("down").hidden = state.isAtEnd;
});
at("down").addEventListener("click", () => {
  state.isAtEnd = true;
  scrollToEnd();
  at("prompt").focus();
});

const actions = {
  send(message, text) {
    if (state.running || !(text || message.images?.length)) return;
    const { messages } = state.open;
    messages.splice(messages.indexOf(message), Infinity, { role: "user", content: text, images: message.images });
    run(state.open);
  },
  again(message) {
    if (state.running) return;
    const { messages } = state.open;
    messages.splice(messages.indexOf(message), Infinity);
    run(state.open);
  },
  answer(call, content) {
    if (state.running) return;
    const { messages } = state.open;
    const asked = messages.find((message) => message.calls?.includes(call));
    // A result is inserted directly after its call, even if the conversation continued without it.
    let place = messages.indexOf(asked) + 1;
    while (messages[place]?.role === "tool") place += 1;
    messages.splice(place, 0, { role: "tool", id: call.id, content });
    const isLast = place === messages.length - 1;
    if (isLast && asked.calls.every((each) => actions.resultOf(each) !== null)) {
      run(state.open);
    } else {
      keep(state.open);
      drawAll();
    }
  },
  resultOf(call) {
    return state.open.messages.find((message) => message.role === "tool" && message.id === call.id)?.content ?? null;
  },
};

// ---- asking

async function run(conversation) {
  const message = { role: "assistant", content: "", model: at("model").value };
  const body = request(conversation, message.model);
  conversation.messages.push(message);
  conversation.model = message.model;
  conversation.title ||= (conversation.messages[0].content || "An image").trim().replace(/\s+/g, " ").slice(0, 60);
  state.running = { conversation, message, view: null, abort: new AbortController() };
  drawAll();
  await keep(conversation);
  say("The model is answering.");
  const { signal } = state.running.abort;
  const pace = new Pace();
  const drawing = new Drawing(() => {
    if (state.open !== conversation) return;
    state.running.view.show(pace.said);
    scrollToEnd();
  });
  const saving = setInterval(() => store(conversation), SAVE_EVERY);
  try {
    await tryToStream(body, signal, message, pace, drawing);
  } catch (error) {
    if (signal.aborted) {
      message.wasStopped = true;
      message.about = pace.said;
    } else {
      message.problem = problem(error);
      follow(message.problem.next);
    }
  }
  clearInterval(saving);
  drawing.end();
  const { view } = state.running;
  state.running = null;
  composer.isRunning = false;
  if (state.open === conversation) {
    view.show();
    drawContext();
    scrollToEnd();
  }
  say(summary(message));
  if (state.conversations.includes(conversation)) await keep(conversation);
}

// Retries while the queue is full, with increasing delays.
async function tryToStream(body, signal, message, pace, drawing) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      await stream(body, state.key, signal, message, () => {
        pace.note(message);
        drawing.ask();
      });
      return;
    } catch (error) {
      if (error.status !== 429 || attempt === MOST_TRIES - 1) throw error;
      for (let left = patience(error, attempt); left > 0; left -= 1) {
        pace.said = `The server is busy. Next try in ${left} s`;
        drawing.ask();
        await pause(Math.min(left, 1) * 1000, signal);
      }
      pace.said = "";
    }
  }
}

function summary(message) {
  if (message.problem) return `${message.problem.title} ${message.problem.text}`;
  if (message.wasStopped) return "Stopped. What was written so far is kept.";
  const calls = (message.calls ?? []).map((call) => `The model calls ${call.name}, and waits for the result.`);
  return [message.content ? `The answer: ${message.content}` : "", ...calls].join(" ").trim() || "The answer is empty.";
}

const stop = () => state.running?.abort.abort();

const composer = new Composer((content, images) => {
  if (state.running) return state.running.conversation === state.open ? "The answer is still being written." : "An answer is being written in another conversation.";
  if (!at("model").value) {
    loadModels(); // asks for the key again if it was missing or wrong
    return "There is no model to ask.";
  }
  state.open.messages.push({ role: "user", content, images });
  run(state.open);
  return null;
}, stop);

document.addEventListener("keydown", (event) => {
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    begin();
  } else if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) {
    if (sidebar.isShown) sidebar.hide();
    else stop();
  }
});

// ---- the server, its models, and the key

async function loadModels() {
  try {
    state.models = await models(state.key);
  } catch (error) {
    follow(problem(error).next);
    if (error.status !== 401) say(problem(error).title);
    return;
  }
  const chosen = state.open?.model ?? remembered("model");
  at("model").replaceChildren(...state.models.map(({ id, parent }) => {
    return element("option", { value: id, selected: id === chosen }, parent ? `${id} (adapter of ${parent})` : id);
  }));
  drawModel();
}

function drawModel() {
  const model = state.models.find(({ id }) => id === at("model").value);
  const takesImages = model?.input_modalities?.includes("image") ?? true;
  composer.whyNoImages = takesImages ? null : `${model.id} takes no images.`;
  at("empty-model").textContent = model ? model.id : "";
  drawContext();
}

function drawContext() {
  const isSet = Object.values(state.open?.settings ?? {}).some((value) => value !== "" && value?.length !== 0);
  at("settings-open").classList.toggle("is-set", isSet);
  at("settings-open").setAttribute("aria-label", `Settings of this conversation${isSet ? ": some are set" : ""}`);
  const most = state.models.find(({ id }) => id === at("model").value)?.max_model_len;
  const usage = state.open?.messages.findLast((message) => message.usage)?.usage;
  const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  at("context").hidden = !most || !used;
  if (at("context").hidden) return;
  at("context-bar").value = Math.min(1, used / most);
  at("context-text").textContent = `${used.toLocaleString("en")} / ${most.toLocaleString("en")} tokens`;
}

at("model").addEventListener("change", () => {
  remember("model", at("model").value);
  drawModel();
});

function follow(next) {
  if (next === "key" && !at("key").open) {
    at("key-problem").textContent = state.key ? "The server does not know this key." : "";
    at("key").showModal();
  }
  if (next === "models") loadModels();
  if (next === "watch") watch();
}

// Polls until the server is back, with increasing delays.
let isWatching = false;
async function watch() {
  if (isWatching) return;
  isWatching = true;
  for (let seconds = 1; ; seconds = Math.min(seconds * 1.5, 15)) {
    const found = (await health())?.status;
    if (found === "ready") break;
    const said = { loading: "The server is loading its models …", ending: "The server is shutting down …", failed: "The model has stopped. The server has to be started again." };
    const text = said[found] ?? "No connection to the server. The page tries again by itself …";
    if (at("banner-text").textContent !== text) say(text);
    at("banner-text").textContent = text;
    at("banner").hidden = false;
    await new Promise((resolve) => {
      setTimeout(resolve, seconds * 1000);
      at("banner-now").onclick = resolve;
    });
  }
  isWatching = false;
  if (!at("banner").hidden) say("The server is back.");
  at("banner").hidden = true;
  at("banner-text").textContent = "";
  await loadModels();
}

addEventListener("online", () => at("banner-now").click());

at("key").addEventListener("close", () => {
  if (at("key").returnValue !== "keep") return;
  at("key").returnValue = "";
  state.key = at("key-text").value.trim();
  at("key-text").value = "";
  remember("key", state.key, true);
  loadModels();
});

// ---- start

followTheme();
settingsDialog(() => state.open, (conversation) => {
  drawContext();
  if (conversation.messages.length) keep(conversation);
});
at("ideas").append(...IDEAS.map(([title, text]) => button({ class: "idea", onclick: () => composer.fill(text) }, element("strong", {}, title), element("span", {}, text.trim()))));
state.store = await openStore();
if (state.store.isForgetful) tellNotKept("This browser keeps nothing for the page: conversations last until it is closed.");
state.conversations = await state.store.all().catch(() => []);
state.store.changedElsewhere = refresh;
begin();
await loadModels();
addEventListener("pagehide", () => {
  if (state.running) state.store.put(state.running.conversation).catch(() => {});
});
document.documentElement.dataset.ready = "";

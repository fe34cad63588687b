// Draws the messages of a conversation.

import { figures } from "./chat.js";
import { button, copyButton, element, icon } from "./dom.js";
import { codeBlock, drawMarkdown, showCode } from "./draw.js";

const LONG = 2500; // characters, and
const MANY = 25; // lines, beyond which a user's message is folded

// `actions`: send(message, text) replaces a message's text and sends it, again(message) asks for another answer,
// answer(call, text) sends a tool's result, resultOf(call) returns that result.
export function userView(message, actions) {
  const made = element("article", { class: "message user", "aria-label": "You" });
  const pictures = (message.images ?? []).map((url, place) => element("img", { src: url, alt: `Image ${place + 1} of the message` }));
  const show = () => {
    const edit = button({ class: "small", onclick: () => made.replaceChildren(...editor(message, actions, show)) }, icon("edit"), "Edit");
    const isLong = message.content.length > LONG || message.content.split("\n").length > MANY;
    const body = element("div", { class: isLong ? "body is-folded" : "body", dir: "auto", hidden: !message.content }, message.content);
    const unfold = button({ class: "small", "aria-expanded": "false" }, "Show all");
    unfold.addEventListener("click", () => {
      const isFolded = body.classList.toggle("is-folded");
      unfold.setAttribute("aria-expanded", String(!isFolded));
      unfold.textContent = isFolded ? "Show all" : "Show less";
    });
    made.replaceChildren(
      ...(pictures.length ? [element("div", { class: "pictures" }, ...pictures)] : []),
      body,
      element("div", { class: "foot" }, ...(isLong ? [unfold] : []), copyButton(() => message.content, "Copy your message"), edit),
    );
  };
  show();
  return made;
}

function editor(message, actions, leave) {
  const text = element("textarea", { class: "editing", dir: "auto", "aria-label": "Edit your message" });
  text.value = message.content;
  const send = () => actions.send(message, text.value.trim());
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    }
  });
  queueMicrotask(() => text.focus());
  const hint = element("p", { class: "hint grow" }, "What comes after it is dropped.");
  return [text, element("div", { class: "row" }, hint, button({ onclick: leave }, "Cancel"), button({ class: "strong", onclick: send }, "Send"))];
}

// An answer, which is redrawn while it is streamed.
export class AnswerView {
  #message;
  #actions;
  #thought = element("details", { class: "thought", hidden: true }, element("summary"), element("div", { class: "text" }));
  #body = element("div", { class: "body" });
  #calls = element("div", { class: "calls" });
  #foot = element("div", { class: "foot" });
  #live = element("span", { class: "live" });
  #callViews = [];

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    const who = element("p", { class: "who" }, icon("mark"), message.model || "The model");
    this.node = element("article", { class: "message assistant", "aria-label": "The model" }, who, this.#thought, this.#body, this.#calls, this.#foot);
  }

  // `progress` describes an answer that is being streamed; null: it is complete or was interrupted.
  show(progress = null) {
    const { reasoning, content, calls = [] } = this.#message;
    this.node.classList.toggle("is-running", progress !== null);
    this.node.setAttribute("aria-busy", String(progress !== null));
    if (reasoning) {
      const isThinking = progress !== null && !content && !calls.length;
      this.#thought.hidden = false;
      this.#thought.classList.toggle("is-thinking", isThinking);
      this.#thought.firstChild.textContent = isThinking ? "Thinking" : thoughtFor(this.#message);
      drawMarkdown(this.#thought.lastChild, reasoning);
    }
    drawMarkdown(this.#body, content);
    this.#showCalls(calls, progress !== null);
    if (progress === null) {
      this.#foot.replaceChildren(...this.#end());
    } else {
      if (!this.#live.isConnected) this.#foot.replaceChildren(element("span", { class: "dots", "aria-hidden": "true" }), this.#live);
      this.#live.textContent = progress;
    }
  }

  #end() {
    const message = this.#message;
    const said = message.usage ? figures(message.usage) : [];
    if (message.finish === "length") said.push(["cut off", "It had as many tokens as it may have, or the context was full"]);
    if (message.wasStopped) said.push(["stopped", "You stopped it"], ...(message.about ? [[message.about, "As it was seen here, not as the server counts"]] : []));
    if (!message.finish && !message.wasStopped && !message.problem) said.push(["not finished", "It is being written in another tab, or the page was closed meanwhile"]);
    const line = element("p", { class: "figures" });
    said.forEach(([text, title], place) => line.append(...(place ? [" · "] : []), element("span", { title }, text)));
    const again = button({ class: "small", onclick: () => this.#actions.again(message) }, icon("again"), "Again");
    const foot = message.content || !message.problem ? [copyButton(() => message.content, "Copy the answer"), again, line] : [];
    return message.problem ? [this.#problem(message.problem), ...foot] : foot;
  }

  #problem({ title, text }) {
    const again = button({ onclick: () => this.#actions.again(this.#message) }, icon("again"), "Try again");
    return element("div", { class: "problem" }, icon("alert"), element("div", { class: "grow" }, element("strong", {}, title), " ", text), again);
  }

  #showCalls(calls, isRunning) {
    calls.forEach((call, place) => {
      if (!this.#callViews[place]) {
        this.#callViews[place] = new CallView(call, this.#actions);
        this.#calls.append(this.#callViews[place].node);
      }
      const isWhole = this.#message.finish === "tool_calls";
      this.#callViews[place].show(isRunning ? "writing" : isWhole ? "whole" : "cut off");
    });
  }
}

function thoughtFor({ thoughtSeconds }) {
  return thoughtSeconds >= 1 ? `Thought for ${Math.round(thoughtSeconds)} s` : "Thoughts";
}

// A tool call, with a field for the result: the page runs no tools itself.
class CallView {
  #call;
  #actions;
  #title = element("span", { class: "name" });
  #state = element("span", { class: "state" });
  #code = codeBlock("json", "", "arguments");
  #end = element("div");

  constructor(call, actions) {
    this.#call = call;
    this.#actions = actions;
    const head = element("h3", {}, icon("tool"), this.#title, this.#state);
    this.node = element("section", { class: "call" }, head, this.#code, this.#end);
  }

  show(stage) {
    const { name } = this.#call;
    const result = stage === "whole" ? this.#actions.resultOf(this.#call) : null;
    this.node.setAttribute("aria-label", `Call of ${name}`);
    this.#title.textContent = name;
    showCode(this.#code, stage === "whole" ? pretty(this.#call.arguments) : this.#call.arguments);
    this.#state.textContent = { writing: "is being written", "cut off": "was cut off", whole: result === null ? "waits for its result" : "answered" }[stage];
    this.#state.classList.toggle("is-open", stage === "whole" && result === null);
    if (stage !== "whole") this.#end.replaceChildren();
    else if (result !== null) this.#end.replaceChildren(codeBlock("json", pretty(result), "result"));
    else if (!this.#end.firstChild) this.#end.replaceChildren(...this.#field(name));
  }

  #field(name) {
    const text = element("textarea", { rows: "2", class: "code", "aria-label": `What ${name} returns`, placeholder: "What does it return?" });
    return [text, element("div", { class: "row" }, button({ class: "strong", onclick: () => this.#actions.answer(this.#call, text.value) }, "Give it to the model"))];
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

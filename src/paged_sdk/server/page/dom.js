// Makes elements. Texts become text nodes always, so that nothing a model says is markup.

import { TAGS, parse } from "./markdown.js";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

export function copyButton(text, label) {
  const word = document.createTextNode("Copy");
  const button = element("button", { type: "button", class: "small", "aria-label": label }, icon("copy"), word);
  button.addEventListener("click", async () => {
    word.data = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => { word.data = "Copy"; }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that came over plain HTTP from another machine have no clipboard of their own.
    const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}

const drawn = new WeakMap();

// Draws Markdown into an element; blocks that are as they were stay the same nodes, so that a selection survives.
export function drawMarkdown(target, text) {
  const before = drawn.get(target) ?? [];
  const now = parse(text).map((block) => [JSON.stringify(block), block]);
  now.forEach(([key, block], place) => {
    const old = target.children[place];
    if (before[place] === key && old) return;
    const made = node(block);
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > now.length) target.lastElementChild.remove();
  drawn.set(target, now.map(([key]) => key));
}

function node(value) {
  if (typeof value === "string") return document.createTextNode(value);
  const [tag, attributes, ...children] = value;
  if (!TAGS.has(tag)) throw new Error(`no element is made of ${tag}`);
  if (tag === "code-block") return codeBlock(attributes.language, children[0]);
  const made = document.createElement(tag);
  if (tag === "a") {
    made.setAttribute("href", attributes.href);
    made.setAttribute("target", "_blank");
    made.setAttribute("rel", "noopener noreferrer");
  } else if (tag === "ol" && attributes.start !== undefined) {
    made.setAttribute("start", attributes.start);
  }
  made.append(...children.map(node));
  return tag === "table" ? element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, made) : made;
}

function codeBlock(language, code) {
  const head = element("div", { class: "block-head" }, element("span", {}, language || "code"), copyButton(() => code, "Copy the code"));
  const pre = element("pre", { tabindex: "0", "aria-label": "Code" , role: "group" }, element("code", {}, code));
  return element("div", { class: "block" }, head, pre);
}

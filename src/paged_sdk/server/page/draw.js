// Draws Markdown that grows. Unchanged parts keep their nodes, so that a selection survives, and the cost depends only
// on the new part.

import { CodeText } from "./code.js";
import { copyButton, element } from "./dom.js";
import { Reader, TAGS } from "./markdown.js";

const drawn = new WeakMap(); // elements to the values drawn in them
const codes = new WeakMap();

export function drawMarkdown(target, text) {
  const { reader, blocks: before } = drawn.get(target) ?? { reader: new Reader(), blocks: [] };
  const { blocks, same } = reader.read(text);
  patch(target, before, blocks, Math.min(same, before.length));
  drawn.set(target, { reader, blocks });
}

// Updates the nodes from the values `before` to the values `now`; the first `from` are equal.
function patch(target, before, now, from) {
  for (let place = from; place < now.length; place += 1) {
    if (place >= before.length) {
      target.append(nodeOf(now[place]));
    } else if (!same(before[place], now[place])) {
      const old = target.childNodes[place];
      if (!grown(old, before[place], now[place])) old.replaceWith(nodeOf(now[place]));
    }
  }
  for (let left = before.length - now.length; left > 0; left -= 1) target.lastChild.remove();
}

function same(one, other) {
  if (typeof one === "string" || typeof other === "string") return one === other;
  return one.length === other.length && isAlike(one, other) && one.every((child, place) => place < 2 || same(child, other[place]));
}

// Whether one element can be turned into the other by changing only its children.
function isAlike([tag, said], [otherTag, otherSaid]) {
  return tag === otherTag && ["href", "language", "start", "align"].every((name) => said[name] === otherSaid[name]);
}

function grown(node, before, now) {
  if (typeof before === "string" || typeof now === "string") {
    if (typeof before !== typeof now) return false;
    if (now.startsWith(before)) node.appendData(now.slice(before.length));
    else node.data = now;
    return true;
  }
  if (!isAlike(before, now)) return false;
  if (now[0] === "code-block") showCode(node, now[2]);
  else patch(now[0] === "table" ? node.firstChild : node, before.slice(2), now.slice(2), 0);
  return true;
}

// These get their text direction from their first letter, independently of the page's language.
const DIRECTED = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ol", "ul", "table"]);

function nodeOf(value) {
  if (typeof value === "string") return document.createTextNode(value);
  const [tag, attributes, ...children] = value;
  if (!TAGS.has(tag)) throw new Error(`no element is made of ${tag}`);
  if (tag === "code-block") return codeBlock(attributes.language, children[0]);
  const made = document.createElement(tag);
  if (DIRECTED.has(tag)) made.dir = "auto";
  if (attributes.align) made.className = `to-${attributes.align}`;
  if (attributes.start !== undefined) made.setAttribute("start", attributes.start);
  if (tag === "a") {
    made.setAttribute("href", attributes.href);
    made.setAttribute("target", "_blank");
    made.setAttribute("rel", "noopener noreferrer");
  }
  made.append(...children.map(nodeOf));
  return tag === "table" ? element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, made) : made;
}

export function codeBlock(language, code, label = language || "code") {
  const shown = element("code");
  const text = new CodeText(shown, language, code);
  const head = element("div", { class: "block-head" }, element("span", {}, label), copyButton(() => text.text, "Copy the code"));
  const pre = element("pre", { tabindex: "0", "aria-label": "Code", role: "group", dir: "ltr" }, shown);
  const made = element("div", { class: "block" }, head, pre);
  codes.set(made, text);
  return made;
}

export function showCode(block, code) {
  codes.get(block).show(code);
}

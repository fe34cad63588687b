// Parses Markdown into plain values: a text, or [tag, attributes, ...children]. HTML is neither parsed nor produced: it
// stays text, and dom.js creates elements only of these tags.

export const TAGS = new Set([
  "a", "blockquote", "br", "code", "code-block", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
  "p", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
]);

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12;

export function parse(text) {
  return new Reader().read(text).blocks;
}

// Parses a text that grows. A block that is followed by two complete lines is final and not parsed again, so the cost
// depends only on the new part.
export class Reader {
  #text = "";
  #settled = [];
  #offset = 0;

  // Returns all blocks, and how many of them are the same as those of the last call.
  read(text) {
    const source = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    if (!source.startsWith(this.#text)) {
      this.#settled = [];
      this.#offset = 0;
    }
    this.#text = source;
    const same = this.#settled.length;
    const lines = source.slice(this.#offset).split("\n");
    const ends = [];
    const found = blocks(lines, 0, ends);
    let count = 0;
    while (count < found.length && ends[count] < lines.length - 2) count += 1;
    if (count) {
      for (const line of lines.slice(0, ends[count - 1])) this.#offset += line.length + 1;
      this.#settled = this.#settled.concat(found.slice(0, count));
    }
    return { blocks: this.#settled.concat(found.slice(count)), same };
  }
}

// Replaces tabs of the indentation by spaces.
function withoutTabs(line) {
  return line.replace(/^[ \t]+/, (indent) => indent.replaceAll("\t", "    "));
}

function blocks(source, depth, ends = []) {
  const lines = source.map(withoutTabs);
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      const code = [];
      const end = new RegExp(`^ {0,3}${fence[2][0]}{${fence[2].length},}\\s*$`);
      for (at += 1; at < lines.length && !end.test(lines[at]); at += 1) code.push(unindented(source[at], fence[1].length));
      at += 1;
      found.push(["code-block", { language: fence[3] }, code.join("\n")]);
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      found.push([`h${marks.length}`, {}, ...inline(title, depth)]);
      at += 1;
    } else if (RULE.test(line)) {
      found.push(["hr", {}]);
      at += 1;
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const inner = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at += 1) inner.push(QUOTE.exec(lines[at])[1]);
      found.push(["blockquote", {}, ...blocks(inner, depth + 1)]);
    } else if (ITEM.test(line) && depth < DEEPEST) {
      const [list, next] = listAt(lines, at, depth);
      found.push(list);
      at = next;
    } else if (isTable(lines, at)) {
      const [table, next] = tableAt(lines, at, depth);
      found.push(table);
      at = next;
    } else {
      const words = [line];
      for (at += 1; at < lines.length && !endsParagraph(lines[at], depth) && !isTable(lines, at); at += 1) words.push(lines[at]);
      found.push(["p", {}, ...inline(words.join("\n"), depth)]);
    }
    if (found.length > ends.length) ends.push(at);
  }
  return found;
}

function endsParagraph(line, depth) {
  const nests = depth < DEEPEST && (ITEM.test(line) || QUOTE.test(line));
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || nests;
}

function isTable(lines, at) {
  const rule = lines[at + 1] ?? "";
  return lines[at].includes("|") && rule.includes("-") && TABLE_RULE.test(rule);
}

function unindented(line, most) {
  let spaces = 0;
  while (spaces < most && line[spaces] === " ") spaces += 1;
  return line.slice(spaces);
}

function listAt(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let at = start;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length > indent.length + 1 || found[1].length < indent.length || /\d/.test(found[2]) !== isOrdered || RULE.test(lines[at])) break;
    const inner = [found[3]];
    const margin = found[1].length + 2;
    let sawBlank = false;
    for (at += 1; at < lines.length; at += 1) {
      const line = lines[at];
      const isDeeper = line.search(/\S/) >= margin;
      if (!line.trim()) {
        sawBlank = true;
      } else if (!isDeeper && (sawBlank || endsParagraph(line, depth))) {
        break;
      } else {
        sawBlank = false;
      }
      inner.push(unindented(line, found[1].length + found[2].length + 1));
    }
    inner[0] = inner[0].replace(/^\[([ xX])\] (?=\S)/, (_, mark) => (mark === " " ? "☐ " : "☑ "));
    const children = blocks(inner, depth + 1);
    // The first paragraph of an item needs no element of its own.
    const isTight = children.length > 0 && children[0][0] === "p";
    items.push(["li", {}, ...(isTight ? [...children[0].slice(2), ...children.slice(1)] : children)]);
  }
  const first = parseInt(mark, 10);
  return [[isOrdered ? "ol" : "ul", isOrdered && first !== 1 ? { start: first } : {}, ...items], at];
}

function tableAt(lines, start, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[start + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "end") : null));
  const side = (place) => (sides[place] ? { align: sides[place] } : {});
  const row = (line, tag) => ["tr", {}, ...cells(line).map((cell, place) => [tag, side(place), ...inline(cell, depth)])];
  const rows = [];
  let at = start + 2;
  for (; at < lines.length && lines[at].trim() && lines[at].includes("|"); at += 1) rows.push(row(lines[at], "td"));
  return [["table", {}, ["thead", {}, row(lines[start], "th")], ["tbody", {}, ...rows]], at];
}

const LINK = [/^!?\[([^[\]]{0,500})\]\(\s*([^\s()<>]{1,2000})(?:\s+"[^"]{0,200}")?\s*\)/, (m, depth) => link(m[2], inline(m[1], depth + 1), m[0])];
const BREAK = [/^(?: {2,}|\\)\n/, () => ["br", {}]];

// Regular expressions by their first character. All take linear time: no two adjacent parts match the same characters.
// TeX is shown as written, as code.
const SPANS = new Map(Object.entries({
  "\\": [
    [/^\\\(([^]{1,1000}?)\\\)/, (m) => ["code", {}, m[1].trim()]],
    [/^\\\[([^]{1,1000}?)\\\]/, (m) => ["code", {}, m[1].trim()]],
    [/^\\([!-/:-@[-`{-~])/, (m) => m[1]],
    BREAK,
  ],
  "`": [[/^(`+)(?!`)([^]*?[^`])\1(?!`)/, (m) => ["code", {}, m[2].replace(/\n/g, " ").replace(/^ (.*\S.*) $/, "$1")]]],
  "!": [LINK],
  "[": [LINK],
  "<": [[/^<(https?:\/\/[^\s<>]{1,2000})>/, (m) => link(m[1], [m[1]], m[0])]],
  "h": [[/^https?:\/\/[^\s<>()"'`*]{1,2000}[^\s<>()"'`*.,;:!?]/, (m) => link(m[0], [m[0]], m[0])]],
  "*": [
    [/^\*\*(?=\S)([^]{0,2000}?\S)\*\*(?!\*)/, (m, depth) => ["strong", {}, ...inline(m[1], depth + 1)]],
    [/^\*(?=[^\s*])([^]{0,2000}?[^\s*])\*(?!\*)/, (m, depth) => ["em", {}, ...inline(m[1], depth + 1)]],
  ],
  "_": [
    [/^__(?=\S)([^]{0,2000}?\S)__(?!\w)/, (m, depth) => ["strong", {}, ...inline(m[1], depth + 1)]],
    [/^_(?=[^\s_])([^]{0,2000}?[^\s_])_(?!\w)/, (m, depth) => ["em", {}, ...inline(m[1], depth + 1)]],
  ],
  "~": [[/^~~(?=\S)([^]{0,2000}?\S)~~/, (m, depth) => ["del", {}, ...inline(m[1], depth + 1)]]],
  " ": [BREAK],
}));
const BEGINS = /[\\`![<*_~]| {2,}\n|https?:\/\//g;

function inline(text, depth) {
  if (depth >= DEEPEST) return [text];
  const found = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) found.push(plain);
    plain = "";
  };
  while (at < text.length) {
    BEGINS.lastIndex = at;
    const next = BEGINS.exec(text)?.index ?? -1;
    if (next < 0) break;
    plain += text.slice(at, next);
    at = next;
    const first = text[at];
    const isWithinWord = (first === "_" || first === "h") && /[\p{L}\p{N}]$/u.test(plain.slice(-2));
    const hit = isWithinWord ? null : firstSpan(first, text.slice(at, at + 5000), depth);
    if (hit === null) {
      plain += first;
      at += 1;
    } else {
      const [length, value] = hit;
      if (typeof value === "string") {
        plain += value;
      } else {
        flush();
        found.push(value);
      }
      at += length;
    }
  }
  plain += text.slice(at);
  flush();
  return found;
}

function firstSpan(first, rest, depth) {
  for (const [form, make] of SPANS.get(first)) {
    const found = form.exec(rest);
    if (found) return [found[0].length, make(found, depth)];
  }
  return null;
}

function link(address, children, source) {
  // Other schemes, such as javascript:, could run code in this page. Images become links too: none is loaded.
  return /^(https?:\/\/|mailto:)/i.test(address) ? ["a", { href: address }, ...children] : source;
}

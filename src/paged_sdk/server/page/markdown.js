// Reads Markdown as plain values: a text, or [tag, attributes, ...children]. No HTML is read or made: what looks like
// it stays text, and dom.js makes elements of these tags alone.

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
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocks(lines, depth) {
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
      for (at += 1; at < lines.length && !end.test(lines[at]); at += 1) code.push(unindented(lines[at], fence[1].length));
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
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      const [table, next] = tableAt(lines, at, depth);
      found.push(table);
      at = next;
    } else {
      const words = [line];
      for (at += 1; at < lines.length && !endsParagraph(lines[at], depth); at += 1) words.push(lines[at]);
      found.push(["p", {}, ...inline(words.join("\n"), depth)]);
    }
  }
  return found;
}

function endsParagraph(line, depth) {
  const nests = depth < DEEPEST && (ITEM.test(line) || QUOTE.test(line));
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || nests;
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
    const children = blocks(inner, depth + 1);
    // An item of one paragraph needs no space around it.
    const isTight = children.length > 0 && children[0][0] === "p";
    items.push(["li", {}, ...(isTight ? [...children[0].slice(2), ...children.slice(1)] : children)]);
  }
  const first = parseInt(mark, 10);
  return [[isOrdered ? "ol" : "ul", isOrdered && first !== 1 ? { start: first } : {}, ...items], at];
}

function tableAt(lines, start, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, tag) => ["tr", {}, ...cells(line).map((cell) => [tag, {}, ...inline(cell, depth)])];
  const rows = [];
  let at = start + 2;
  for (; at < lines.length && lines[at].trim() && lines[at].includes("|"); at += 1) rows.push(row(lines[at], "td"));
  return [["table", {}, ["thead", {}, row(lines[start], "th")], ["tbody", {}, ...rows]], at];
}

// Each begins with what tells it apart, and none can take more than linear time: no part of one overlaps its neighbor.
const SPANS = [
  [/^\\([!-/:-@[-`{-~])/, (m) => m[1]],
  [/^(`+)(?!`)([^]*?[^`])\1(?!`)/, (m) => ["code", {}, m[2].replace(/\n/g, " ").replace(/^ (.*\S.*) $/, "$1")]],
  [/^!?\[([^[\]]{0,500})\]\(\s*([^\s()<>]{1,2000})(?:\s+"[^"]{0,200}")?\s*\)/, (m, depth) => link(m[2], inline(m[1], depth + 1), m[0])],
  [/^<(https?:\/\/[^\s<>]{1,2000})>/, (m) => link(m[1], [m[1]], m[0])],
  [/^https?:\/\/[^\s<>()"'`*]{1,2000}[^\s<>()"'`*.,;:!?]/, (m) => link(m[0], [m[0]], m[0])],
  [/^\*\*(?=\S)([^]{0,2000}?\S)\*\*(?!\*)/, (m, depth) => ["strong", {}, ...inline(m[1], depth + 1)]],
  [/^__(?=\S)([^]{0,2000}?\S)__(?!\w)/, (m, depth) => ["strong", {}, ...inline(m[1], depth + 1)]],
  [/^~~(?=\S)([^]{0,2000}?\S)~~/, (m, depth) => ["del", {}, ...inline(m[1], depth + 1)]],
  [/^\*(?=[^\s*])([^]{0,2000}?[^\s*])\*(?!\*)/, (m, depth) => ["em", {}, ...inline(m[1], depth + 1)]],
  [/^_(?=[^\s_])([^]{0,2000}?[^\s_])_(?!\w)/, (m, depth) => ["em", {}, ...inline(m[1], depth + 1)]],
  [/^(?: {2,}|\\)\n/, () => ["br", {}]],
];

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
    const next = text.slice(at).search(/[\\`![<*_~ h]/);
    if (next < 0) break;
    plain += text.slice(at, at + next);
    at += next;
    const rest = text.slice(at, at + 5000);
    const isWithinWord = /[\p{L}\p{N}]$/u.test(plain) && (rest[0] === "_" || rest[0] === "h");
    const hit = isWithinWord ? null : firstSpan(rest, depth);
    if (hit === null) {
      plain += text[at];
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

function firstSpan(rest, depth) {
  for (const [form, make] of SPANS) {
    const found = form.exec(rest);
    if (found) return [found[0].length, make(found, depth)];
  }
  return null;
}

function link(address, children, source) {
  // Others, javascript: above all, would run in this page. An image is a link too: none is loaded from elsewhere.
  return /^(https?:\/\/|mailto:)/i.test(address) ? ["a", { href: address }, ...children] : source;
}

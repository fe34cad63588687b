// Highlights code by what most languages share: comments, strings, numbers, keywords. Code is drawn as it is streamed.

const WORDS = new Set((
  "abstract alias and as assert async await begin break case catch class const constexpr continue crate def default defer del do echo elif " +
  "else elsif end enum esac except export extends extern fi final finally fn for foreach from func function global go goto if impl " +
  "implements import in inline instanceof interface is lambda let local loop match mod module mut namespace new nonlocal not of or " +
  "override package pass private proc protected pub public raise readonly ref require return select static struct super switch template " +
  "then throw throws trait try type typedef typename typeof union unless unsafe until use using val var virtual void when where while with " +
  "yield SELECT FROM WHERE JOIN LEFT INNER OUTER ON GROUP BY ORDER HAVING LIMIT INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE INDEX " +
  "DROP ALTER AND OR NOT AS IN IS DISTINCT UNION CASE WHEN THEN ELSE END PRIMARY KEY"
).split(" "));
const VALUES = new Set("true false null nil None True False undefined NaN NULL self this".split(" "));

const names = (text) => new Set(text.split(" "));
const PLAIN = names("text txt plain plaintext output console log csv markdown md diff");
const HASH = names("python py python3 bash sh shell zsh fish yaml yml toml ruby rb r perl pl dockerfile makefile make ini conf elixir julia nim powershell");
const DASHES = names("sql lua haskell hs elm ada");
const MARKUP = names("html xml svg vue markdown");
const QUOTED = names("rust rs c cpp c++ cc h hpp java kotlin kt swift go csharp cs scala zig");

// Returns a regular expression that finds the parts of a language's code; null: no highlighting.
function form(language) {
  const name = language.toLowerCase();
  if (!name || PLAIN.has(name)) return null;
  let comment = "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
  if (HASH.has(name)) comment = "#[^\\n]*";
  if (DASHES.has(name)) comment = "--[^\\n]*";
  if (MARKUP.has(name)) comment = "<!--[^]*?(?:-->|$)";
  const tick = QUOTED.has(name) ? "'(?:[^'\\\\\\n]|\\\\[^\\n]{1,8})'" : "'(?:[^'\\\\\\n]|\\\\.)*'?";
  const text = `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|${tick}|\`(?:[^\`\\\\]|\\\\[^])*\`?`;
  return new RegExp(`(${comment})|(${text})|(\\b\\d[\\w.]*)|([A-Za-z_$][\\w$]*)(\\()?`, "g");
}

const KINDS = ["", "c-comment", "c-text", "c-number"]; // by the index of the matching group

// Returns code as parts, each with its CSS class or none.
export function parts(code, language) {
  const pattern = form(language);
  if (pattern === null) return code ? [["", code]] : [];
  const found = [];
  let end = 0;
  for (const hit of code.matchAll(pattern)) {
    const word = hit[4];
    let name = word === undefined ? KINDS[hit.indexOf(hit[0], 1)] : "";
    if (word !== undefined && WORDS.has(word)) name = "c-word";
    else if (word !== undefined && VALUES.has(word)) name = "c-number";
    else if (hit[5]) name = "c-call";
    if (!name) continue;
    if (hit.index > end) found.push(["", code.slice(end, hit.index)]);
    const text = word ?? hit[0];
    found.push([name, text]);
    end = hit.index + text.length;
  }
  if (end < code.length) found.push(["", code.slice(end)]);
  return found;
}

// Browsers lay out a whole block again when something is appended: long code is split into blocks of this many lines.
const LINES = 40;
const NOTHING = { start: 0, node: null, lines: 0 };

// Shows code that grows. The last part may change with what follows; earlier parts are final.
export class CodeText {
  #target;
  #language;
  #last = NOTHING;
  #lines = 0; // number of lines of the last block

  constructor(target, language, text) {
    this.#target = target;
    this.#language = language;
    this.text = "";
    this.show(text);
  }

  show(text) {
    if (!text.startsWith(this.text)) {
      this.#target.replaceChildren();
      this.#last = NOTHING;
    }
    if (!this.#target.firstChild) this.#newBlock();
    this.#last.node?.remove();
    let { start } = this.#last;
    this.#lines = this.#last.lines;
    for (const [name, part] of parts(text.slice(start), this.#language)) {
      this.#add(name, part, start);
      start += part.length;
    }
    this.text = text;
  }

  #add(name, part, start) {
    const lines = name ? [] : part.split("\n");
    let before = this.#lines;
    let rest = part;
    // Split only between two nonempty lines: a block does not show an empty line at its end.
    for (let place = 0; place + 1 < lines.length; place += 1) {
      this.#lines += 1;
      const isAfterText = lines[place].trim() || (place === 0 && this.#target.lastChild.textContent.at(-1)?.trim());
      if (this.#lines < LINES || !isAfterText) continue;
      const tail = lines.slice(place + 1).join("\n");
      const head = rest.slice(0, rest.length - tail.length - 1);
      if (head) this.#target.lastChild.append(head);
      this.#newBlock();
      before = 0;
      rest = tail;
    }
    const node = name ? document.createElement("span") : document.createTextNode(rest);
    if (name) {
      node.className = name;
      node.append(part);
    }
    this.#target.lastChild.append(node);
    this.#last = { start: start + part.length - rest.length, node, lines: before };
  }

  #newBlock() {
    const block = document.createElement("span");
    block.className = "lines";
    this.#target.append(block);
    this.#lines = 0;
  }
}

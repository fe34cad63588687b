// Creates elements. Text always becomes text nodes, so that no output of a model is interpreted as markup.

export const at = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
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

export function button(attributes, ...children) {
  return element("button", { type: "button", ...attributes }, ...children);
}

export function copyButton(text, label) {
  const word = document.createTextNode("Copy");
  const made = button({ class: "small", "aria-label": label }, icon("copy"), word);
  made.addEventListener("click", async () => {
    word.data = (await copy(text())) ? "Copied" : "Not copied";
    say(word.data);
    setTimeout(() => { word.data = "Copy"; }, 1500);
  });
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // navigator.clipboard is missing on pages loaded over plain HTTP from another machine.
    const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}

// Announces an event to screen readers.
export function say(text) {
  at("said").textContent = text.length > 2000 ? `${text.slice(0, 2000)} …` : text;
}

export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// Asks for confirmation in a dialog, and returns the answer.
export function confirmed(title, text, yes) {
  const dialog = at("confirm");
  at("confirm-title").textContent = title;
  at("confirm-text").textContent = text;
  at("confirm-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

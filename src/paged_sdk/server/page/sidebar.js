// The sidebar with the list of conversations: open, rename, export, delete.

import { wire } from "./chat.js";
import { at, button, confirmed, element, icon, save } from "./dom.js";

export const titleOf = (conversation) => conversation.title || "New conversation";

// `actions`: open(conversation), begin(), keep(conversation), forget(conversation), opened() returns the open one,
// all() returns them all.
export class Sidebar {
  #actions;
  #chosen = null; // the conversation of the open menu
  #renamed = null;

  constructor(actions) {
    this.#actions = actions;
    at("new").addEventListener("click", () => actions.begin());
    at("side-open").addEventListener("click", () => this.#toggle(true));
    at("side-close").addEventListener("click", () => this.hide());
    at("shade").addEventListener("click", () => this.hide());
    at("find").addEventListener("input", () => this.draw());
    for (const [id, action] of Object.entries(this.#menu())) {
      at(id).addEventListener("click", () => {
        const conversation = this.#chosen;
        at("menu").hidePopover();
        action(conversation);
      });
    }
    at("menu").addEventListener("keydown", moveInMenu);
  }

  get isShown() {
    return at("side").classList.contains("is-shown");
  }

  hide() {
    const hadIt = this.isShown;
    this.#toggle(false);
    if (hadIt) at("side-open").focus();
  }

  // On small screens the sidebar covers the rest of the page, which is inert meanwhile.
  #toggle(isShown) {
    at("side").classList.toggle("is-shown", isShown);
    at("shade").hidden = !isShown;
    at("main").inert = isShown;
    at("side-open").setAttribute("aria-expanded", String(isShown));
    if (isShown) at("new").focus();
  }

  draw() {
    if (this.#renamed && at("list").querySelector(".rename")) return; // redrawing would lose the typed text
    const wanted = at("find").value.trim().toLowerCase();
    const all = this.#actions.all();
    const found = wanted ? all.filter((each) => contains(each, wanted)) : all;
    at("find").hidden = all.length < 6 && !wanted;
    const lines = [];
    let last = "";
    for (const conversation of found) {
      const day = dayOf(conversation.changed);
      if (day !== last) lines.push(element("li", { class: "day" }, day));
      last = day;
      lines.push(this.#line(conversation));
    }
    if (wanted && !found.length) lines.push(element("li", { class: "day" }, "Nothing found"));
    at("list").replaceChildren(...lines);
  }

  #line(conversation) {
    const isOpen = conversation === this.#actions.opened();
    const title = titleOf(conversation);
    if (conversation === this.#renamed) return element("li", { class: "is-open" }, this.#field(conversation));
    const open = button({ class: "open", dir: "auto", title, "aria-current": isOpen && "true", onclick: () => this.#actions.open(conversation) }, element("span", {}, title));
    const more = button({ class: "icon more", "aria-label": `More about ${title}`, "aria-haspopup": "menu" }, icon("more"));
    more.addEventListener("click", () => this.#showMenu(conversation, more));
    return element("li", { class: isOpen ? "is-open" : "" }, open, more);
  }

  #showMenu(conversation, beside) {
    this.#chosen = conversation;
    const menu = at("menu");
    menu.showPopover({ source: beside });
    const place = beside.getBoundingClientRect();
    menu.style.left = `${Math.min(place.left, innerWidth - menu.offsetWidth - 8)}px`;
    menu.style.top = `${Math.min(place.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
    menu.querySelector("button").focus();
  }

  #menu() {
    return {
      "menu-rename": (conversation) => this.#rename(conversation),
      "menu-markdown": (conversation) => save(`${fileName(conversation)}.md`, "text/markdown", asMarkdown(conversation)),
      "menu-json": (conversation) => save(`${fileName(conversation)}.json`, "application/json", asJson(conversation)),
      "menu-delete": async (conversation) => {
        if (await confirmed("Delete this conversation?", `“${titleOf(conversation)}” is gone then, with its images.`, "Delete")) {
          this.#actions.forget(conversation);
        }
      },
    };
  }

  #rename(conversation) {
    this.#renamed = conversation;
    this.draw();
  }

  #field(conversation) {
    const field = element("input", { class: "rename", "aria-label": "Name of the conversation", dir: "auto", maxlength: "120" });
    field.value = titleOf(conversation);
    const leave = (isKept) => {
      if (this.#renamed !== conversation) return;
      this.#renamed = null;
      const title = field.value.trim();
      if (isKept && title) {
        conversation.title = title;
        this.#actions.keep(conversation);
      }
      this.draw();
      [...at("list").querySelectorAll(".open")].find((each) => each.title === titleOf(conversation))?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // otherwise the key press would activate the newly focused element
      event.stopPropagation();
      leave(event.key === "Enter");
    });
    field.addEventListener("blur", () => leave(true));
    queueMicrotask(() => {
      field.focus();
      field.select();
    });
    return field;
  }
}

function moveInMenu(event) {
  const items = [...at("menu").querySelectorAll("button")];
  const here = items.indexOf(document.activeElement);
  const next = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: -1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  items.at(next % items.length).focus();
}

function contains(conversation, wanted) {
  const texts = [titleOf(conversation), ...conversation.messages.map((message) => message.content)];
  return texts.some((text) => text.toLowerCase().includes(wanted));
}

function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - 86_400_000) return "Yesterday";
  return time >= midnight - 7 * 86_400_000 ? "Last seven days" : "Earlier";
}

function fileName(conversation) {
  return titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
}

export function asMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  if (conversation.settings.system) parts.push(`> ${conversation.settings.system.replaceAll("\n", "\n> ")}`);
  for (const message of conversation.messages) {
    const who = { user: "You", tool: "Result of a tool" }[message.role] ?? (message.model || "The model");
    parts.push(`**${who}**`);
    if (message.images?.length) parts.push(`*${message.images.length} image${message.images.length > 1 ? "s" : ""}*`);
    if (message.content) parts.push(message.content);
    for (const call of message.calls ?? []) parts.push(`\`${call.name}\`\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return `${parts.join("\n\n")}\n`;
}

// Exports messages in the form of OpenAI's API.
export function asJson({ title, settings, messages }) {
  const { system, tools, ...sampling } = settings;
  const said = wire(messages);
  if (system) said.unshift({ role: "system", content: system });
  return `${JSON.stringify({ title, messages: said, tools, sampling }, null, 2)}\n`;
}

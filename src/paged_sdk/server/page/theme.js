// Light or dark theme: the system's, unless the button overrides it.

import { at } from "./dom.js";
import { remember, remembered } from "./store.js";

const THEMES = ["system", "light", "dark"];
const ICONS = { system: "#i-half", light: "#i-sun", dark: "#i-moon" };

export function followTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let said = THEMES.includes(remembered("theme")) ? remembered("theme") : "system";
  const apply = () => {
    document.documentElement.dataset.theme = said === "system" ? (dark.matches ? "dark" : "light") : said;
    at("theme").setAttribute("aria-label", `Colors: ${said}. Change them`);
    at("theme").title = `Colors: ${said}`;
    at("theme").querySelector("use").setAttribute("href", ICONS[said]);
  };
  dark.addEventListener("change", apply);
  at("theme").addEventListener("click", () => {
    said = THEMES[(THEMES.indexOf(said) + 1) % THEMES.length];
    remember("theme", said);
    apply();
  });
  apply();
}

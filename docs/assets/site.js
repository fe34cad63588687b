// What the theme leaves out for screen readers and keyboards: a name of the search, and tables that can be scrolled.
"use strict";

addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) wrap.tabIndex = 0;
});

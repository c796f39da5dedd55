// What the theme leaves to be desired for a keyboard and a screen reader.
// Names of the navigations: with index pages the theme's own labels of sections are empty, and two have one name.
document.querySelector(".md-path")?.setAttribute("aria-label", "Path of this page");
for (const section of document.querySelectorAll(".md-nav[aria-labelledby]")) {
  section.setAttribute("aria-label", section.querySelector(".md-nav__title").textContent.trim());
  section.removeAttribute("aria-labelledby");
}
// What scrolls to the side can be reached by keyboard; the buttons of a block of code, which come later, are no landmark.
const reach = () => {
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.setAttribute("role", "none");
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .arithmatex, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth && box.clientWidth) box.tabIndex = 0;
  }
};
addEventListener("load", reach);
addEventListener("resize", reach);
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });

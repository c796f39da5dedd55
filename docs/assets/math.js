// Formulas by the bundled KaTeX, which is loaded on pages that have one.
const formulas = document.querySelectorAll(".arithmatex");
if (formulas.length) {
  const folder = new URL("katex/", document.currentScript.src);
  const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("katex.min.css", folder) });
  const script = Object.assign(document.createElement("script"), { src: new URL("katex.min.js", folder) });
  script.onload = () => {
    for (const formula of formulas) {
      const source = formula.textContent.trim();
      katex.render(source.slice(2, -2), formula, { displayMode: source.startsWith("\\["), throwOnError: false });
    }
  };
  document.head.append(style, script);
}

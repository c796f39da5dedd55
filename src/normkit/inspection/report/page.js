// Makes the tables sortable, opens every section for print, and gives the data as a file. The page is whole without it.
"use strict";

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const descending = heading.ariaSort === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.ariaSort = descending ? "descending" : "ascending";
      const rows = [...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column]));
      body.append(...(descending ? rows.reverse() : rows));
    });
  });
}

function compare(a, b) {
  const [left, right] = [a, b].map((cell) => Number.parseFloat(cell.textContent.replace(/[<>,]/g, "")));
  // Cells without a number, NaN among them, come last.
  if (a.cellIndex && !a.classList.contains("word")) return (Number.isNaN(left) - Number.isNaN(right)) || left - right;
  return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
}

let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const part of closed) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of closed) part.open = false;
});

const data = document.getElementById("inspection");
if (data && "DecompressionStream" in globalThis) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Save as JSON";
  button.addEventListener("click", async () => {
    const bytes = Uint8Array.from(atob(data.textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await new Response(stream).blob());
    link.download = "inspection.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });
  document.getElementById("data").append(" ", button);
}

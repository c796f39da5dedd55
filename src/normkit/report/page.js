// Makes the tables sortable: a button in every column heading. The page is whole without it.
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
  const [left, right] = [Number(a.dataset.value), Number(b.dataset.value)];
  // Cells without a number, NaN among them, come last.
  if (a.dataset.value !== undefined) return (Number.isNaN(left) - Number.isNaN(right)) || left - right;
  return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
}

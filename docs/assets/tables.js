// A long table gets a field that leaves only the rows with what is typed.
for (const table of document.querySelectorAll("article table")) {
  const rows = [...table.tBodies[0]?.rows ?? []];
  if (rows.length < 16) continue;
  const field = Object.assign(document.createElement("input"), { type: "search", className: "filter" });
  field.placeholder = `Filter ${rows.length} rows`;
  field.setAttribute("aria-label", "Filter the rows of the table below");
  const contents = rows.map((row) => row.textContent.toLowerCase());
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    rows.forEach((row, place) => { row.hidden = !words.every((word) => contents[place].includes(word)); });
  });
  (table.closest(".md-typeset__scrollwrap") ?? table).before(field);
}

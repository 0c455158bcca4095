// Sort a table's body by the clicked column, first ascending, then descending; empty cells stay last.
document.querySelectorAll("table.sortable").forEach(table => {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const rising = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.value;
    const compare = (a, b) => {
      if (!column) return (rising ? 1 : -1) * a.cells[0].textContent.localeCompare(b.cells[0].textContent);
      if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === "");
      return (rising ? 1 : -1) * (value(a) - value(b));
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }));
});

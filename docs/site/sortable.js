// A click on the head of a column sorts a table of figures: numbers by value ("80.5 ± 1.2" by 80.5), the rest by name.
{
  const value = (row, column) => row.cells[column]?.textContent.trim() ?? "";
  const number = (text) => parseFloat(text.replace(/[,*†]/g, ""));

  const sort = (table, column, falling) => {
    const body = table.tBodies[0];
    const order = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      const [m, n] = [number(x), number(y)];
      if (isNaN(m) !== isNaN(n)) return isNaN(m) ? 1 : -1; // what has no figure stays below
      return (isNaN(m) ? x.localeCompare(y) : m - n) * (falling ? -1 : 1);
    };
    [...body.rows].sort(order).forEach((row) => body.append(row));
  };

  document.querySelectorAll("article table").forEach((table) => {
    const rows = table.tBodies[0]?.rows ?? [];
    if (!table.tHead || rows.length < 3) return;
    if ([...rows[0].cells].filter((cell) => !isNaN(number(cell.textContent))).length < 2) return;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const figures = !isNaN(number(value(rows[0], column)));
        const falling = head.ariaSort ? head.ariaSort === "ascending" : figures;
        [...head.parentNode.cells].forEach((other) => other.removeAttribute("aria-sort"));
        head.ariaSort = falling ? "descending" : "ascending";
        sort(table, column, falling);
      });
    });
  });
}

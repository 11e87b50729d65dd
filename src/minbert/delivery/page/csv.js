// Rows as a CSV file that spreadsheets read without running anything in it.

/** A text in quotes. One that a spreadsheet would take for a formula is led by an apostrophe. */
function quoted(value) {
  if (typeof value === "number") return String(Number(value.toFixed(6)));
  const text = /^[\s]*[=+\-@]|^[\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}

export function csv(header, rows) {
  const lines = [header, ...rows].map((row) => row.map((value) => (value === null ? "" : quoted(value))).join(","));
  return `\uFEFF${lines.join("\r\n")}\r\n`; // the mark tells spreadsheets that it is UTF-8
}

export function download(name, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "text/csv;charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

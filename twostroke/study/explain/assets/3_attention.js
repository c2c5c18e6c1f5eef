// The attention matrix: every layer in small, one in large, and a cell's arithmetic.
const seen = { map: null, row: null, column: null };
const attention = made.attention, starts = attention.starts;
const cellEnd = (i) => (i + 1 < starts.length ? starts[i + 1] : made.tokens.length);
const everyLayer = made.model.recurrent ? "Every layer with attention" : "Every layer";
const exact = starts.length === made.tokens.length;
const shownFirst = attention.head === null ? attention.layers.find((one) => one.layer === attention.layer) : attention.heads[attention.head];

const mapName = (map) => `layer ${map.layer}, ${map.head === null ? "mean over heads" : `head ${map.head}`}`;
const cellName = (i) => (exact ? visible(made.tokens[i].text) : `${starts[i]}–${cellEnd(i) - 1}`);
// Weights span orders of magnitude: the square root shows small ones too. Where the first token is a sink, they are
// relative to the largest of the others.
function shadesOf({ weights }) {
  const sink = weights.reduce((sum, row) => sum + row[0], 0) / weights.length > 0.3;
  const scale = sink ? Math.max(1e-6, ...weights.slice(1).flatMap((row) => row.slice(1))) : 1;
  return (weight) => Math.min(1, Math.sqrt(weight / scale));
}

function attentionView() {
  seen.map = seen.map ?? shownFirst;
  const large = element("div"), below = panel(), status = element("p", { class: "soft", role: "status" });
  const smalls = [
    title(attention.layers.length > 1 ? everyLayer : "Mean over heads"), thumbnails(attention.layers, pick),
    attention.layers.length > 1 ? null : soft(`${everyLayer} has a map where the prompt has at most 256 tokens. For another one: --layer.`),
    title(`Heads of layer ${attention.layer}`), thumbnails(attention.heads, pick),
  ];

  function pick(map) {
    seen.map = map;
    status.replaceChildren();
    for (const button of document.querySelectorAll(".small button")) button.setAttribute("aria-pressed", button.dataset.name === mapName(map));
    large.replaceChildren(element("h3", {}, mapName(map)), grid(map, status, look));
    if (seen.row !== null) look(seen.row, seen.column);
  }
  function look(row, column) {
    seen.row = row, seen.column = column;
    below.replaceChildren(...arithmetic(seen.map, row, column, pick));
  }
  below.append(soft("Click a cell, or move with the arrow keys and press Enter: its arithmetic appears here. Escape closes it."));
  below.addEventListener("close", () => {
    seen.row = seen.column = null;
    below.replaceChildren(soft("Click a cell to see its arithmetic."));
  });
  setTimeout(() => pick(seen.map));
  return [
    paragraph("Each token's query is multiplied with the key of every token before it, and with its own. Softmax makes weights of the scores. A row shows where its token looks; its weights add up to 1."),
    exact ? null : soft(`The prompt is long, so a cell joins ${count(cellEnd(0))} × ${count(cellEnd(0))} tokens: the sum over its columns, the mean over its rows.`),
    large, status, below, ...smalls,
    soft("Many heads give most weight to the first token. It is an attention sink: a place to look where there is nothing to find (Xiao et al. 2023). In such a map, colours are relative to the largest of the other weights."),
  ];
}

function grid(map, status, look) {
  const shade = shadesOf(map);
  const size = `${Math.max(0.45, Math.min(1.9, 34 / starts.length))}rem`;
  const cells = map.weights.map((row, i) => row.map((weight, j) =>
    element("td", {
      tabindex: -1, role: "gridcell", style: { "--weight": shade(weight) },
      "aria-label": `${cellName(i)} to ${cellName(j)}: ${weight.toFixed(3)}`,
      on: { click: () => choose(i, j), mouseenter: () => point(i, j), focus: () => point(i, j) },
    })));
  const rows = cells.map((line, i) => element("tr", { role: "row" }, element("th", { scope: "row", role: "rowheader" }, cellName(i)), line));
  const names = cells.map((_, j) => element("th", { scope: "col", role: "columnheader" }, cellName(j)));
  const columns = element("tfoot", {}, element("tr", { role: "row" }, element("td", { role: "gridcell", class: "none" }), names));
  const node = element("table", { class: "map", role: "grid", style: { "--cell": size }, "aria-label": `Attention, ${mapName(map)}` }, element("tbody", {}, rows), columns);

  function point(i, j) {
    cells.forEach((line, row) => line.forEach((cell, column) => cell.classList.toggle("cross", (row === i) !== (column === j))));
    status.replaceChildren(quoted(cellName(i)), " gives ", quoted(cellName(j)), ` ${percent(map.weights[i][j])} of its attention`);
    if (exact) light(i, j);
  }
  function choose(i, j) {
    for (const cell of cells.flat()) cell.setAttribute("aria-selected", cell === cells[i][j]), (cell.tabIndex = cell === cells[i][j] ? 0 : -1);
    look(i, j);
  }
  node.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const at = cells.flatMap((line, i) => line.map((cell, j) => [cell, i, j])).find(([cell]) => cell === document.activeElement);
    if (!at) return;
    if (event.key === "Enter" || event.key === " ") choose(at[1], at[2]), event.preventDefault();
    if (!move) return;
    event.preventDefault(), event.stopPropagation();
    cells[at[1] + move[0]]?.[at[2] + move[1]]?.focus();
  });
  const [row, column] = seen.row === null ? [cells.length - 1, 0] : [seen.row, seen.column];
  cells[row][column].tabIndex = 0;
  if (seen.row !== null) cells[row][column].setAttribute("aria-selected", true);
  return element("div", { class: "scroll" }, node);
}

function thumbnails(maps, pick) {
  return element("div", { class: "small" }, maps.map((map) => {
    const shade = shadesOf(map);
    const canvas = element("canvas", { width: starts.length, height: starts.length, "aria-hidden": true });
    const draw = () => {
      const paint = canvas.getContext("2d"), colour = getComputedStyle(document.body).getPropertyValue("--one");
      paint.clearRect(0, 0, starts.length, starts.length);
      paint.fillStyle = colour;
      map.weights.forEach((row, i) => row.forEach((weight, j) => ((paint.globalAlpha = shade(weight)), paint.fillRect(j, i, 1, 1))));
    };
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    return element("button", { type: "button", "data-name": mapName(map), "aria-pressed": map === seen.map, "aria-label": mapName(map), on: { click: () => pick(map) } }, canvas, map.head === null ? `layer ${map.layer}` : `head ${map.head}`);
  }));
}

// From a weight back to the products that made it.
function arithmetic(map, row, column, pick) {
  const back = element("button", { type: "button", on: { click: (event) => event.target.closest(".panel").dispatchEvent(new Event("close")) } }, "Back to the overview");
  const heading = paragraph(quoted(cellName(row)), " looks at ", quoted(cellName(column)), `: weight ${number(map.weights[row][column])} in ${mapName(map)}. `, back);
  const numbers = attention.arithmetic;
  if (!numbers) return [heading, soft("Single scores are kept for prompts of at most 64 tokens.")];
  if (map.layer !== attention.layer) return [heading, soft(`Single scores are kept of layer ${attention.layer}: make the page with --layer ${map.layer} to see those of this layer.`)];
  if (map.head === null) {
    const rows = attention.heads.map((one) => [`head ${one.head}`, number(one.weights[row][column]), bar(one.weights[row][column])]);
    const total = attention.heads.reduce((sum, one) => sum + one.weights[row][column], 0);
    return [heading, paragraph(`It is the mean of ${attention.heads.length} heads: ${number(total)} / ${attention.heads.length} = ${number(total / attention.heads.length)}. Choose a head to go on.`),
      table(["head", ">weight", ""], rows, (head) => pick(attention.heads[head]))];
  }
  const query = numbers.queries[row][map.head], shared = attention.heads.length / numbers.keys[0].length;
  const key = numbers.keys[column][Math.floor(map.head / shared)], scores = numbers.scores[map.head][row];
  const products = query.map((q, d) => q * key[d]), sum = products.reduce((a, b) => a + b, 0);
  const known = scores.filter((score) => score !== null), largest = Math.max(...known);
  const powers = scores.map((score) => (score === null ? 0 : Math.exp(score - largest)));
  const total = powers.reduce((a, b) => a + b, 0), most = Math.max(...products.map(Math.abs));
  const order = products.map((_, d) => d).sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]));
  return [
    heading,
    paragraph(`1. The score: ${products.length} numbers of the query times ${products.length} of the key. The query has been multiplied with the scale ${number(attention.scale)}${shared > 1 ? `; ${shared} heads share this key` : ""}.`),
    table([">d", ">query", ">key", ">product", ""], order.slice(0, 6).map((d) => [d, number(query[d]), number(key[d]), number(products[d]), bar(Math.abs(products[d]) / most / 2, products[d] < 0 ? "two" : "")])),
    paragraph(`The six largest of ${products.length}. All of them add up to `, element("b", {}, number(sum)), scores[column] === null ? ", but the entry is outside of the layer's window." : `; the engine's score is ${number(scores[column])}.`),
    paragraph("2. Softmax: each score minus the row's largest, as a power of e, divided by the sum."),
    table(["entry", ">score", ">exp(score − largest)", ">weight", ""], scores.map((score, j) => [quoted(cellName(j)), number(score), number(powers[j]), number(powers[j] / total), bar(powers[j] / total, j === column ? "two" : "")]), (j) => { seen.column = j; pick(map); }, column),
    paragraph(`exp(${number(scores[column])} − ${number(largest)}) / ${number(total)} = `, element("b", {}, number(powers[column] / total)), `; the engine's weight is ${number(map.weights[row][column])}.`),
  ];
}

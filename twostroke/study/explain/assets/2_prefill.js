// Tokens, embedding and the shapes of a prefill.
function tokensView() {
  const rows = made.tokens.map((token) => [count(token.index), count(token.id), quoted(token.text)]);
  return [
    paragraph("A model reads numbers. The tokenizer cuts the text into pieces that it knows, and each piece has a number, its id."),
    paragraph(`This prompt is ${count(made.tokens.length)} tokens of a vocabulary of ${count(made.model.vocabulary)}. A space belongs to the word behind it, and rare words are cut.`),
    table([">entry", ">id", "text"], rows, (i) => light(i)),
  ];
}

function embeddingView() {
  const [rows, hidden] = made.embedding.shape;
  const largest = Math.max(...made.embedding.values.flat().map(Math.abs));
  const lines = made.embedding.values.map((values, i) => [
    quoted(made.tokens[i].text),
    ...values.map((value) => [number(value), " ", bar(Math.abs(value) / largest / 6, value < 0 ? "two" : "")].flat()),
    "…",
  ]);
  return [
    paragraph(`Each id is looked up in a table: one row of ${count(hidden)} numbers for each token, the same wherever the token stands. They become an array of `, element("code", {}, `[${count(rows)}, ${count(hidden)}]`), "."),
    soft("The first six numbers of each row; orange is negative. Equal tokens have equal rows: only the layers tell them apart."),
    table(["token", ...made.embedding.values[0].map((_, i) => `>${i}`), ""], lines, (i) => light(i)),
  ];
}

function prefillView() {
  const { shapes, stored, work } = made.prefill, n = made.tokens.length;
  const detail = panel(soft("Choose a tensor to see its arithmetic."));
  const buttons = shapes.map((shape) => {
    const button = element("button", { type: "button", class: shape.stored ? "stored" : "", "aria-expanded": false, on: { click: () => {
      buttons.forEach((other) => other.setAttribute("aria-expanded", other === button));
      detail.replaceChildren(...shapeDetail(shape));
    } } }, element("b", {}, shape.name), element("br"), element("span", { class: "dims" }, `[${shape.dims.map(count).join(", ")}]`));
    return button;
  });
  const names = ["weights read", `${made.model.recurrent ? "K, V and states" : "K and V"} read`, "products of layers", "attention", "head"];
  const amounts = [work.weight_bytes, work.kv_bytes, work.linear_flops, work.attention_flops, work.head_flops];
  const longest = Math.max(...work.predicted_s, 1e-12);
  return [
    paragraph(`All ${count(n)} tokens go through the layers together. Here is layer ${made.prefill.layer} of ${made.model.layers}; the others have the same shapes unless their windows or experts differ${made.model.recurrent ? `, or they are recurrent (${made.model.recurrent} of them)` : ""}.`),
    element("div", { class: "flow" }, buttons), detail,
    title("What stays"),
    paragraph(`Only K and V (orange) stay: they are what later tokens look at. A token's Q is used once, by that token itself, so no cache keeps it.`),
    paragraph(`${stored.kinds.map((one) => `${one.layers} layers${one.window ? ` (the last ${count(one.window)} tokens)` : ""} × ${one.one_part ? 1 : 2} × ${one.kv_heads} KV heads × ${one.head_dim}`).join(" + ")} numbers of ${stored.dtype} = ${count(stored.entry_bytes)} bytes a token. ${count(stored.entries)} tokens: ${amount(stored.bytes, "B")}, ${stored.states ? "with states, " : ""}in ${plural(stored.pages, "page")} of ${stored.page_size} entries.`),
    stored.states && paragraph(`The recurrent layers (${stored.states.layers}) attend to nothing. In place of K and V each has a state of ${stored.states.heads} × ${stored.states.k_dim} × ${stored.states.v_dim} numbers, kept at every ${stored.states.chunk}th position (here ${plural(stored.states.snapshots, "snapshot")} of ${amount(stored.states.snapshot_bytes, "B")}), and rows of the ${plural(stored.states.rows, "token")} since (${count(stored.states.row_bytes)} bytes a token).`),
    title("What it costs"),
    table(["work", ">amount", ">predicted", ""], names.map((name, i) => [name, amount(amounts[i], i < 2 ? "B" : "FLOP"), ms(work.predicted_s[i]), bar(work.predicted_s[i] / longest, i < 2 ? "two" : "")])),
    paragraph(`${amount(work.flops, "FLOP")} over ${amount(work.bytes, "B")}: ${work.intensity.toFixed(1)} FLOPs for each byte read. Bound by ${work.bound}. The first token came after ${ms(made.prefill.seconds)}, in ${plural(made.prefill.steps, "step")}.`),
    soft("Predicted at prices that were fitted to a few timed steps of this model on the machine that made this page."),
  ];
}

function shapeDetail(shape) {
  const total = shape.dims.reduce((a, b) => a * b, 1), n = made.tokens.length;
  const lines = [
    paragraph(element("b", {}, shape.name), ` = ${shape.made}`),
    paragraph(`${shape.dims.map((size, i) => `${count(size)} ${shape.axes[i]}`).join(" × ")} = ${count(total)} numbers`),
  ];
  if (shape.name === "scores")
    lines.push(paragraph(`Of the ${count(n)} × ${count(n)} scores of a head, ${count(made.prefill.pairs)} count: no token sees a later one. They are never in memory together: each row is added up while the keys go by.`));
  if (shape.stored) lines.push(paragraph("It is written to the KV cache and read by every later step."));
  return lines;
}

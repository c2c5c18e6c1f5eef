// How the answer forms layer by layer, and the steps of the decode.
const layerName = (after) => (after === 0 ? "embedding" : `layer ${after - 1}`);
const chosen = { lens: made.lens.length - 1, token: 0, step: 0 };
// Every token of the answer, with its lens.
const answers = [
  { out: made.prefill.token, lens: made.lens, candidates: made.prefill.candidates },
  ...made.decode.map((step) => ({ out: step.token_out, lens: step.lens, candidates: step.candidates })),
];

function layersView() {
  const which = element("select", { on: { change: (event) => { chosen.token = Number(event.target.value); draw(); } } },
    answers.map((one, i) => element("option", { value: i }, `${i + 1}: ${visible(one.out.text)}`)));
  which.value = chosen.token;
  const list = element("div"), detail = panel();

  function draw() {
    const { lens, out } = answers[chosen.token];
    const rows = lens.map((one) => [layerName(one.layer), quoted(one.candidates[0].text), percent(one.candidates[0].probability), bar(one.candidates[0].probability, one.candidates[0].id === out.id ? "two" : ""), count(one.rank), percent(one.probability)]);
    list.replaceChildren(table(["after", "likeliest", ">probability", "", ">rank of the answer", ">its probability"], rows, (i) => { chosen.lens = i; draw(); }, chosen.lens));
    detail.replaceChildren(paragraph(`After ${layerName(chosen.lens)}:`), candidateTable(lens[chosen.lens].candidates, { ...out, probability: lens[chosen.lens].probability }));
  }
  draw();
  return [
    paragraph("The last row of the last layer is multiplied with the head: one score for each token of the vocabulary, and softmax makes probabilities. The same can be asked of the rows before: what would the answer be if the model ended here?"),
    soft("This is called the logit lens. The head was trained for the last layer, so early layers show a direction, not an opinion. Orange: the token that was sampled."),
    paragraph(element("label", {}, "Token of the answer ", which)),
    detail, list,
  ];
}

function decodeView() {
  if (!made.decode.length) return [paragraph("The first token, which the prefill gave, is the whole answer: no step followed.")];
  const list = element("div"), detail = panel();
  const most = made.decode.at(-1).after.entries;

  function draw() {
    const step = made.decode[chosen.step], n = made.tokens.length;
    const [[first, share]] = step.attends, sink = first === 0;
    const attends = sink ? step.attends.slice(1) : step.attends, largest = attends[0]?.[1] ?? 1;
    light(step.token_in.index, ...attends.slice(0, 3).map(([i]) => i));
    detail.replaceChildren(
      paragraph(quoted(step.token_in.text), ` goes in as entry ${step.token_in.index}. K and V of this one token are computed, and all ${count(step.after.entries)} entries are read. `, quoted(step.token_out.text), " comes out."),
      element("div", { class: "strip", role: "img", "aria-label": `${n} entries of the prompt, ${step.before.entries - n} of the answer, 1 new` },
        element("span", { class: "main", style: { width: `${(100 * n) / most}%` } }),
        element("span", { class: "student", style: { width: `${(100 * (step.before.entries - n)) / most}%` } }),
        element("span", { class: "draft", style: { width: `${100 / most}%` } })),
      soft(`The cache: prompt, answer so far, new. ${count(step.before.entries)} → ${count(step.after.entries)} entries, ${amount(step.after.bytes, "B")}, ${plural(step.after.pages, "page")}.`),
      table(["attends most to", ">weight", ""], attends.map(([i, weight]) => [quoted(entries[i].text), number(weight), bar(weight / largest / 2)]), (i) => light(attends[i][0])),
      ...(sink ? [soft(`Besides the first token, the sink, which has ${percent(share)}.`)] : []),
      candidateTable(step.candidates, step.token_out),
      paragraph(`${amount(step.work.flops, "FLOP")} over ${amount(step.work.bytes, "B")}: ${step.work.intensity.toFixed(1)} FLOPs a byte, bound by ${step.work.bound}. K and V are ${amount(step.work.kv_bytes, "B")} of what is read; the rest are weights, read for this one token.`));
    const rows = made.decode.map((one) => [count(one.token_in.index), quoted(one.token_in.text), quoted(one.token_out.text), percent(one.token_out.probability), `${count(one.before.entries)} → ${count(one.after.entries)}`, amount(one.work.bytes, "B"), ms(one.seconds)]);
    list.replaceChildren(table([">entry", "in", "out", ">probability", ">cache", ">read", ">time"], rows, (i) => { chosen.step = i; draw(); }, chosen.step));
  }
  draw();
  return [
    paragraph("Prefill gave the first token. From here on each step enters one token, reads the cache, and gives the next one."),
    detail, list,
    soft(made.timed_alike ? "Times are those of a plain request that nobody watched. It made the same tokens." : "Times are those of a plain request; this backend is not exact, and it made other tokens."),
    paragraph("The answer: ", element("q", {}, visible(made.text))),
  ];
}

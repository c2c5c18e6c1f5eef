// With and without the cache, and what a technique does to it.
function chart(one, other, text) {
  const most = Math.max(...one, ...other, 1e-12);
  return element("div", { class: "chart", role: "img", "aria-label": text }, one.map((value, i) =>
    element("div", { title: `step ${i + 1}: ${value.toPrecision(3)} and ${(other[i] ?? 0).toPrecision(3)}` },
      element("span", { class: "bar two", style: { height: `${(100 * value) / most}%` } }),
      element("span", { class: "bar", style: { height: `${(100 * (other[i] ?? 0)) / most}%` } }))));
}

function waysView() {
  const { prompt: p, steps: g, naive, cached, ratio } = made.both_ways;
  const computed = naive.tokens.map((_, i) => p + i), one = naive.tokens.map((_, i) => (i ? 1 : p));
  const times = (way) => way.seconds.map((seconds) => 1e3 * seconds);
  return [
    paragraph("K and V of a token depend on that token and those before it, never on later ones. So computing them again gives the same numbers. Here the first tokens of the answer were made both ways, in the same engine."),
    table(["", ">K and V computed", ">by the formula", "formula"], [
      ["without the cache", `${count(naive.computed)} tokens`, count(made.both_ways.naive_formula), `g p + g (g − 1) / 2 = ${g} × ${p} + ${g} × ${g - 1} / 2`],
      ["with it", `${count(cached.computed)} tokens`, count(made.both_ways.cached_formula), `p + g − 1 = ${p} + ${g} − 1`]]),
    paragraph(`${ratio.toFixed(1)} times as much. The usual estimate, (g p + g² / 2) / (p + g), says ${made.both_ways.usual_ratio.toFixed(1)}: it also counts the last token, which no step enters. ${made.both_ways.same_tokens ? "Both made the same tokens" : "They made other tokens"}; K and V are ${made.both_ways.largest_difference === 0 ? "the same bits" : `equal up to ${made.both_ways.largest_difference.toPrecision(2)}`}.`),
    title("Tokens computed in each step"), chart(computed, one, "Tokens computed in each step, without and with the cache"),
    title("Milliseconds of each step"), chart(times(naive), times(cached), "Milliseconds of each step, without and with the cache"),
    table([">step", ">without: tokens", ">ms", ">with: tokens", ">ms"], naive.tokens.map((_, i) => [i + 1, count(computed[i]), times(naive)[i].toFixed(1), count(one[i]), times(cached)[i]?.toFixed(1) ?? "–"])),
    soft("Orange: without. Blue: with. The first step of both is the prefill."),
  ];
}

function strip(stroke, width) {
  const node = element("div", { class: "strip" });
  let at = 0;
  const parts = [...stroke.given.map((one) => [one, ""]), ...stroke.made.map((one) => [one, ""]), ...stroke.dropped.map((one) => [one, "dropped"])];
  const covered = new Set();
  const runs = [];
  for (const [one, kind] of parts)
    for (let position = one.start; position < one.stop; position++) {
      if (covered.has(position)) continue;
      covered.add(position);
      runs.push([position, kind || one.owner]);
    }
  runs.sort((a, b) => a[0] - b[0]);
  const spans = [];
  for (const [position, kind] of runs) {
    const last = spans.at(-1);
    if (last && last.kind === kind && last.stop === position) last.stop++;
    else spans.push({ kind, start: position, stop: position + 1 });
  }
  for (const { kind, start, stop } of spans) {
    if (start > at) node.append(element("span", { style: { width: `${(100 * (start - at)) / width}%` } }));
    const owner = ["main", "student", "draft", "dropped"].includes(kind) ? kind : "main";
    node.append(element("span", { class: owner, title: `${kind}: positions ${start} to ${stop - 1}`, style: { width: `${(100 * (stop - start)) / width}%` } }));
    at = stop;
  }
  return node;
}

function methodView() {
  const { strokes } = made.method, all = strokes.flatMap((one) => [...one.given, ...one.made, ...one.dropped]);
  const width = Math.max(1, ...all.map((one) => one.stop)), size = (list) => list.reduce((sum, one) => sum + one.stop - one.start, 0);
  const facts = Object.entries(made.method.facts).map(([name, value]) => `${name.replaceAll("_", " ")} ${Array.isArray(value) ? value.join(", ") || "none" : value}`);
  return [
    paragraph(`The technique `, element("b", {}, made.method.method), ` is a program of strokes over values. Each bar is a KV cache by position: what the stroke was given, what it made, and what was left out before it.`),
    paragraph(...["main", "student", "draft", "dropped"].flatMap((kind) => [element("span", { class: `bar ${kind}`, style: { width: "1.2em" } }), kind === "dropped" ? " left out " : ` ${kind}'s entries  `])),
    ...strokes.map((stroke) => panel(
      paragraph(element("b", {}, `${stroke.stroke}, ${stroke.model}`), `: given ${count(size(stroke.given))}, made ${count(size(stroke.made))}${size(stroke.dropped) ? `, left out ${count(size(stroke.dropped))}` : ""}; the next position is ${count(stroke.next_position)}`),
      strip(stroke, width),
      stroke.guesses.length ? paragraph("Guesses: ", ...stroke.guesses.map((one) => element("span", { class: `token ${one.kept ? "kept" : "wrong"}` }, visible(one.token.text)))) : null,
      stroke.stroke === "decode" ? paragraph("Sampled: ", ...stroke.tokens.map((one) => quoted(one.text))) : null)),
    paragraph(`At the end: ${count(made.method.entries)} entries. The plain request would hold ${count(made.method.plain_entries)}. ${facts.join("; ")}`),
    paragraph("Its answer: ", element("q", {}, visible(made.method.text))),
  ];
}

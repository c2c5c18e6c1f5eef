// The engine at work: reads the server's feed while the page is seen, and shows it.

import { call, events, ofModel, reason } from "./api.js";
import { bars, barsIn, sparkline } from "./draw.js";
import { byId, el, oncePerFrame } from "./dom.js";
import { cachesOf, described, drawPool, progressOf, unrun } from "./pages.js";

const KEPT = 400; // steps
const POINTS = 120; // of a sparkline
const RATE_S = 2; // over which tokens/s is a mean
const COUNTS = ["running", "waiting", "arriving", "preemptions", "evicted"];
const SILENCE_MS = 15_000; // a server that says nothing for so long is gone
const RETRY_MS = [500, 1000, 2000, 4000];
const REFUSED_MS = 60_000; // a key may be given more rights meanwhile

export class EnginePanel {
  /** `onPicture(cachesOf, progressOf)` is called with every picture; `onLink(connected, why)` when the server goes and comes back. */
  constructor(onPicture, onLink) {
    this.onPicture = onPicture;
    this.onLink = onLink;
    this.show = oncePerFrame(() => this.draw());
    this.model = undefined; // the one to watch, where there are several
    this.replica = undefined; // the one that the viewer has chosen
    byId("replica").addEventListener("change", ({ target }) => this.watch(this.model, Number(target.value)));
    this.reset();
    byId("steps").addEventListener("pointermove", (event) => this.tellStep(event));
    addEventListener("resize", () => this.show());
    document.addEventListener("visibilitychange", () => (document.hidden ? this.abort?.abort() : this.wake?.()));
    this.follow();
  }

  reset() {
    this.history = []; // steps
    this.series = { ttft: [], itl: [], rate: [] };
    this.seen = []; // [time, tokens] of the last messages, in seconds of the server's clock
    this.counts = {};
    this.picture = null;
    this.maps = [];
    byId("pools").replaceChildren();
    byId("tiers").replaceChildren();
    this.show();
  }

  /** Watch another model, or another replica of it, from now on. */
  watch(model, replica = model === this.model ? this.replica : undefined) {
    if (model === this.model && replica === this.replica) return;
    Object.assign(this, { model, replica });
    this.abort?.abort();
    this.wake?.();
  }

  async follow() {
    for (let tries = 0; ; tries++) {
      if (document.hidden) await new Promise((resolve) => (this.wake = resolve));
      this.abort = new AbortController();
      const { model, replica } = this;
      let timer, status, why;
      const alive = () => {
        clearTimeout(timer);
        timer = setTimeout(() => this.abort.abort(), SILENCE_MS);
      };
      try {
        const which = ofModel(model) + (replica === undefined ? "" : `${model === undefined ? "?" : "&"}replica=${replica}`);
        const response = await call(`/watch${which}`, { signal: this.abort.signal });
        ({ status } = response);
        if (!response.ok) throw new Error((why = await reason(response)));
        for await (const { event, data } of events(response)) {
          tries = 0;
          alive();
          this[event]?.(data);
        }
      } catch {
        // The server is gone, or the page is not seen: below it is tried again.
      }
      clearTimeout(timer);
      this.reset(); // what is not known any more is not shown
      if (document.hidden || model !== this.model || replica !== this.replica) continue;
      const refused = status === 403; // the server is there: all but this can be used
      if (status >= 400) this.replica = undefined; // it is lost, or the server was started again with fewer
      byId("unseen").textContent = refused ? `The engine cannot be watched: ${why}` : "";
      this.onLink(refused, why);
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, refused ? REFUSED_MS : RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]);
      });
    }
  }

  // Events of the feed: twostroke/server/page/feed.py.

  hello(facts) {
    this.reset();
    this.facts = facts;
    const numbers = Array.from({ length: facts.replicas }, (_, i) => el("option", { value: i }, i));
    byId("replica").replaceChildren(...numbers);
    byId("replica").value = facts.replica;
    byId("replica-field").hidden = facts.replicas === 1;
    byId("unseen").textContent = "";
    this.onLink(true);
  }

  pages(picture) {
    picture.cells = picture.pools.map(({ runs }) => unrun(runs));
    this.picture = picture;
    this.onPicture(
      (name) => cachesOf(picture, this.facts, name),
      (name) => progressOf(picture, this.facts, name, this.history.at(-1)),
    );
    this.show();
  }

  /** New steps; the values of each have the names that "hello" gave. */
  steps({ steps, tokens, at, ...counts }) {
    const { fields } = this.facts;
    const made = steps.map((values) => Object.fromEntries(fields.map((field, i) => [field, values[i]])));
    this.history = [...this.history, ...made].slice(-KEPT);
    this.counts = counts;
    // A watcher that comes late gets old messages at once, so the times are the server's.
    const old = this.seen.findLastIndex(([time]) => at - time >= RATE_S);
    this.seen = [...this.seen.slice(Math.max(0, old)), [at, tokens]];
    const [[since, before]] = this.seen;
    this.point("rate", at > since ? (tokens - before) / (at - since) : 0);
    for (const us of made.flatMap((step) => step.ttft_us)) this.point("ttft", us / 1e3);
    const gaps = made.flatMap((step) => step.itl_us).sort((a, b) => a - b);
    if (gaps.length) this.point("itl", gaps[gaps.length >> 1] / 1e3);
    this.show();
  }

  point(name, value) {
    this.series[name].push(value);
    if (this.series[name].length > POINTS) this.series[name].shift();
  }

  draw() {
    if (!byId("engine").checkVisibility()) return;
    const { history } = this;
    bars(byId("steps"), history.slice(-barsIn(byId("steps"))));
    for (const name of ["ttft", "itl", "rate"]) {
      const value = this.series[name].at(-1);
      byId(`${name}-value`).textContent = value === undefined ? "–" : figure(value, name);
      sparkline(byId(`${name}-line`), this.series[name]);
    }
    for (const name of COUNTS) byId(`${name}-value`).textContent = this.counts[name] ?? "–";
    if (this.picture) this.drawPools();
  }

  drawPools() {
    const { pools, owners, cells, tiers } = this.picture;
    pools.forEach((pool, i) => {
      const map = (this.maps[i] ??= this.makeMap(pool, i));
      const found = drawPool(map.canvas, cells[i], owners);
      map.found = found;
      const used = cells[i].length - found.free;
      const part = found.shown < cells[i].length ? ` The first ${found.shown} are shown.` : "";
      const several = found.each > 1 ? ` One square is ${found.each} pages.` : "";
      const text = `${used} of ${cells[i].length} pages in use: ${found.owned} of one request, ${found.shared} shared, ${found.prefix} in the prefix index alone, ${found.held} held by values, ${found.arriving} arriving.${part}${several}`;
      map.text.textContent = text;
      map.canvas.setAttribute("aria-label", `Pages of the pool. ${text}`);
    });
    byId("tiers").replaceChildren(...tiers.filter(([, used, most]) => used || most).map(tier));
  }

  makeMap({ roles }, i) {
    const canvas = el("canvas", { role: "img", class: "map" });
    const text = el("p", { class: "hint" });
    canvas.addEventListener("pointermove", (event) => {
      const { each, columns, size } = this.maps[i].found;
      const at = (Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size)) * each;
      const code = this.picture.cells[i][at];
      canvas.title = code === undefined ? "" : `page frame ${at}: ${described(code, this.picture.owners)}`;
    });
    byId("pools").append(el("h3", {}, roles.length > 1 || i ? `Pool of ${roles.join(" and ")}` : "Pool"), canvas, text);
    return { canvas, text };
  }

  tellStep(event) {
    const canvas = byId("steps");
    const shown = this.history.slice(-barsIn(canvas));
    const step = shown[shown.length - 1 - Math.floor((canvas.clientWidth - event.offsetX) / 5)];
    canvas.title = step
      ? `step ${step.number}: ${step.prefill} prefill and ${step.decode} decode rows of ${step.lanes} lanes in ${(step.took_us / 1e3).toFixed(1)} ms`
      : "";
  }
}

/** A tier below the pool: how full it is, where that is known. */
function tier([name, used, most]) {
  const size = (bytes) => (bytes === null ? "?" : `${(bytes / 1e6).toFixed(1)} MB`);
  const text = most ? `${name}: ${size(used)} of ${size(most)}` : `${name}: ${size(used)}`;
  const bar = most && used !== null ? el("meter", { max: most, value: used }) : null;
  return el("label", { class: "hint" }, text, bar);
}

function figure(value, name) {
  const digits = value < 10 ? 1 : 0;
  return name === "rate" ? value.toFixed(digits) : `${value.toFixed(digits)} ms`;
}

// Pages of KV: the whole pool as a map, and the cache of one answer as a row.

import { colour, surface } from "./draw.js";

// What a frame holds: twostroke/server/page/snapshot.py.
const [FREE, PREFIX, SHARED, HELD, ARRIVING, OWNER] = [0, 1, 2, 3, 4, 5];
const INDEXED = 1 << 14;
const NAMES = { [PREFIX]: "prefix", [SHARED]: "shared", [HELD]: "held", [ARRIVING]: "arriving", [FREE]: "free" };
const MIN_CELLS = 240; // squares that are shown of a pool that is hardly used
const MAX_CELLS = 6000; // squares; of a larger pool, a square is several pages

/** The cells of a pool from their runs. */
export function unrun(runs) {
  let length = 0;
  for (let i = 0; i < runs.length; i += 2) length += runs[i];
  const cells = new Uint16Array(length);
  for (let i = 0, at = 0; i < runs.length; i += 2) cells.fill(runs[i + 1], at, (at += runs[i]));
  return cells;
}

/** The colour of a choice, by its request's number. */
const ownerColour = ([, number, choice]) => `hsl(${(number * 137.5 + choice * 40) % 360} 70% 52%)`;

function fill(code, owners) {
  const kind = code & ~INDEXED;
  return kind >= OWNER ? ownerColour(owners[kind - OWNER]) : colour(NAMES[kind]);
}

/** Draw a pool's map, as far as it is used. Returns what is in it, counted. */
export function drawPool(canvas, pages, owners) {
  const cells = pages.subarray(0, Math.min(pages.length, Math.max(MIN_CELLS, Math.ceil(pages.findLastIndex(Boolean) * 1.25))));
  const each = Math.ceil(cells.length / MAX_CELLS);
  const squares = Math.ceil(cells.length / each);
  const wide = canvas.clientWidth || 300;
  const size = Math.max(4, Math.min(12, Math.floor(Math.sqrt((wide * 160) / squares))));
  const columns = Math.max(1, Math.floor(wide / size));
  const { context } = surface(canvas, Math.ceil(squares / columns) * size);
  for (let i = 0; i < squares; i++) {
    const code = each === 1 ? cells[i] : busiest(cells.subarray(i * each, (i + 1) * each));
    const [x, y] = [(i % columns) * size, Math.floor(i / columns) * size];
    context.fillStyle = fill(code, owners);
    context.fillRect(x, y, size - 1, size - 1);
    if (code & INDEXED) {
      context.fillStyle = colour("prefix");
      context.fillRect(x, y + size - 3, size - 1, 2);
    }
  }
  return { ...counted(pages), each, columns, size, shown: cells.length };
}

/** Of several pages in one square, the one to show: any that is not free. */
function busiest(cells) {
  return cells.find((code) => code >= OWNER) ?? cells.find((code) => code !== FREE) ?? FREE;
}

function counted(cells) {
  const made = { free: 0, prefix: 0, shared: 0, held: 0, arriving: 0, owned: 0 };
  for (const code of cells) made[NAMES[code & ~INDEXED] ?? "owned"]++;
  return made;
}

/** What the page at a place of the map holds, in words. */
export function described(code, owners) {
  const kind = code & ~INDEXED;
  const [name, number, choice] = owners[kind - OWNER] ?? [];
  const what = kind >= OWNER ? `of request ${number}, choice ${choice}${name ? ` (${name})` : ""}` : NAMES[kind];
  return code & INDEXED ? `${what}, also in the prefix index` : what;
}

/** The caches of a request, from a picture: a value for each of its lanes. */
export function cachesOf(picture, facts, name) {
  return picture.lanes
    .filter((lane) => picture.owners[lane.owner][0] === name && lane.spans)
    .map((lane) => ({ ...facts.pools[lane.pool], ...lane, color: ownerColour(picture.owners[lane.owner]), cells: codes(lane, picture) }));
}

/** What a request waits for, in words; "" while it makes tokens. `step` is the last one. */
export function progressOf(picture, facts, name, step) {
  const mine = ([own]) => own === name;
  const at = picture.waiting.findIndex(mine);
  if (at >= 0) return picture.waiting[at][1] === "waiting" ? `queued behind ${at} others` : "its pages were taken: it starts again when there is room";
  const lanes = picture.lanes.filter((lane) => mine(picture.owners[lane.owner]));
  if (lanes.some(({ decodes, todo }) => decodes && todo < 2)) return "";
  if (lanes.some(({ arriving }) => arriving)) return "its pages are arriving from another tier";
  const [lane] = lanes.filter(({ todo }) => todo > 0);
  if (!lane) return "";
  const number = (value) => value.toLocaleString("en");
  const held = facts.itl_ms && step?.decode && step.prefill < lane.todo;
  const why = held ? `, in small chunks: others are to get their tokens within ${Math.round(facts.itl_ms)} ms` : "";
  return `computing the prompt, ${number(lane.entries)} of ${number(lane.entries + lane.todo)} tokens${why}`;
}

function codes(lane, picture) {
  const made = [];
  for (let i = 0; i < lane.spans.length; i += 4) made.push(picture.cells[lane.pool][lane.spans[i]] ?? HELD);
  return made;
}

const SIZE = 10;

/**
 * Draw caches, a row of pages each: as full as they are, with gaps where positions jump. The first `found` pages were
 * there before, as those of the answer from which another one was forked. Returns all of it in words.
 */
export function drawCaches(canvas, caches, found = 0) {
  const wide = Math.max(SIZE * 4, canvas.clientWidth || canvas.parentElement?.clientWidth || 300);
  const places = [];
  let [x, y] = [0, 0];
  const next = () => {
    x += SIZE;
    if (x + SIZE > wide) [x, y] = [0, y + SIZE + 2];
  };
  for (const cache of caches) {
    let before = null;
    for (let i = 0; i < cache.cells.length; i++) {
      const [, start, stop, position] = cache.spans.slice(4 * i, 4 * i + 4);
      if (before !== null && position !== before) next();
      before = position + stop - start;
      const shade = i < found && cache === caches[0] ? colour("prefix") : isShared(cache.cells[i]) ? colour("shared") : cache.color;
      places.push([x, y, shade, start / cache.page_size, stop / cache.page_size]);
      next();
    }
    [x, y] = [0, y + SIZE + 6];
  }
  const { context } = surface(canvas, Math.max(SIZE, y));
  for (const [left, top, shade, start, stop] of places) {
    context.strokeStyle = context.fillStyle = shade;
    context.strokeRect(left + 0.5, top + 0.5, SIZE - 2, SIZE - 2);
    context.fillRect(left + start * (SIZE - 1), top, (stop - start) * (SIZE - 1), SIZE - 1);
  }
  const before = found ? `; pages that were there before, and cost nothing: ${found}` : "";
  return caches.map(inWords).join("; ") + before;
}

const isShared = (code) => (code & ~INDEXED) === SHARED;

function inWords(cache) {
  const shared = cache.cells.filter(isShared).length;
  const size = cache.bytes < 1e6 ? `${(cache.bytes / 1e3).toFixed(1)} KB` : `${(cache.bytes / 1e6).toFixed(1)} MB`;
  const more = shared ? `, ${shared} of them shared` : "";
  return `KV cache${cache.model === "main" ? "" : ` (${cache.model})`}: ${cache.entries} entries in ${cache.pages} pages${more}, ${size}, at positions ${positions(cache.spans)}`;
}

/** The ranges of positions, at most three of them. */
function positions(spans) {
  const ranges = [];
  for (let i = 0; i < spans.length; i += 4) {
    const [, start, stop, position] = spans.slice(i, i + 4);
    if (ranges.at(-1)?.[1] === position) ranges.at(-1)[1] = position + stop - start;
    else ranges.push([position, position + stop - start]);
  }
  const shown = ranges.slice(0, 3).map(([start, stop]) => `${start} to ${stop - 1}`);
  return shown.join(", ") + (ranges.length > 3 ? " and more" : "");
}

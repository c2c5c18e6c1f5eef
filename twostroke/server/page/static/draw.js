// Drawings on canvases, in the colours of the stylesheet.

const colours = new Map();

/** The colour that a variable of the stylesheet has in the theme of now. */
export function colour(name) {
  if (!colours.has(name)) {
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

/** After a change of theme. */
export const forgetColours = () => colours.clear();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forgetColours);

/** A context to draw on, in CSS pixels; the canvas is as wide as its place. */
export function surface(canvas, height) {
  const width = Math.max(1, canvas.clientWidth || canvas.parentElement?.clientWidth || 300);
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const BAR = 5; // pixels of a step

/** How many steps a canvas shows. */
export const barsIn = (canvas) => Math.max(1, Math.floor((canvas.clientWidth || 300) / BAR));

/** Steps as bars of decode rows below and prefill rows above; the height grows with the logarithm. */
export function bars(canvas, steps) {
  const { context, width, height } = surface(canvas, 90);
  const most = Math.log2(1 + Math.max(16, ...steps.map((step) => step.prefill + step.decode)));
  const tall = (rows) => (Math.log2(1 + rows) / most) * height;
  steps.forEach((step, i) => {
    const x = width - (steps.length - i) * BAR;
    const whole = tall(step.prefill + step.decode);
    const below = (whole * step.decode) / Math.max(1, step.prefill + step.decode);
    context.fillStyle = colour("decode");
    context.fillRect(x, height - below, BAR - 1, below);
    context.fillStyle = colour("prefill");
    context.fillRect(x, height - whole, BAR - 1, whole - below);
  });
}

export function sparkline(canvas, values) {
  const { context, width, height } = surface(canvas, 26);
  if (values.length < 2) return;
  const most = Math.max(...values) || 1;
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.beginPath();
  values.forEach((value, i) => {
    const [x, y] = [(i / (values.length - 1)) * width, height - 2 - (value / most) * (height - 4)];
    if (i) context.lineTo(x, y);
    else context.moveTo(x, y);
  });
  context.stroke();
}

// The settings of a conversation: what they are in the form, and in a request.

import { byId, el } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TEXTS = ["system", "tools", "format", "schema", "extra", "method", "other"];
let methods = [];
let models = []; // names, the one of calls that name none first

/** The models that the server offers. Only among several there is a choice. */
export function offerModels(names) {
  models = names;
}

/** The model that a conversation is for: undefined where there is no choice. */
export function modelOf(settings) {
  return models.length > 1 ? settings.model || models[0] : undefined;
}

/** Show the models and the conversation's own, also one that is not served any more; `changed` is called with another. */
export function bindModel(settings, changed) {
  const [select, model] = [byId("pick"), modelOf(settings)];
  const gone = model === undefined || models.includes(model) ? [] : [model];
  select.replaceChildren(...[...models, ...gone].map((name) => el("option", { value: name }, name)));
  select.hidden = model === undefined;
  byId("model").hidden = !select.hidden;
  select.value = model ?? "";
  select.onchange = () => {
    settings.model = select.value;
    changed();
  };
}

/** Show the methods that the server offers. */
export function offer(list) {
  methods = list;
  for (const id of ["method", "other"]) {
    const select = byId(id);
    const { value } = select;
    select.replaceChildren(...list.map(({ name, about }) => el("option", { value: name, title: about }, name)));
    if (list.some(({ name }) => name === value)) select.value = value;
  }
}

/** Fill the form with a conversation's settings, and keep these up to date: `changed` is called after a change. */
export function bind(settings, changed) {
  const form = byId("settings");
  for (const name of [...NUMBERS, ...TEXTS]) byId(name).value = settings[name];
  for (const name of ["method", "other"]) if (methods.length && !byId(name).value) byId(name).value = settings[name] = "plain";
  byId("compare").checked = settings.compare;
  const show = () => {
    byId("other-field").hidden = !settings.compare;
    byId("schema-field").hidden = settings.format !== "json_schema";
    parameters(settings, "method");
    parameters(settings, "other");
    byId("other-parameters-field").hidden = !settings.compare;
  };
  form.oninput = (event) => {
    const { id, value, checked } = event.target;
    if (id === "compare") settings.compare = checked;
    else if (event.target.dataset.method) ((settings.parameters[event.target.dataset.method] ??= {})[event.target.name] = value);
    else settings[id] = value;
    if (["compare", "format", "method", "other"].includes(id)) show();
    problem(settings);
    changed();
  };
  show();
  problem(settings);
}

/** The fields of a method's parameters. */
function parameters(settings, which) {
  const method = methods.find(({ name }) => name === settings[which]);
  const given = settings.parameters[settings[which]] ?? {};
  const fields = (method?.parameters ?? []).map(({ name, default: usual, wanted, choices }) => {
    const attributes = { name, "data-method": method.name, placeholder: plain(usual), title: wanted ?? "" };
    if (!choices?.length) return el("label", {}, name, el("input", { ...attributes, value: given[name] ?? "" }));
    const options = ["", ...choices].map((one) => el("option", { value: one, selected: one === given[name] }, one || plain(usual)));
    return el("label", {}, name, el("select", attributes, options));
  });
  byId(`${which}-parameters`).replaceChildren(el("p", { class: "hint" }, method?.about ?? ""), ...fields);
}

function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value ?? null);
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isSchema = (value) => isObject(value) || typeof value === "boolean";
const isTools = (value) => [value].flat().every((one) => isObject(one) && (isObject(one.function) || typeof one.name === "string"));
const WANTED = {
  tools: [isTools, "a list of functions, each with a name"],
  schema: [isSchema, "a JSON schema, an object"],
  extra: [isObject, "an object with fields"],
};

/** The first setting that cannot be read, or null; each says so at its field. `open` leads the user there. */
export function problem(settings, open = false) {
  const wrong = Object.entries(WANTED).filter(([id, wanted]) => {
    const error = id === "schema" && settings.format !== "json_schema" ? "" : wrongness(settings[id], wanted);
    const [input, text] = [byId(id), byId(`${id}-error`)];
    [text.textContent, text.hidden] = [error, !error];
    input.setAttribute("aria-invalid", String(Boolean(error)));
    return error;
  });
  if (!wrong.length) return null;
  const input = byId(wrong[0][0]);
  if (open) {
    if (!input.checkVisibility()) byId("show-settings").click();
    input.focus();
  }
  return input;
}

function wrongness(text, [fits, wanted]) {
  if (!text.trim() && wanted !== WANTED.schema[1]) return ""; // tools and further fields may be left out
  try {
    return fits(JSON.parse(text)) ? "" : `This must be ${wanted}.`;
  } catch (error) {
    return `This is no JSON: ${error.message}.`;
  }
}

/** The fields of a request that are settings, for one of the methods and models. There must be no `problem`. */
export function fields(settings, method = settings.method, model = modelOf(settings)) {
  const made = { model, logprobs: true, top_logprobs: 5, return_token_ids: true, method: chosen(settings, method) };
  for (const name of NUMBERS) if (settings[name] !== "") made[name] = Number(settings[name]);
  if (settings.tools.trim()) made.tools = wrapped(JSON.parse(settings.tools));
  if (settings.format === "json_object") made.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    made.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  }
  return { ...made, ...(settings.extra.trim() ? JSON.parse(settings.extra) : {}) };
}

/** What makes a model's prompt besides the messages. */
export function promptFields(settings, model) {
  const { tools } = fields(settings);
  return { model, tools };
}

function chosen(settings, name) {
  const given = Object.entries(settings.parameters[name] ?? {}).filter(([, value]) => value !== "");
  return { name, ...Object.fromEntries(given.map(([parameter, value]) => [parameter, value_of(value)])) };
}

function value_of(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Tools as the API has them; functions alone are wrapped. */
function wrapped(tools) {
  return [tools].flat().map((one) => (one.type === "function" ? one : { type: "function", function: one }));
}

"""The server under load, inspected before anything is measured."""

from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase
from typing import Any

import httpx

from twostroke.errors import InvalidRequest
from twostroke.study.traffic.workload_sampler import TokenRange

ORDINARY = " ".join(map("".join, product(ascii_lowercase, repeat=2)))  # some hundreds of different tokens
PROBE = 8  # tokens


@dataclass(frozen=True)
class Target:
    """A server and a model of it."""

    model: str  # the name that requests carry
    owner: str | None  # the server's name for itself (`owned_by`)
    context: int | None  # the most tokens of a sequence, if the server says
    ordinary: list[int]  # ids of ordinary text, to draw prompts from

    def check_length(self, tokens: int) -> None:
        """Raise InvalidRequest if a prompt and its answer do not fit."""
        if self.context is not None and tokens > self.context:
            raise InvalidRequest(
                f"the longest request has {tokens} tokens, and {self.model} has room for {self.context}"
            )


async def inspect(http: httpx.AsyncClient, model: str | None, ids: TokenRange | None) -> Target:
    """Ask the server what it serves, and whether it takes prompts of token ids as they are.

    `model` None is the first it names; `ids` None are those of a text that it tokenizes.

    Raises:
        InvalidRequest: no server answers, the key or the model is wrong, or prompts of exact length are not possible.
    """
    served = await _json(http, "GET", "/v1/models", "it lists no models at /v1/models: is it OpenAI-compatible?")
    models = {str(one["id"]): one for one in _listed(served, "data") if isinstance(one, dict) and "id" in one}
    if not models:
        raise InvalidRequest(f"the server at {http.base_url} serves no model")
    name = next(iter(models)) if model is None else model
    if name not in models:
        raise InvalidRequest(f"the server at {http.base_url} has no model {name!r}; it has {', '.join(models)}")
    ordinary = list(range(ids.least, ids.most + 1)) if ids is not None else await _tokenized(http, name)
    await _probe(http, name, ordinary)
    context = models[name].get("max_model_len")
    return Target(name, models[name].get("owned_by"), context if isinstance(context, int) else None, ordinary)


async def _tokenized(http: httpx.AsyncClient, model: str) -> list[int]:
    hint = "it does not tokenize at /tokenize: say which ids are ordinary text by --token-ids LOW-HIGH"
    # In vLLM's words, which are ours, then in llama.cpp's, whose server returns no tokens for a field that it lacks.
    for words in ({"model": model, "prompt": ORDINARY, "add_special_tokens": False}, {"content": ORDINARY}):
        found = set(_listed(await _json(http, "POST", "/tokenize", hint, words), "tokens"))
        if found and all(isinstance(id, int) for id in found):
            return sorted(found)
    raise InvalidRequest(f"the server at {http.base_url} cannot be measured: {hint}")


async def _probe(http: httpx.AsyncClient, model: str, ordinary: list[int]) -> None:
    """Raise InvalidRequest if the server changes the length of a prompt of token ids."""
    prompt = (ordinary * PROBE)[:PROBE]
    hint = "it does not take a list of token ids as the prompt of /v1/completions"
    answer = await _json(http, "POST", "/v1/completions", hint, {"model": model, "prompt": prompt, "max_tokens": 1})
    usage = answer.get("usage") if isinstance(answer, dict) else None
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if counted != PROBE:
        raise InvalidRequest(f"the server at {http.base_url} counts {counted} tokens in a prompt of {PROBE} ids")


async def _json(http: httpx.AsyncClient, method: str, path: str, hint: str, body: Any = None) -> Any:
    """Raises InvalidRequest, with the server's own message where it has one."""
    where = f"the server at {http.base_url}"
    try:
        answer = await http.request(method, path, json=body)
    except httpx.ConnectError:
        raise InvalidRequest(f"no server answers at {http.base_url}: start one, or name another by --url") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidRequest(f"{where} does not answer as it should: {type(error).__name__} {error}") from None
    if answer.status_code in (401, 403):
        raise InvalidRequest(f"{where} wants another API key: set TWOSTROKE_API_KEY")
    try:
        found = answer.json()
    except ValueError:
        found = None
    if answer.status_code != 200 or found is None:
        raise InvalidRequest(f"{where} cannot be measured: {hint} (status {answer.status_code} {answer.text:.200})")
    return found


def _listed(answer: Any, field: str) -> list[Any]:
    found = answer.get(field) if isinstance(answer, dict) else None
    return found if isinstance(found, list) else []

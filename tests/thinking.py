"""Tiny models whose templates have thoughts, and answers that are known before they are made."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers

from twostroke.api.llm import LLM
from twostroke.sampling.constraint import Constraint, ConstraintFactory
from twostroke.sampling.params import SamplingParams

_LAST = "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
_TURNS = "{% for m in messages %}[{{ m.role }}]"
_END = "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]"
# As the families' own templates are, in short. Each keeps the thought of the last turn, if any, and drops earlier ones.
TEMPLATES = {
    # Qwen3, SmolLM3: the model opens a thought, and the template writes an empty one where thoughts are off.
    "switch": _TURNS + _LAST + "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}" + _END
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    # DeepSeek R1, OLMo 3 Think, Qwen3.5: the template opens a thought.
    "open": _TURNS + "{% set text = m.content.split('</think>')[-1] %}{{ text }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}",
    "mistral": _TURNS + _LAST + "[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}" + _END + "{% endif %}",
    "gemma": _TURNS + _END + "{% if not enable_thinking | default(true) %}<|channel>thought\n<channel|>"
    "{% endif %}{% endif %}",
    "harmony": "Reasoning: {{ reasoning_effort | default('medium') }}{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
    "{% endif %}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}  # fmt: skip
TEMPLATES["merged"] = TEMPLATES["open"]
MERGED = {"merged": ["</think>\n"]}  # tokens that have more than a mark
SPECIAL = {
    "mistral": ["[THINK]", "[/THINK]", "[TOOL_CALLS]"],
    "gemma": ["<|channel>", "<channel|>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"],
}


def thinking_model(plain: Path, directory: Path, kind: str) -> Path:
    """A copy of a tiny model with a template of `TEMPLATES`."""
    for file in plain.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATES[kind]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL.get(kind, []))
    tokenizer.add_tokens(MERGED.get(kind, []))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


class Preferring(Constraint):
    """The next of these tokens wherever the constraint within allows it, as a model that is sure of itself."""

    def __init__(self, ids: Iterable[int], vocab_size: int, within: ConstraintFactory | None) -> None:
        self._ids, self._within = list(ids), None if within is None else within()
        self._everything = np.ones(vocab_size, bool)

    def mask(self) -> np.ndarray:
        mask = self._everything if self._within is None else self._within.mask()
        if self._ids and mask[self._ids[0]]:
            mask = np.zeros(len(mask), bool)
            mask[self._ids[0]] = True
        return mask

    def advance(self, token: int) -> None:
        if self._within is not None:
            self._within.advance(token)
        if self._ids[:1] == [token]:
            self._ids.pop(0)

    @property
    def finished(self) -> bool:
        return self._within is not None and self._within.finished


def write(llm: LLM, text: str, end: str | None = "</s>") -> Callable[[], None]:
    """Let every answer of a model be this text, as far as its grammar allows. Returns how to end that."""
    ids = [*llm.tokenizer.encode(text, add_bos=False), *(llm.tokenizer.encode(end, add_bos=False) if end else [])]

    def forced(params: SamplingParams) -> SamplingParams:
        within, size = params.constraint, llm.config.vocab_size
        return replace(params, constraint=partial(Preferring, ids, size, within))

    request, decode = llm.request, llm.decode_request
    vars(llm)["request"] = lambda prompt, params, method=None: request(prompt, forced(params), method)
    vars(llm)["decode_request"] = lambda kv, params, model=None: decode(kv, forced(params), model)

    def end_it() -> None:
        for name in ("request", "decode_request"):
            vars(llm).pop(name)

    return end_it

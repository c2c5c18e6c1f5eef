"""What a model answers, to the bit, in everything that ranks share out."""

from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.methods import method
from twostroke.models.dropout import Dropout
from twostroke.sampling.params import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % 379 + 2 for i in range(70)]
LONG = PROMPT * 16  # so many rows that all blocks of a pass use the same memory
# Heads and vocabulary that do not divide: 3 KV heads, 5 units of an MLP's outputs, 2 chunks of the head and a part.
UNEVEN: dict[str, Any] = {
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 160,
    "vocab_size": 2500,
}


def bits(kv: KVCache) -> dict[str, bytes]:
    """Keys, values, states, and the logits after them."""
    assert kv.tail is not None
    logits = kv.tail.logits
    owners = sorted(layer for _, group in kv.pool.geometry.kv_groups for layer in group.layers)
    entries = b"".join(kv.entries(layer).tobytes() for layer in owners)
    states = b"".join(state.tobytes() for state in (kv.states() or {}).values())
    return {"entries": entries, "states": states, "logits": b"" if logits is None else logits.tobytes()}


def record(llm: LLM, long: bool = True) -> dict[str, Any]:
    """Bits and tokens, by what was asked."""
    seen: dict[str, Any] = {}
    llm.engine.config = SchedulerConfig(max_step_tokens=4096)
    cold = llm.prefill(PROMPT)
    seen["cold"] = bits(cold)
    if long:
        seen["long"] = bits(llm.prefill(LONG))
    llm.engine.config = SchedulerConfig(max_step_tokens=16)
    prompts = [PROMPT[5:50], PROMPT[40:], PROMPT[:3], PROMPT]  # the last is found in the prefix index
    samplings = {
        "greedy": SamplingParams(max_tokens=5, ignore_eos=True),
        "sampled": SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.8, seed=5),
        "scored": SamplingParams(
            max_tokens=5, ignore_eos=True, temperature=0.7, top_p=0.9, repetition_penalty=1.1, logprobs=2, seed=6
        ),
    }
    for name, params in samplings.items():
        answers = llm.generate(prompts, params)
        seen[name] = [[(token.id, token.logprob, token.top_logprobs) for token in one.tokens] for one in answers]
    (snapped,) = llm.generate([PROMPT], method=method("snap", window=4, budget=16), max_tokens=4, ignore_eos=True)
    seen["queries"] = [token.id for token in snapped.tokens]
    if not llm.pool.geometry.windowed:
        (chosen,) = llm.generate([PROMPT], method=method("tova", budget=16), max_tokens=4, ignore_eos=True)
        seen["by head"] = [token.id for token in chosen.tokens]
    if llm.backend.name == "native" and not llm.pool.geometry.windowed:
        (fitted,) = llm.generate(
            [PROMPT], method=method("attention-matching"), max_tokens=4, ignore_eos=True, logprobs=1
        )
        seen["fitted"] = [(token.id, token.logprob) for token in fitted.tokens]

    def dropped() -> Program:
        return (yield Prefill(PROMPT[:20], dropout=Dropout(0.3, seed=4)))

    def looked_into() -> Program:
        return (yield Prefill(PROMPT[9:40], states=20, queries=3))

    requests = [Request(program, SamplingParams(), llm.tokenizer) for program in (dropped, looked_into)]
    llm.engine.run(requests)
    seen["dropout"], inside = bits(requests[0].result), requests[1].result
    seen["states"], seen["inside"] = inside.states.tobytes(), inside.queries.rows.tobytes()
    return seen


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What differs."""
    return [name for name in a if a[name] != b[name]]


def finite(seen: dict[str, Any]) -> bool:
    """Whether logits are numbers: all NaN would be equal too."""
    return bool(np.isfinite(np.frombuffer(seen["cold"]["logits"], np.float32)).all())

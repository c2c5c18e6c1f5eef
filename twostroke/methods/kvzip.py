"""KVzip: the entries stay that the model attends to while it repeats the prompt.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (arXiv:2505.23416), section 3:
the prompt is prefilled a second time behind itself and a request to repeat it. An entry is worth the most attention
that any query of this prefill pays to it. Long prompts are repeated part by part, and attention is shared out among the
sinks, the part, and its repetition. The paper's heads keep different numbers of entries, here with `budgets="ada"`
alone. It puts the request into the chat template; here it follows the prompt as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Prefill
from twostroke.fields import integer
from twostroke.kv.attention import Queries, attention_weights
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import Choice, RankedByHead, watched
from twostroke.methods.method import Prompt

ALL_OF_IT = "\n\nRepeat the previous context exactly."
A_PART = "\n\nRepeat the part of the previous context exactly, starting with"
REMINDED = 8  # tokens before a part that say where it begins


@dataclass(frozen=True)
class KVzip(RankedByHead, name="kvzip"):
    """Decode from the entries that repeating the prompt needs most."""

    sinks: int = integer(4, least=0)
    part: int = integer(2048, least=1)  # how many tokens are repeated at once

    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        kv: KVCache = yield Prefill(tokens)
        heads = kv.pool.geometry.kv_heads or 0
        worth = np.zeros((len(kv.pool.geometry.kv_layers), heads, len(kv)), np.float32)
        for start in range(0, len(tokens), self.part):
            part, sinks = slice(start, min(start + self.part, len(tokens))), min(self.sinks, start)

            def see(longer: KVCache, queries: Queries, part: slice = part, sinks: int = sinks) -> None:
                near = longer[:sinks] + longer[part] + longer[len(tokens) :]
                for layer, weights in enumerate(attention_weights(near, queries)):
                    most = weights[..., sinks:][..., : part.stop - part.start].max(1)
                    most = most.reshape(heads, -1, most.shape[-1]).max(1)
                    np.maximum(worth[layer, :, part], most, out=worth[layer, :, part])

            asked = [*prompt.encode(A_PART), *tokens[start - REMINDED : start]] if start else prompt.encode(ALL_OF_IT)
            yield from watched([*asked, *prompt.encode("\n"), *tokens[part]], see, kv)
        return kv, worth

"""A model whose layers are never in memory together: every pass reads them from the file, one after another.

A teacher that only prefills can be larger than memory: what it leaves behind is KV. A pass takes the time of reading
and packing all layers, so it should have many rows (`max_step_tokens`). The head stays in memory.
"""

from dataclasses import replace

import numpy as np

from twostroke.backends.interface import ForwardOutput, RaggedBatch
from twostroke.backends.native.layers import LentWeights
from twostroke.backends.native.model import NativeModel
from twostroke.backends.page_memory import PageMemory


class StreamedModel(NativeModel):
    """Its results have the bits of a model that is in memory."""

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        last, every = self.config.num_layers - 1, np.arange(batch.num_rows)
        entered, made = None, None
        queries: list[np.ndarray] = []
        states: list[np.ndarray] = []
        for i in range(last + 1):
            weights = LentWeights(self.team, self.weights.source)
            handle = self.with_layers(weights, range(i, i + 1))
            rows = batch if i == last else replace(batch, state_rows=every, wanted=batch.wanted[:0])
            if batch.dropout is not None:
                rows = replace(rows, dropout=batch.dropout[i : i + 1])
            made = self.run(handle, 1, rows, memory, entered)
            if made.queries is not None:
                queries.append(made.queries)
            if made.states is not None and batch.state_rows is not None:
                chosen = made.states if i == last else made.states[:, batch.state_rows]
                states.append(chosen[:1] if i < last else chosen)
            if i < last:
                assert made.states is not None
                entered = made.states[1]
            self.team.settle()  # nobody reads these weights any more: they are freed with `weights`
        assert made is not None
        found = self.by_head(np.concatenate(queries)) if queries else None
        return made._replace(queries=found, states=np.concatenate(states) if states else None)

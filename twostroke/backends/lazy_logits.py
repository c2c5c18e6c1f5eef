"""Logits that are computed from hidden states when they are read, and sampling from them, for all backends."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from twostroke.backends.interface import LazyLogits, RaggedBatch
from twostroke.errors import KVError
from twostroke.sampling.draw import Draw, Noise, Sampled
from twostroke.sampling.sampler import sample
from twostroke.sampling.scores import TokenScore, score
from twostroke.sampling.statistics import RowStatistics, Statistics
from twostroke.system.process_exit import ExitLock

_READING = ExitLock()  # any thread may read the logits of a value, also while the process ends
SCORED_ROWS = 64  # rows whose logits exist at once while given tokens are scored


class LogitsHead(Protocol):
    """The end of a model: from hidden states [R, hidden], in the backend's form, to logits and tokens."""

    @property
    def statistics(self) -> Statistics: ...

    def logits(self, hidden: Any) -> tuple[np.ndarray, RowStatistics | None]:
        """Logits [R, vocab] float32, and their statistics if the head computed them too."""
        ...

    def search(self, hidden: Any, noises: Sequence[Noise]) -> list[int]:
        """Find the id with the largest logit plus noise in each row; NO_TOKEN if its logits are not finite."""
        ...

    def join(self, parts: Sequence[Any]) -> Any:
        """Concatenate hidden states."""
        ...

    def copy(self, hidden: Any) -> Any: ...

    def to_host(self, hidden: Any) -> np.ndarray:
        """Copy hidden states to an array, float32."""
        ...


class SharedLogits:
    """Hidden states of rows that were computed together, and their logits once they have been read.

    A step keeps the logits, since other rows of the step may read them. A KV value does not, since it may live long.
    """

    def __init__(self, head: LogitsHead, hidden: Any, keeps: bool) -> None:
        self.head, self.hidden, self._keeps = head, hidden, keeps
        self.found: tuple[np.ndarray, RowStatistics | None] | None = None

    def logits(self) -> tuple[np.ndarray, RowStatistics | None]:
        """Logits of all rows: the head is computed once for them."""
        if (found := self.found) is None:
            with _READING:
                found = self.head.logits(self.hidden)
            if self._keeps:
                self.found = found
        return found


class HiddenRows:
    """Some rows of hidden states with their logits; implements `LazyLogits`."""

    __slots__ = ("computed", "rows")

    def __init__(self, computed: SharedLogits, rows: range) -> None:
        self.computed, self.rows = computed, rows

    @classmethod
    def of(cls, head: LogitsHead, hidden: Any) -> "HiddenRows":
        """All rows of the hidden states."""
        return cls(SharedLogits(head, hidden, keeps=True), range(len(hidden)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> "HiddenRows":
        return HiddenRows(self.computed, self.rows[rows])

    @property
    def hidden(self) -> Any:
        return self.computed.hidden[self.rows.start : self.rows.stop]

    def kept(self) -> "HiddenRows":
        head = self.computed.head
        return HiddenRows(SharedLogits(head, head.copy(self.hidden), keeps=False), range(len(self)))

    def read(self) -> np.ndarray:
        return self.computed.logits()[0][self.rows.start : self.rows.stop]

    def scores(self, ids: Sequence[int], count: int) -> list[TokenScore]:
        head, made = self.computed.head, list[TokenScore]()
        for start in range(0, len(self), SCORED_ROWS):
            piece = slice(start, start + SCORED_ROWS)
            logits, found = head.logits(self[piece].hidden)
            made += score(logits, ids[piece], count, head.statistics, found)
        return made

    def hidden_states(self) -> np.ndarray:
        return self.computed.head.to_host(self.hidden)

    @property
    def nbytes(self) -> int:
        found = self.computed.found
        return self.computed.hidden.nbytes + (0 if found is None else found[0].nbytes)


class StoredLogits:
    """Logits given as an array, from a file or another process; implements `LazyLogits`."""

    def __init__(self, logits: np.ndarray) -> None:
        """`logits`: [rows, vocab] float32."""
        self.logits = logits

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, rows: slice) -> "StoredLogits":
        return StoredLogits(self.logits[rows])

    def kept(self) -> "StoredLogits":
        return self

    def read(self) -> np.ndarray:
        return self.logits

    def scores(self, ids: Sequence[int], count: int) -> list[TokenScore]:
        return score(self.logits, ids, count)

    def hidden_states(self) -> np.ndarray:
        raise KVError("logits of a file or of another process have no hidden states: prefill the tokens again")

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes


class KnownTokens(list[Sampled]):
    """Tokens that are already known; implements `DrawnTokens`."""

    def read(self) -> list[Sampled]:
        return self


def resolved(batch: RaggedBatch[np.ndarray]) -> np.ndarray:
    """A batch's token ids, with placeholders replaced by the drawn tokens; 0 stands for NO_TOKEN."""
    if batch.drawn is None:
        return batch.token_ids
    drawn = np.array([max(0, sampled.id) for sampled in batch.drawn.read()], np.int64)
    token_ids, unknown = batch.token_ids.copy(), batch.token_ids < 0
    token_ids[unknown] = drawn[-1 - token_ids[unknown]]
    return token_ids


def sample_rows(head: LogitsHead, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> KnownTokens:
    """Implement `CompiledModel.sample` for a backend with this head.

    Rows whose logits have not been read yet go through the head together: by a search if only a token is requested for
    each, and otherwise by computing all their logits. Rows whose logits are known are sampled from them.
    """
    made: dict[int, Sampled] = {}
    fresh: list[int] = []
    known: dict[int, list[int]] = {}  # by the object that holds their logits
    for i, row in enumerate(rows):
        if isinstance(row, HiddenRows) and row.computed.found is None:
            fresh.append(i)
        else:
            known.setdefault(id(row.computed) if isinstance(row, HiddenRows) else id(row), []).append(i)
    if fresh:
        made |= zip(fresh, _from_hidden(head, [rows[i] for i in fresh], [draws[i] for i in fresh]), strict=True)
    for some in known.values():
        made |= zip(some, _from_logits(head, [rows[i] for i in some], [draws[i] for i in some]), strict=True)
    return KnownTokens(made[i] for i in range(len(rows)))


def hidden_of(head: LogitsHead, rows: Sequence[HiddenRows]) -> Any:
    """Hidden states of single rows: a view if they follow one another in one step, as those of a decode mostly do."""
    computed, first = rows[0].computed, rows[0].rows.start
    if all(row.computed is computed and row.rows.start == first + i for i, row in enumerate(rows)):
        return computed.hidden[first : first + len(rows)]
    return head.join([row.hidden for row in rows])


def _from_hidden(head: LogitsHead, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> list[Sampled]:
    mine = [row for row in rows if isinstance(row, HiddenRows)]
    if all(draw.simple for draw in draws):
        return [Sampled(token) for token in head.search(hidden_of(head, mine), [draw.noise for draw in draws])]
    # Candidates that continue one value share a row: its logits are computed once.
    places = {(id(row.computed), row.rows.start): row for row in mine}
    logits, found = head.logits(hidden_of(head, list(places.values())))
    if len(places) < len(mine):
        order = {place: i for i, place in enumerate(places)}
        numbers = [order[id(row.computed), row.rows.start] for row in mine]
        logits, found = logits[numbers], None if found is None else found.of(numbers)
    return sample(logits, draws, head.statistics, found)


def _from_logits(head: LogitsHead, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> list[Sampled]:
    if isinstance(first := rows[0], HiddenRows):
        logits, found = first.computed.logits()
        numbers = [row.rows.start for row in rows if isinstance(row, HiddenRows)]
        return sample(logits[numbers], draws, head.statistics, None if found is None else found.of(numbers))
    return sample(np.concatenate([row.read() for row in rows]), draws, head.statistics)

"""Whether all that a process will take fits into the memory that it may take.

A pool is reserved, and takes memory only where it is written. A process that was given too much would start, say that
it is ready, and be ended by the system at its peak. So everything is added up before weights are loaded.
"""

import logging
from dataclasses import dataclass, field

from twostroke.errors import InvalidRequest
from twostroke.models.config import Experts, GatedMLP, ModelConfig
from twostroke.system.limits import group_memory, machine_memory

log = logging.getLogger(__name__)

# Tokenizer, templates, grammars and connections of a server under load, as measured (docs/production.md).
PROCESS_BYTES = 96 << 20
LOGIT_ROWS = 64  # rows whose logits a step holds at once, as float32
MIB = 1 << 20


@dataclass
class MemoryBudget:
    """What a process may take when it is opened, and what it has been promised to."""

    limit_bytes: int  # what it may still allocate
    hard: bool  # whether the limit is that of a control group, at which the system ends the process
    parts: dict[str, int] = field(default_factory=dict)  # bytes by what they are for

    @classmethod
    def now(cls) -> "MemoryBudget":
        """The budget of this process at this moment."""
        machine, group = machine_memory(), group_memory()  # each once: both change all the time
        return cls(machine, False) if group is None or group > machine else cls(group, True)

    @classmethod
    def of_engine(
        cls, config: ModelConfig, max_step_tokens: int, *, on_host: bool, processes: int, host_bytes: int, spare: int
    ) -> "MemoryBudget":
        """The budget now, with what an engine takes besides weights and pages.

        Args:
            config, max_step_tokens: of its model and its steps.
            on_host: whether it computes in the memory that this is about.
            processes: number of its processes on this host.
            host_bytes: for KV outside of the pool.
            spare: bytes to leave for others.
        """
        budget = cls.now()
        budget.add("process", processes * PROCESS_BYTES)
        budget.add("spare", spare)
        if on_host:
            budget.add("a step", workspace_bytes(config, max_step_tokens))
        budget.add("KV in the host", host_bytes)
        return budget

    @property
    def left_bytes(self) -> int:
        """What is left when all parts have come. Below 0: they do not fit."""
        return self.limit_bytes - sum(self.parts.values())

    def add(self, what: str, size: int) -> None:
        self.parts[what] = self.parts.get(what, 0) + size

    def require(self, remedy: str) -> None:
        """Raise InvalidRequest, one line, if the parts exceed a control group's limit; warn if the machine's memory.

        `remedy` says what the user may do.
        """
        if self.left_bytes >= 0:
            return
        parts = ", ".join(f"{what} {_mib(size)}" for what, size in self.parts.items() if size)
        whose = "its control group lets it take" if self.hard else "this machine has"
        line = (
            f"the process would take {_mib(sum(self.parts.values()))} ({parts}), and {whose} {_mib(self.limit_bytes)}"
        )
        if self.hard:
            raise InvalidRequest(f"{line}: {remedy}")
        log.warning("%s: the system may end it at its peak; %s", line, remedy)


def workspace_bytes(config: ModelConfig, max_step_tokens: int) -> int:
    """Bytes of activations and logits of one step, in float32. An upper bound for every backend on a CPU."""
    inner = max(_inner(layer.feed_forward) for layer in config.layers)
    row = 6 * config.hidden_size + 3 * inner + 3 * max(one.num_heads * one.head_dim for one in config.attentions)
    row += 3 * config.token_inputs * config.num_layers
    return 4 * (max_step_tokens * row + LOGIT_ROWS * config.vocab_size)


def _inner(feed_forward: GatedMLP | Experts) -> int:
    chosen = feed_forward.chosen if isinstance(feed_forward, Experts) else 1
    return chosen * feed_forward.intermediate_size


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"

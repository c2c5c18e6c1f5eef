"""An `LLM` without weights and without a pool: what routes need of it to check a body and to make its requests."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twostroke.api.llm import LLM
from twostroke.api.prefills import Classifier, Embedder, Reranker
from twostroke.engine.memory_budget import MemoryBudget
from twostroke.engine.model import Model
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.models.config import ModelConfig

_KINDS = (int, float, str, dict, Path, Tokenizer, ModelConfig, Embedder, Classifier, Reranker, MemoryBudget, type(None))
_POOL = ("num_pages", "page_size", "max_entries", "entry_bytes", "page_bytes", "snapshot_pages", "geometry")
_STORE = ("tier", "where", "most_bytes")


def _copied(thing: Any, names: tuple[str, ...]) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(thing, name) for name in names})


@dataclass(frozen=True)
class HollowState:
    """The state of an `LLM` that decides about requests, to be sent to another process."""

    llm: dict[str, Any]
    model: dict[str, Any]

    @classmethod
    def of(cls, llm: LLM) -> "HollowState":
        known: dict[str, Any] = {key: value for key, value in vars(llm).items() if isinstance(value, _KINDS)}
        known["pool"] = _copied(llm.pool, _POOL)
        known["backend"] = _copied(llm.backend, ("label", "takes_bias"))
        engine, tiers = llm.engine, llm.tiers
        stores = [_copied(store, _STORE) for store in tiers.stores]
        disk = next((store for store in stores if store.tier == "disk"), None)
        known["engine"] = SimpleNamespace(config=engine.config, models=dict.fromkeys(engine.models))
        known["tiers"] = SimpleNamespace(host_bytes=tiers.host_bytes, stores=stores, disk=disk)
        model = {"name": llm.model.name, "id": llm.model.id, "index": SimpleNamespace() if llm.model.index else None}
        return cls(known, model)

    def llm_of(self) -> LLM:
        """The hollow `LLM`."""
        made = LLM.__new__(LLM)
        vars(made).update(self.llm)
        made.model = Model.__new__(Model)
        compiled = SimpleNamespace(config=made.config)
        shared = {"pool": made.pool, "tokenizer": made.tokenizer, "backend": made.backend, "backing_stores": None}
        vars(made.model).update(compiled=compiled, **shared, **self.model)
        return made

"""Models over tiers that tests make."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import no_page_may_be_lost
from tests.kv.tiers.memory_store import MemoryStore, Pages
from tests.tiny import write_model
from twostroke.api import open_engine
from twostroke.api.llm import LLM
from twostroke.kv.backing_stores import BackingStores
from twostroke.kv.tiers.tiers import Tiers
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer

LAYERS, HEADS = 3, 2
PAGE_BYTES = LAYERS * 2 * HEADS * 64 * 2 * 16


@functools.cache
def read_once() -> tuple[Checkpoint, Tokenizer]:
    """A tiny model's checkpoint and its tokenizer: to read them takes as long as to open the model that they are of."""
    sizes = {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "head_dim": 64, "vocab_size": 512}
    checkpoint = open_checkpoint(str(write_model("llama", Path(tempfile.mkdtemp()), **sizes)))
    return checkpoint, Tokenizer.from_source(checkpoint.tokenizer_source)


def without_tiers(pages: int) -> LLM:
    """The same model, with nothing that it could find."""
    options: dict[str, Any] = {"backend": "native", "threads": 1, "prefix_index": "off"}
    return LLM(read_once()[0], kv_bytes=pages * PAGE_BYTES, **options)


class Opener:
    """Opens models over stores, and closes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[LLM] = []
        self._patch = monkeypatch

    def __call__(self, tiers: Tiers, pages: int = 256, index: str = "radix", eager: bool = True, **options: Any) -> LLM:
        """`eager`: loading always seems quicker than computing, and pages are written when they are first seen."""
        options = {"backend": "native", "threads": 1, "prefix_index": index, "kv_bytes": pages * PAGE_BYTES} | options
        checkpoint, tokenizer = read_once()
        with self._patch.context() as patch:
            patch.setattr(open_engine, "open_tiers", lambda *_: tiers)
            patch.setattr(Tokenizer, "from_source", lambda _: tokenizer)
            llm = LLM(checkpoint, **options)
        if eager:
            make_eager(llm)
        self.opened.append(llm)
        return llm

    def close(self) -> None:
        """Close all. No model may have lost a page."""
        for llm in self.opened:
            if "engine" in llm.__dict__:
                llm.tiers.flush(20.0)
                no_page_may_be_lost([llm])
                llm.close()
        self.opened.clear()


def over(tier: str, pages: Pages) -> Tiers:
    store = MemoryStore(tier, pages)
    return Tiers(disk=store) if tier == "disk" else Tiers(remote=store)


def lower(llm: LLM) -> BackingStores:
    assert llm.model.backing_stores is not None
    return llm.model.backing_stores


def make_eager(llm: LLM) -> None:
    for model in llm.engine.models.values():
        if model.backing_stores is not None:
            model.backing_stores.computing = lambda context, count: 1.0 * count

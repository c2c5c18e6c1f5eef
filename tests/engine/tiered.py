"""Models over tiers that tests make."""

from typing import Any

import pytest

from tests.conftest import no_page_may_be_lost
from tests.tiers.memory_store import MemoryStore, Pages
from twostroke import llm as llm_module
from twostroke.kv.lower import Lower
from twostroke.llm import LLM
from twostroke.tiers.tiers import Tiers

PAGE_BYTES = 30 * 2 * 3 * 64 * 2 * 16


class Opener:
    """Opens models over stores, and closes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[LLM] = []
        self._patch = monkeypatch

    def __call__(self, tiers: Tiers, pages: int = 256, index: str = "radix", eager: bool = True, **options: Any) -> LLM:
        """`eager`: loading always seems quicker than computing, and pages are written when they are first seen."""
        options = {"backend": "native", "threads": 1, "prefix_index": index, "kv_bytes": pages * PAGE_BYTES} | options
        with self._patch.context() as patch:
            patch.setattr(llm_module, "open_tiers", lambda *_: tiers)
            llm = LLM("smollm2-135m", **options)
        if eager:
            make_eager(llm)
        self.opened.append(llm)
        return llm

    def close(self) -> None:
        """Close all. No model may have lost a page."""
        for llm in self.opened:
            if "engine" in llm.__dict__:
                llm.tiers.settle(20.0)
                no_page_may_be_lost([llm])
                llm.close()
        self.opened.clear()


def over(tier: str, pages: Pages) -> Tiers:
    store = MemoryStore(tier, pages)
    return Tiers(disk=store) if tier == "disk" else Tiers(remote=store)


def lower(llm: LLM) -> Lower:
    assert llm.model.lower is not None
    return llm.model.lower


def make_eager(llm: LLM) -> None:
    for model in llm.engine.models.values():
        if model.lower is not None:
            model.lower.computing = lambda context, count: 1.0 * count

"""Pages in a smaller form: the same bytes after all, from every store, whoever wrote them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv.tiers.pages import NAMESPACE, prompt
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import InvalidRequest
from twostroke.kv.tiers.names import private_name
from twostroke.kv.tiers.page_format import compress, decompress
from twostroke.sampling.params import SamplingParams

SIZE = 32_000
ONE = replace(NAMESPACE, page_bytes=SIZE)


def page(seed: int = 0, size: int = SIZE) -> memoryview:
    """Numbers as K and V are: of like size, with special ones among them."""
    numbers = np.random.default_rng(seed).normal(0, 0.5, size // 2).astype(ml_dtypes.bfloat16)
    numbers[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-39]
    return memoryview(numbers.tobytes())


def test_a_third_is_saved() -> None:
    form, into = compress(page()), memoryview(bytearray(SIZE))
    assert form is not None
    assert len(form) < 0.72 * SIZE
    assert decompress(memoryview(form), into)
    assert into == page()


@given(st.binary(max_size=4000), st.sampled_from([1, 7, 200]))
def test_any_bytes_come_back(data: bytes, times: int) -> None:
    """Those of which nothing is saved are not compressed."""
    page = memoryview(data * times)
    form, into = compress(page), memoryview(bytearray(len(page)))
    if form is not None:
        assert len(form) < len(page)
        assert decompress(memoryview(form), into)
        assert into == page


@given(st.integers(0, 21_000), st.integers(1, 255))
def test_what_is_no_form_is_none(place: int, flip: int) -> None:
    """Seals keep this away; whatever comes, nothing is raised and nothing is written beside the page."""
    form = bytearray(compress(page()) or b"")
    into = memoryview(bytearray(SIZE))
    assert not decompress(memoryview(form)[:place], into)
    assert not decompress(memoryview(form), memoryview(bytearray(SIZE - 2)))
    form[place % len(form)] ^= flip
    decompress(memoryview(form), into)


@pytest.fixture(params=["disk", "remote"])
def opened(request: pytest.FixtureRequest) -> Callable[[bool], Any]:
    """Opens a store on what is there, which writes in one form or the other."""
    if request.param == "disk":
        open_disk = request.getfixturevalue("open_disk")
        return lambda compressed: open_disk(compressed=compressed)
    url, open_store = request.getfixturevalue("redis_server")().url, request.getfixturevalue("open_store")
    return lambda compressed: open_store(url, compressed=compressed)


@pytest.mark.parametrize("first", [True, False])
def test_stores_read_both_forms(opened: Callable[[bool], Any], first: bool) -> None:
    one, other = prompt(3, page_bytes=SIZE), opened(not first)
    pages = [page(i) for i in range(3)]
    assert opened(first).write(ONE, one.names, pages) == 3
    assert other.write(ONE, one.names, pages) == 3  # they are there
    into = one.room()
    assert other.read(ONE, one.names, into, 10.0) == 3
    assert into == pages


@pytest.mark.parametrize("compressed", [True, False])
def test_pages_of_values(opened: Callable[[bool], Any], compressed: bool) -> None:
    store, name, into = opened(compressed), private_name(), memoryview(bytearray(SIZE))
    store.keep(ONE, name, page())
    store.fetch(ONE, name, into)
    assert into == page()


def test_a_damaged_form_is_deleted(disk: Path, open_disk: Callable[..., Any]) -> None:
    store, one = open_disk(compressed=True), prompt(1, page_bytes=SIZE)
    store.write(ONE, one.names, [page()])
    (path,) = (path for path in disk.rglob(f"{one.names[0].key.hex()}*") if path.is_file())
    data = bytearray(path.read_bytes())
    assert len(data) < 4096 + 0.72 * SIZE
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.read(ONE, one.names, one.room(), 10.0) == 0
    assert not path.exists()


def test_an_option_without_a_store_is_one_line() -> None:
    with pytest.raises(InvalidRequest, match="kv_compress is for a disk tier or a remote one"):
        LLM("smollm2-135m", kv_compress=True)


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_prompts_are_found_by_processes_without_it(tmp_path: Path) -> None:
    asked = [100 + (7 * i) % 89 for i in range(150)]
    used: list[int] = []
    seen: list[list[Answer]] = []
    for compressed, directory in [(True, "a"), (False, "a"), (False, "b")]:
        with LLM(
            "smollm2-135m", threads=1, kv_bytes=64 << 20, kv_disk=tmp_path / directory, kv_compress=compressed
        ) as llm:
            llm.tiers.first_touch_s = 0.0
            request = llm.request(asked, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1))
            seen.append(answers(llm, [request], SchedulerConfig()))
            assert request.cached_by_tier.get("disk", 0) == (144 if len(seen) == 2 else 0)
            llm.tiers.flush()
            assert llm.tiers.disk is not None
            used.append(llm.tiers.disk.used_bytes or 0)
    assert seen[0] == seen[1] == seen[2]
    assert used[0] < 0.8 * used[2]

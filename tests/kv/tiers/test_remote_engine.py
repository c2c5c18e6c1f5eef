"""A model with a real remote tier: prompts find their pages after a restart, and whatever the server does, no answer
changes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engine.tiered import read_once
from tests.kv.tiers.asking import Server, client
from tests.kv.tiers.redis_server import Proxy
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import PageLost
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PROMPTS = [[100 + (7 * i + seed) % 89 for i in range(200)] for seed in range(2)]
PARAMS = SamplingParams(max_tokens=5, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
OpenModel = Callable[..., LLM]


@pytest.fixture
def open_model() -> Iterator[OpenModel]:
    """A function that opens a model; with a URL, loading always seems quicker than computing."""
    with ExitStack() as opened:

        def open_one(url: str | None = None) -> LLM:
            options: dict[str, Any] = {"backend": "native", "kv_bytes": 64 << 20, "threads": 1, "kv_remote": url}
            llm = opened.enter_context(LLM(read_once()[0], **options))
            if llm.model.backing_stores is not None:
                llm.model.backing_stores.computing = lambda context, count: 1.0 * count
            return llm

        yield open_one


def ask(llm: LLM, prompt: int) -> tuple[Answer, dict[str, int]]:
    """The answer to a prompt, and where its tokens were found."""
    request = llm.request(PROMPTS[prompt], PARAMS)
    (answer,) = answers(llm, [request], SchedulerConfig(max_step_tokens=64))
    return answer, dict(request.cached_by_tier)


def test_a_salt_reaches_no_server(redis_server: Server, open_model: OpenModel) -> None:
    """Nothing of it is written there, nor looked for."""
    server = redis_server()
    llm = open_model(server.url)
    found: list[dict[str, int]] = []
    for salt in (b"a", b"", b"b"):
        request = llm.request(PROMPTS[0], PARAMS)
        request.cache_salt = salt
        answers(llm, [request], SchedulerConfig(max_step_tokens=64))
        llm.tiers.flush()
        assert any(client(server).scan_iter("*:page:*")) == (salt != b"a")
        found.append(dict(request.cached_by_tier))
    assert found == [{}, {}, {}]


def test_a_restart(redis_server: Server, open_model: OpenModel) -> None:
    server, expected = redis_server(), ask(open_model(), 0)[0]
    first = open_model(server.url)
    assert ask(first, 0) == (expected, {})
    first.close()
    second = open_model(server.url)
    assert ask(second, 0) == (expected, {"remote": 192})
    assert ask(second, 0) == (expected, {"pool": 192})
    assert second.tiers.remote is not None
    assert second.tiers.remote.counters.read().reasons == {}


def test_whatever_the_server_does(redis_server: Server, open_model: OpenModel) -> None:
    server, plain = redis_server(), open_model()
    expected = [ask(plain, prompt)[0] for prompt in range(2)]
    everything = 2 * 192
    with Proxy(server.port) as proxy:

        def found() -> int:
            """Tokens that a new process finds; its answers must be right."""
            with open_model(proxy.url) as llm:
                asked = [ask(llm, prompt) for prompt in range(2)]
                assert [answer for answer, _ in asked] == expected
            return sum(tiers.get("remote", 0) for _, tiers in asked)

        assert (found(), found()) == (0, everything)
        proxy.cut_after = 133_000  # in the middle of a page
        assert found() < everything
        proxy.cut_after = None
        raw = client(server)
        keys = sorted(raw.scan_iter("*:page:*"))
        assert len(keys) == everything // 16
        raw.delete(keys[7])
        raw.setrange(keys[3], 5000, b"changed")
        counts = [found() for _ in range(3)]  # of two in one prompt, the second may be noticed when it is reached
        assert counts[0] < everything == counts[2], "what was missing and what was wrong was not written again"
        assert counts == sorted(counts)
        server.kill()
        assert found() == 0


def test_values(redis_server: Server, open_model: OpenModel) -> None:
    server = redis_server()
    llm = open_model(server.url)

    def decoded(kv: KVCache) -> list[int]:
        return [token.id for token in llm.decode(kv, max_tokens=6, ignore_eos=True)]

    whole = llm.prefill(PROMPTS[0])
    kv = whole[:4] + whole[100:]  # nothing that can be computed again from its tokens
    expected = decoded(kv)
    away = kv.to("remote")
    del whole, kv
    assert away.tier == "remote"
    assert decoded(away) == expected
    raw = client(server)
    assert raw.delete(*raw.scan_iter("*:private:*")) > 1
    with pytest.raises(PageLost, match=r"redis://127\.0\.0\.1"):
        decoded(away)
    assert ask(llm, 1)[0] == ask(open_model(), 1)[0], "others go on"
    del away
    llm.close()
    assert not list(raw.scan_iter("*:private:*"))

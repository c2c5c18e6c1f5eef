"""Requests whose values come over the wire: their answers, their fates, and the steps that go on meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.wire.pairs import SOON_S, Pair, local
from tests.cluster.wire.relay import Relay
from tests.cluster.wire.small import nothing_is_held, soon
from tests.samplings import Falling, samplings
from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.split_programs import SharedArrival, decode_program, prefill_program
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.methods import Method, Plain, method
from twostroke.methods.method import Prompt
from twostroke.sampling.params import SamplingParams

Opened = Callable[..., Pair]
PROMPT = list(range(5, 65))
OPTIONS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


SAMPLINGS = samplings(min_tokens=12) | {"grammar": {"constraint": Falling, "temperature": 1.0, "seed": 5}}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
@pytest.mark.parametrize("index", ["off", "radix"])
def test_what_moves_at_any_token_goes_on(sampling: dict[str, Any], index: str, pair: Opened) -> None:
    """Prefilled here, and some tokens decoded; the rest decoded there."""
    both = pair(prefix_index=index, max_step_tokens=17)
    options = OPTIONS | sampling
    whole = local(both.first, PROMPT, **options)
    for cut in (0, 1, 7, len(whole) - 1):
        request = both.request(both.prefilled(PROMPT), PROMPT, **options)
        request.take_over([token.id for token in whole[:cut]])
        both.second.engine.run([request])
        assert list(request.events) == whole[cut:], cut


def test_a_stop_string_is_found_across_the_place(pair: Opened) -> None:
    """Also text that is held back: the beginning of a stop string, and bytes of a character that is not whole."""
    both = pair()
    free = local(both.first, PROMPT, **OPTIONS, temperature=1.5, seed=2)
    text = "".join(token.text for token in free)
    options: dict[str, Any] = OPTIONS | {
        "temperature": 1.5,
        "seed": 2,
        "stop": text[len(text) // 2 : len(text) // 2 + 4],
    }
    whole = local(both.first, PROMPT, **options)
    assert whole[-1].stop is not None
    offer = both.prefilled(PROMPT, receivers=len(whole))
    for cut in range(len(whole)):
        request = both.request(offer, PROMPT, **options)
        request.take_over([token.id for token in whole[:cut]])
        both.second.engine.run([request])
        assert list(request.events) == whole[cut:]


def test_a_value_moves_with_its_answer(pair: Opened) -> None:
    """What was decoded moves too, with the token that is pending; it goes on from there."""
    both = pair()
    whole = both.first.decode(both.first.prefill(PROMPT), max_tokens=20, ignore_eos=True)
    expected = [token.id for token in whole]
    part = both.first.decode(both.first.prefill(PROMPT), max_tokens=11, ignore_eos=True)
    ids = [token.id for token in part]
    offer = both.sender.offer()
    offer.complete(part.kv, {"ids": ids})
    received = both.receiver.receive(offer.handle).result(SOON_S)
    assert received.state == {"ids": expected[:11]}
    rest = both.second.decode(received.kv, max_tokens=9, ignore_eos=True)
    assert [token.id for token in rest] == expected[11:]


def test_a_prefill_that_runs_is_sent_chunk_by_chunk(pair: Opened) -> None:
    """When the last chunk is computed, all before it is there."""
    both = pair(first={"max_step_tokens": 16}, prefix_index="off")
    offer = both.sender.offer()
    asked = Prompt(PROMPT, both.first.tokenizer)
    prefill = Request(lambda: prefill_program(Plain(), asked, offer), SamplingParams(), both.first.tokenizer)
    decode = both.request(offer, PROMPT, **OPTIONS)
    both.second.engine.submit(decode)
    both.first.engine.submit(prefill)
    page, chunks = both.first.pool.page_bytes, 0
    while not prefill.done:
        both.first.engine.step()
        both.second.engine.step()
        chunks += 1
        if not prefill.done:
            assert soon(lambda chunks=chunks: offer.bytes_sent == chunks * page)
    assert chunks == 4
    assert (both.second.engine.num_running, both.second.engine.num_arriving) == (0, 1)
    both.second.engine.finish([decode])
    assert list(decode.events) == local(both.first, PROMPT, **OPTIONS)
    assert offer.bytes_sent == len(PROMPT) * both.first.pool.entry_bytes
    del prefill


@pytest.mark.parametrize(
    "chosen", [Plain(), method("repeat"), method("snap", window=4, budget=12), method("tova", budget=12)], ids=repr
)
def test_preempted_on_both_sides(chosen: Method, pair: Opened) -> None:
    """The prefill starts again while it is sent; the decode loses its value after it came, and the lease is held."""
    both = pair(first={"max_step_tokens": 16}, prefix_index="off")
    offer = both.sender.offer()
    asked = Prompt(PROMPT, both.first.tokenizer)
    prefill = Request(lambda: prefill_program(chosen, asked, offer), SamplingParams(), both.first.tokenizer)
    arrival = SharedArrival(lambda: both.receiver.receive(offer.handle, release=False))
    params = SamplingParams(**OPTIONS)
    decode = Request(lambda: decode_program(chosen, asked, arrival), params, both.second.tokenizer)
    both.second.engine.submit(decode)
    both.first.engine.submit(prefill)
    for _ in range(2):
        both.first.engine.step()
    both.first.engine.placement.preempt(prefill.choices[0])
    both.first.engine.finish([prefill])
    while len(decode.events) < 5:
        both.second.engine.step()
    both.second.engine.placement.preempt(decode.choices[0])
    both.second.engine.finish([decode])
    assert list(decode.events) == local(both.first, PROMPT, chosen, **OPTIONS)
    assert both.receiver.release(offer.handle)
    del prefill


def test_others_decode_while_a_value_is_on_its_way(pair: Opened) -> None:
    both = pair(prefix_index="off")
    offer = both.sender.offer()
    waits, other = both.request(offer, PROMPT, **OPTIONS), both.second.request(PROMPT, SamplingParams(**OPTIONS))
    for request in (waits, other):
        both.second.engine.submit(request)
    while not other.done:
        both.second.engine.step()
    assert (both.second.engine.num_running, both.second.engine.num_arriving) == (0, 1)
    offer.complete(both.first.prefill(PROMPT))
    both.second.engine.cancel(waits)
    nothing_is_held(both.second.pool)


def test_a_value_that_is_lost_is_computed_here_if_that_is_wanted(pair: Opened) -> None:
    both = pair()
    expected = local(both.first, PROMPT, **OPTIONS)
    for most in (0, 300, 40_000):
        offer = both.prefilled(PROMPT)
        with Relay(offer.handle, most=most) as relay:
            alone = both.request(relay.handle, PROMPT, **OPTIONS)
            with pytest.raises(WireError):
                both.second.engine.run([alone])
        here = both.request(relay.handle, PROMPT, here=True, **OPTIONS)
        both.second.engine.run([here])
        assert list(here.events) == expected
        offer.fail("it is not needed")


def test_a_value_waits_for_room_as_a_prompt_does(pair: Opened) -> None:
    """A pool that is too full for both: it may come, and lose its pages to an older request again."""
    both = pair()
    page = both.first.pool.page_bytes
    both = pair(second={"kv_bytes": 8 * page}, prefix_index="off")
    busy = both.second.request(list(range(9, 70)), SamplingParams(max_tokens=40, ignore_eos=True))
    both.second.engine.submit(busy)
    both.second.engine.step()
    request = both.request(both.prefilled(PROMPT), PROMPT, here=True, **OPTIONS)
    both.second.engine.submit(request)
    both.second.engine.finish([busy, request])
    assert list(request.events) == local(both.first, PROMPT, **OPTIONS)
    assert len(busy.events) == 40


def test_several_choices_share_one_transfer(pair: Opened) -> None:
    both = pair(prefix_index="off")
    offer = both.prefilled(PROMPT)
    options: dict[str, Any] = OPTIONS | {"temperature": 1.0, "seed": 3, "n": 3}
    request = both.request(offer, PROMPT, **options)
    both.second.engine.run([request])

    def order(token: Token) -> tuple[int, int]:
        return token.choice, token.index

    assert sorted(request.events, key=order) == sorted(local(both.first, PROMPT, **options), key=order)
    assert offer.bytes_sent == len(PROMPT) * both.first.pool.entry_bytes


def test_choices_that_have_not_started_keep_no_page(pair: Opened) -> None:
    """Their value lies in the host."""
    both = pair(prefix_index="off")
    offer, pool = both.prefilled(PROMPT), both.second.pool
    arrival = SharedArrival(lambda: both.receiver.receive(offer.handle), 2)
    first = arrival.start().result(SOON_S)
    assert pool.num_used == first.kv.num_pages == 4
    expected = first.kv.entries()
    del first
    assert soon(lambda: (pool.num_used, pool.num_copies) == (0, 4))
    second = arrival.start().result(0)
    assert (second.kv.tier, second.kv.entries().tobytes()) == ("host", expected.tobytes())
    del second
    assert (pool.num_used, pool.num_copies) == (0, 0)


def test_canonical_values_are_found_by_others(pair: Opened) -> None:
    both = pair()
    received = both.receiver.receive(both.prefilled(PROMPT).handle).result(SOON_S)
    assert received.canonical
    assert both.second.model.index is not None
    both.second.model.index.insert(received.kv)
    request = both.second.request(PROMPT, SamplingParams(**OPTIONS))
    both.second.engine.run([request])
    assert request.cached_tokens == len(PROMPT) // 16 * 16
    assert list(request.events) == local(both.first, PROMPT, **OPTIONS)

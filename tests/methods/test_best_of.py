"""Best-of-n returns the likeliest of its candidates completely."""

from collections.abc import Callable

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.methods import BestOf
from twostroke.sampling.params import SamplingParams


def test_the_likeliest_candidate(tiny_llm: Callable[..., LLM]) -> None:
    llm, params = tiny_llm(), SamplingParams(temperature=1.0, seed=11, max_tokens=15, ignore_eos=True)

    def candidates() -> Program:
        kv = yield Prefill([5, 6, 7])
        return (yield [Decode(kv, emit=False, stream=i, stats=True) for i in range(5)])

    request = Request(candidates, params, llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    runs = request.result
    assert len({tuple(run.tokens) for run in runs}) == 5
    best = max(runs, key=lambda run: sum(s.logprob for s in run.sampled) / len(run.sampled))
    made = llm.generate([[5, 6, 7]], params, method=BestOf(candidates=5))[0]
    assert [token.id for token in made.tokens] == best.tokens
    assert made.finish_reason == "length"


def test_one_candidate_is_the_plain_request(tiny_llm: Callable[..., LLM]) -> None:
    llm, params = tiny_llm(), SamplingParams(temperature=1.0, seed=11, max_tokens=15, ignore_eos=True)
    plain, best = llm.generate([[5, 6]], params)[0], llm.generate([[5, 6]], params, method=BestOf(candidates=1))[0]
    assert [token.id for token in best.tokens] == [token.id for token in plain.tokens]

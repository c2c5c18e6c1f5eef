"""Generated answers: whether they are right, how they compare with the baseline's, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.benchmark.pace import Pace
from twostroke.engine.sampling import SamplingParams
from twostroke.engine.strokes import Decode, Prefill, Program, Stroke
from twostroke.evals.contenders import Contender
from twostroke.evals.forced import watched
from twostroke.evals.measure import KEPT, Bench, Case, Known, Measure, Metric, Record, add_ratios
from twostroke.evals.task import stream


class Answers(Measure):
    """Greedy decoding of every item with every method, in turn, batch by batch."""

    name = "answers"
    metrics = (
        Metric("correct", "right", "share", "the answer is right, as the task grades it", pairs=True),
        Metric("same_first", "first token as baseline", "share", "the first token is the baseline's"),
        Metric("same", "answer as baseline", "share", "all tokens are the baseline's", pairs=True),
        *KEPT,
        Metric("kv_bytes", "KV at the end", "bytes", "K and V of the value that the last stroke ends with"),
        Metric("prefilled_tokens", "prefilled tokens", "count", "tokens that prefills asked for"),
        Metric("refreshes", "prefills in mid-answer", "count", "prefills after the first decode"),
        Metric("output_tokens", "output tokens", "count", "tokens generated, an ending token included"),
        Metric("ttft_s", "TTFT", "seconds", "first token - arrival; a batch arrives together", pairs=True),
        Metric("itl_mean_s", "ITL", "seconds", "mean gap between an answer's consecutive tokens", pairs=True),
        Metric("total_s", "total time", "seconds", "end - arrival; a batch arrives together"),
    )
    blind = (
        "An answer of one token is decided by the prefill: the first token's logits come from the whole cache, "
        "whatever is kept of it. TTFT and ITL are those of a batch that runs together, not of a request alone."
    )

    def measure(self, bench: Bench, cases: Sequence[Case], known: Sequence[Known]) -> list[dict[str, Record]]:
        records: list[dict[str, Record]] = [{} for _ in cases]
        # In another order for every batch, lest one method always comes after the same other.
        order = stream(0, cases[0].item.id).sample(bench.contenders, len(bench.contenders))
        for contender in order:
            if bench.timings:
                bench.forget()
            for made, record in zip(records, self._answers(bench, contender, cases), strict=True):
                made[contender.name] = record
        for made in records:
            add_ratios(made, bench.baseline.name)
            ids = made[bench.baseline.name]["token_ids"]
            for record in made.values():
                record["same"], record["same_first"] = record["token_ids"] == ids, record["token_ids"][:1] == ids[:1]
        return records

    def _answers(self, bench: Bench, contender: Contender, cases: Sequence[Case]) -> list[Record]:
        watches = [Watch() for _ in cases]
        programs = [
            lambda case=case, watch=watch: watch.over(contender.method.program(case.prompt))
            for case, watch in zip(cases, watches, strict=True)
        ]
        requests = bench.run(programs, SamplingParams(max_tokens=bench.max_tokens))
        records: list[Record] = []
        for case, request, watch in zip(cases, requests, watches, strict=True):
            tokens = list(request.events)
            text = "".join(token.text for token in tokens)
            pace = Pace.of(request.timings, request.prefilled_tokens - request.cached_tokens)
            assert request.timings.finished is not None
            records.append(
                {
                    "text": text,
                    "token_ids": [token.id for token in tokens],
                    "finish_reason": tokens[-1].finish_reason if tokens else None,
                    "correct": bench.task.correct(case.item, text),
                    "kept_bytes": watch.kept_bytes,
                    "refreshes": watch.refreshes,
                    "kv_bytes": request.kv_bytes,
                    "prefilled_tokens": request.prefilled_tokens,
                    "cached_tokens": request.cached_tokens,
                    "output_tokens": len(tokens),
                    "ttft_s": pace.ttft_s if bench.timings else None,
                    "itl_mean_s": pace.itl_mean_s if bench.timings else None,
                    "total_s": request.timings.finished - request.timings.arrival if bench.timings else None,
                }
            )
        return records


class Watch:
    """Notes what a program asks for. A preempted one starts over, and so does its watch.

    Attributes:
        kept_bytes: K and V of the value that the first decode starts from.
        refreshes: prefills after it.
    """

    def over(self, program: Program) -> Program:
        self.kept_bytes, self.refreshes = 0, 0
        return watched(program, self._note)

    def _note(self, stroke: Stroke) -> None:
        if isinstance(stroke, Decode):
            self.kept_bytes = self.kept_bytes or stroke.kv.nbytes
        elif isinstance(stroke, Prefill) and self.kept_bytes:
            self.refreshes += 1

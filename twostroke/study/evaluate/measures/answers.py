"""Generated answers: whether they are right, how they compare with the baseline's, and what they cost."""

from collections.abc import Sequence

from twostroke.engine.strokes import Decode, Prefill, Program, Stroke
from twostroke.engine.timings import Pace
from twostroke.methods.method import method_facts
from twostroke.study.evaluate.contenders import Contender
from twostroke.study.evaluate.forced_text import with_stroke_times
from twostroke.study.evaluate.measure import KEPT, Case, Comparison, Measure, Metric, Record, RecordsByMeasure
from twostroke.study.evaluate.task import random_stream


class Answers(Measure):
    """Every item decoded with every method, in turn, batch by batch."""

    name = "answers"
    metrics = (
        Metric("correct", "right", "share", "the answer is right, as the task grades it", True),
        Metric("same_first", "first token as baseline", "share", "the first token is the baseline's"),
        Metric("same", "answer as baseline", "share", "all tokens are the baseline's", pairs=True),
        *KEPT,
        Metric("kv_bytes", "KV at the end", "bytes", "K and V of the value that the last stroke ends with"),
        Metric("prefilled_tokens", "prefilled tokens", "count", "tokens that prefills asked for"),
        Metric("dropped_tokens", "tokens dropped", "count", "of the prompt, before it was prefilled"),
        Metric("refreshes", "refreshes", "count", "as a refreshing method counts them"),
        Metric("late_prefills", "prefills in mid-answer", "count", "prefills after the first decode, probes included"),
        Metric("teacher_tokens", "teacher tokens in mid-answer", "count", "entered by the engine's own model in them"),
        Metric("late_s", "time in mid-answer prefills", "seconds", "from stroke to result, what runs beside included"),
        Metric("output_tokens", "output tokens", "count", "tokens generated, an ending token included", True),
        Metric("characters", "characters", "count", "of the answer's text"),
        Metric("ttft_s", "TTFT", "seconds", "first token - arrival; a batch arrives together", True),
        Metric("itl_mean_s", "ITL", "seconds", "mean gap between an answer's consecutive tokens", pairs=True),
        Metric("itl_ratio", "ITL ratio", "ratio", "ITL / the baseline's on the same item"),
        Metric("decode_rate", "decode tokens/s", "rate", "(n - 1) / (last token - first), refreshes included"),
        Metric("total_s", "total time", "seconds", "end - arrival; a batch arrives together"),
    )
    headlines = ("correct", "output_tokens", "refreshes", "teacher_tokens", "ttft_s", "itl_ratio", "decode_rate")
    blind = (
        "The prefill alone decides an answer of one token: the first token's logits come from the whole cache, "
        "however little is kept. TTFT and ITL are those of a batch that runs together, not of a request alone: "
        "for the latter, measure with one item at a time."
    )

    def measure(
        self, comparison: Comparison, cases: Sequence[Case], known: Sequence[RecordsByMeasure]
    ) -> list[dict[str, Record]]:
        records: list[dict[str, Record]] = [{} for _ in cases]
        # A different order for every batch, so that no method always follows the same other one.
        order = random_stream(0, cases[0].item.id).sample(comparison.contenders, len(comparison.contenders))
        for contender in order:
            if comparison.timings:
                comparison.clear_prefix_indexes()
            for made, record in zip(records, self._answers(comparison, contender, cases), strict=True):
                made[contender.name] = record
        for made in records:
            baseline = made[comparison.baseline.name]
            ids, gap = baseline["token_ids"], baseline["itl_mean_s"]
            for record in made.values():
                record["same"], record["same_first"] = record["token_ids"] == ids, record["token_ids"][:1] == ids[:1]
                record["itl_ratio"] = record["itl_mean_s"] / gap if gap and record["itl_mean_s"] else None
        return records

    def _answers(self, comparison: Comparison, contender: Contender, cases: Sequence[Case]) -> list[Record]:
        watches = [StrokeRecord() for _ in cases]
        programs = [
            lambda case=case, watch=watch: watch.record(contender.method.program(case.prompt))
            for case, watch in zip(cases, watches, strict=True)
        ]
        requests = comparison.run(programs, [comparison.params(case.item) for case in cases])
        records: list[Record] = []
        for case, request, watch in zip(cases, requests, watches, strict=True):
            tokens = list(request.events)
            text = "".join(token.text for token in tokens)
            pace = Pace.of(request.timings, request.prefilled_tokens - request.cached_tokens)
            facts = method_facts(request.result)
            assert request.timings.finished is not None
            records.append(
                {
                    "text": text,
                    "token_ids": [token.id for token in tokens],
                    "finish_reason": tokens[-1].finish_reason if tokens else None,
                    "correct": comparison.task.correct(case.item, text),
                    "kept_bytes": watch.kept_bytes,
                    "facts": facts,
                    "dropped_tokens": facts.get("dropped_tokens"),
                    "refreshes": len(facts["at"]) if "at" in facts else None,
                    "late_prefills": watch.late_prefills,
                    "teacher_tokens": watch.teacher_tokens,
                    "late_s": watch.late_s if comparison.timings else None,
                    "kv_bytes": request.kv_bytes,
                    "prefilled_tokens": request.prefilled_tokens,
                    "cached_tokens": request.cached_tokens,
                    "output_tokens": len(tokens),
                    "characters": len(text),
                    "ttft_s": pace.ttft_s if comparison.timings else None,
                    "itl_mean_s": pace.itl_mean_s if comparison.timings else None,
                    "decode_rate": pace.decode_tokens_per_second if comparison.timings else None,
                    "total_s": request.timings.finished - request.timings.arrival if comparison.timings else None,
                }
            )
        return records


class StrokeRecord:
    """Records what a program asked for. When a preempted program starts again, so does its record.

    Attributes:
        kept_bytes: K and V of the value that the first decode starts from.
        late_prefills: prefills after it.
        teacher_tokens: those that the engine's own model entered in them.
        late_s: seconds that they took.
    """

    def record(self, program: Program) -> Program:
        self.kept_bytes = self.late_prefills = self.teacher_tokens = 0
        self.late_s = 0.0
        return with_stroke_times(program, self._note)

    def _note(self, stroke: Stroke, seconds: float) -> None:
        if isinstance(stroke, Decode):
            self.kept_bytes = self.kept_bytes or stroke.kv.nbytes
        elif isinstance(stroke, Prefill) and self.kept_bytes:
            self.late_prefills += 1
            self.late_s += seconds
            if stroke.model is None:
                pending = stroke.after is not None and stroke.after.pending is not None
                self.teacher_tokens += len(stroke.tokens) + pending

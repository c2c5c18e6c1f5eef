"""Prefill and decode on machines of their own (DistServe, Zhong et al. 2024, arXiv:2401.09670), or not."""

from dataclasses import dataclass, replace

from twostroke.study.plan.plan import Plan


@dataclass(frozen=True)
class Disaggregation:
    """The verdict on prefill and decode on separate workers.

    Attributes:
        pays: whether it is advised.
        why: the reason, in one clause.
        kv_bytes: bytes of a prompt's KV, which cross the link once.
        transfer_s: seconds of that transfer; None if the link is unknown.
        prefill_s, decode_s: seconds of a prefill worker and of a decode worker that a request takes.
    """

    pays: bool
    why: str
    kv_bytes: int
    transfer_s: float | None
    prefill_s: float
    decode_s: float

    @property
    def prefill_per_decode(self) -> float:
        """Prefill workers for each decode worker, where both are to be busy."""
        return self.prefill_s / self.decode_s


def assess_disaggregation(plan: Plan) -> Disaggregation:
    """Judge whether to disaggregate a plan. No queueing is counted."""
    load = plan.workload
    size = plan.model.kv_bytes(plan.technique.kept(load.prompt))
    decode = load.output * plan.decode().seconds / load.concurrency
    pays, why = _decided(replace(plan, disaggregated=False))
    return Disaggregation(pays, why, size, plan.transfer_s, plan.prefill.seconds, decode)


def _decided(plan: Plan) -> tuple[bool, str]:
    load, transfer = plan.workload, plan.transfer_s
    if not plan.fits:
        return False, "one worker does not even fit"
    if load.concurrency == 1:
        return False, "nobody decodes beside a prefill"
    if load.itl_ms is None:
        return False, "no objective for ITL asks for it"
    if plan.missed() not in ([], ["both together"]):
        return False, f"{' and '.join(plan.missed())} would still be missed"
    if not plan.missed():
        chunk, ttft = plan.largest_chunk(), plan.ttft_beside_ms
        return False, f"chunks of {chunk:,} tokens keep both objectives on the same devices (TTFT {ttft:,.0f} ms)"
    if transfer is None:
        return False, "the link is unknown"
    if transfer > plan.prefill.seconds:
        return False, "the link takes longer than the prefill"
    if replace(plan, disaggregated=True).missed():
        return False, "TTFT would be missed with the transfer"
    return True, "no chunk keeps TTFT and ITL together, and the link is faster than the prefill"

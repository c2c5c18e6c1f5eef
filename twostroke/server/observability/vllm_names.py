"""The same numbers under the names that vLLM gives them, so that dashboards made for it show this server.

The names are vLLM's, from its page "Production Metrics". What they mean is the same; ours have more (`metrics.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from twostroke.kv.pool import PagePool


@dataclass(frozen=True)
class VllmName:
    """A family under vLLM's name."""

    vllm: str  # the name without `vllm:`
    ours: str  # the name of the family that it repeats, without `twostroke_`
    # labels of ours that a sample must have; vLLM has a family of its own for them
    where: Mapping[str, str] = field(default_factory=dict[str, str])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])  # what vLLM calls a label of ours


NAMES = (
    VllmName("num_requests_running", "requests", {"state": "running"}),
    VllmName("num_requests_waiting", "requests", {"state": "waiting"}),
    VllmName("kv_cache_usage_perc", "kv_usage_ratio"),
    VllmName("prefix_cache_queries", "prefix_tokens_queried"),
    VllmName("prefix_cache_hits", "prefix_tokens_hit"),
    VllmName("num_preemptions", "preemptions"),
    VllmName("prompt_tokens", "tokens", {"kind": "prompt"}),
    VllmName("generation_tokens", "tokens", {"kind": "output"}),
    VllmName("request_success", "finish_reasons", renamed={"reason": "finished_reason"}),
    VllmName("iteration_tokens_total", "iteration_tokens"),
    VllmName("time_to_first_token_seconds", "time_to_first_token_seconds"),
    VllmName("inter_token_latency_seconds", "inter_token_latency_seconds"),
    VllmName("time_per_output_token_seconds", "inter_token_latency_seconds"),  # its former name
    VllmName("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
    VllmName("e2e_request_latency_seconds", "request_seconds"),
    VllmName("request_queue_time_seconds", "queue_seconds"),
    VllmName("request_inference_time_seconds", "inference_seconds"),
    VllmName("request_prefill_time_seconds", "prefill_seconds"),
    VllmName("request_decode_time_seconds", "decode_seconds"),
    VllmName("request_prompt_tokens", "request_prompt_tokens"),
    VllmName("request_generation_tokens", "request_output_tokens"),
    VllmName("request_params_max_tokens", "request_max_tokens"),
    VllmName("request_params_n", "request_choices"),
)


class VllmNames(Collector):
    """Repeats families of a registry under vLLM's names when it is scraped."""

    def __init__(self, registry: CollectorRegistry, pool: PagePool, model: str) -> None:
        """`model` is what clients call the model."""
        self._registry, self._pool = registry, pool
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        families = {family.name.removeprefix("twostroke_"): family for family in self._registry.collect()}
        for name in NAMES:
            if name.ours in families:  # not those of an engine that has not been asked yet
                yield self._renamed(name, families[name.ours])
        labels = ["block_size", "num_gpu_blocks", "engine"]
        info = GaugeMetricFamily("vllm:cache_config_info", "The pool", labels=labels)
        info.add_metric([str(self._pool.page_size), str(self._pool.num_pages), "0"], 1)
        yield info

    def _renamed(self, name: VllmName, family: Metric) -> Metric:
        made = Metric(f"vllm:{name.vllm}", family.documentation, family.type)
        for sample in family.samples:
            if name.where.items() <= sample.labels.items():
                renamed = {"replica": "engine", **name.renamed}
                labels = {renamed.get(key, key): value for key, value in sample.labels.items()}
                labels = self._labels | {key: value for key, value in labels.items() if key not in name.where}
                suffix = sample.name.removeprefix(f"twostroke_{name.ours}")
                made.samples.append(Sample(f"vllm:{name.vllm}{suffix}", labels, sample.value))
        return made

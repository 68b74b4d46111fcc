"""Prometheus metrics: the engine's own counts, read when scraped, and what only the server sees.

Each is named `treadle_...`; the ones in ALIASES are shown under vLLM's names too, with its `model_name` label,
so that dashboards made for it work.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from treadle.runtime.protocol import SchedulerStats

disable_created_metrics()

GAUGES = {
    "treadle_num_requests_running": ("num_running", "Sequences in the running batch"),
    "treadle_num_requests_waiting": ("num_waiting", "Sequences that wait for a place in the batch"),
    "treadle_kv_cache_usage_ratio": ("kv_usage", "Share of KV blocks in use, 0 to 1"),
    "treadle_kv_blocks": ("num_blocks", "KV blocks of the pool"),
    "treadle_kv_blocks_free": ("num_free_blocks", "KV blocks that are free"),
}
COUNTERS = {
    "treadle_prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache"),
    "treadle_prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache"),
    "treadle_preemptions": ("num_preemptions", "Sequences preempted for want of KV blocks"),
    "treadle_sequences_aborted": ("num_aborted", "Sequences aborted in the engine; each of n counts"),
    "treadle_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests, cached ones included"),
    "treadle_generation_tokens": ("generation_tokens", "Tokens generated"),
    "treadle_engine_steps": ("num_steps", "Steps of the engine"),
    "treadle_compilations_after_ready": ("compilations_after_ready", "Compilations since ready; should stay 0"),
}
ALIASES = {
    "treadle_num_requests_running": "vllm:num_requests_running",
    "treadle_num_requests_waiting": "vllm:num_requests_waiting",
    "treadle_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "treadle_prefix_cache_queries": "vllm:prefix_cache_queries",
    "treadle_prefix_cache_hits": "vllm:prefix_cache_hits",
    "treadle_preemptions": "vllm:num_preemptions",
    "treadle_prompt_tokens": "vllm:prompt_tokens",
    "treadle_generation_tokens": "vllm:generation_tokens",
    "treadle_completions_finished": "vllm:request_success",
    "treadle_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "treadle_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "treadle_request_latency_seconds": "vllm:e2e_request_latency_seconds",
}
_FINE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_COARSE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, *, aliases: bool = True):
        self.registry = CollectorRegistry()
        self.stats = SchedulerStats()
        self.inflight = 0
        self.requests = self._counter("treadle_http_requests", "Requests answered", ("endpoint", "status"))
        self.finished = self._counter("treadle_completions_finished", "Completions that ended", ("finished_reason",))
        self.aborted = self._counter(
            "treadle_requests_aborted", "Requests whose client went away before the answer; one with n > 1 counts once"
        )
        self.first_token = self._histogram("treadle_time_to_first_token_seconds", "From request to first token", _FINE)
        self.between_tokens = self._histogram("treadle_inter_token_latency_seconds", "Between tokens of a stream", _FINE)
        self.latency = self._histogram("treadle_request_latency_seconds", "From request to the end of its answer", _COARSE)
        self.registry.register(_StatsCollector(self))
        self._aliases = CollectorRegistry()
        if aliases:
            self._aliases.register(_AliasCollector(self.registry, model_name))

    def text(self) -> bytes:
        """The exposition in Prometheus's text format."""
        return generate_latest(self.registry) + generate_latest(self._aliases)

    def _counter(self, name: str, doc: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, doc, labels, registry=self.registry)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, doc, buckets=buckets, registry=self.registry)


class _StatsCollector(Collector):
    """The last statistics of the engine."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        for name, (field, doc) in GAUGES.items():
            yield GaugeMetricFamily(name, doc, value=getattr(stats, field))
        yield GaugeMetricFamily(
            "treadle_http_requests_inflight", "Requests admitted and not answered yet", value=self._metrics.inflight
        )
        for name, (field, doc) in COUNTERS.items():
            yield CounterMetricFamily(name, doc, value=getattr(stats, field))
        modes = CounterMetricFamily("treadle_graph_mode_steps", "Steps by graph mode", labels=["mode"])
        for mode, count in stats.graph_modes.items():
            modes.add_metric([mode], count)
        yield modes


class _AliasCollector(Collector):
    """The metrics of another registry under their other names."""

    def __init__(self, source: CollectorRegistry, model_name: str):
        self._source = source
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            alias = ALIASES.get(metric.name)
            if alias is None:
                continue
            renamed = Metric(alias, metric.documentation, metric.type)
            for sample in metric.samples:
                name = alias + sample.name.removeprefix(metric.name)
                renamed.samples.append(Sample(name, {**self._labels, **sample.labels}, sample.value))
            yield renamed

    def describe(self) -> Iterator[Metric]:
        return iter(())

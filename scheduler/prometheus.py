"""The figures of an engine in Prometheus' text format. Names are vLLM's where it has the same thing, as `paged_...`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from scheduler.metrics import Metrics


def client() -> Any:
    """The library. Raises ConfigError where it is not installed."""
    try:
        import prometheus_client
    except ImportError:
        raise ConfigError(
            "Prometheus text needs the package prometheus-client: pip install 'paged-kv[metrics]'"
        ) from None
    return prometheus_client


def exposition(metrics: Metrics) -> str:
    """All metrics, ending in a newline. The library's global registry is not touched."""
    library = client()
    registry = library.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics))
    text: bytes = library.generate_latest(registry)
    return text.decode()


def check(path: Path, *others: Path) -> None:
    """Refuse before a job what cannot be written after it, and the job's `others` files. Raises ConfigError."""
    client()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"metrics {path} is a folder, or in a folder that does not exist")
    if path.exists() and not path.is_file():
        raise ConfigError(f"metrics {path} is no file, and would be replaced by one: name another place")
    for mine in (path, _part(path)):
        for other in others:
            same = mine.samefile(other) if mine.exists() and other.exists() else mine.resolve() == other.resolve()
            if same:
                raise ConfigError(f"metrics {path} would replace {other}, which this job reads or writes: name another")
    try:
        _part(path).write_bytes(b"")
        _part(path).unlink()
    except OSError as error:
        raise ConfigError(f"metrics {path} cannot be written: {error.strerror}: name another place") from None


def write(metrics: Metrics, path: Path) -> None:
    """Put the text into a file, whole at once: a collector that reads text files may look at any moment."""
    part = _part(path)
    part.write_text(exposition(metrics))
    part.replace(path.resolve())


def _part(path: Path) -> Path:
    """Where the text is until it is whole."""
    path = path.resolve()
    return path.with_name(f".{path.name}.part")


class _Collector:
    """Reads what is there when it is asked."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        stats = self.metrics.stats
        usage = stats.used_pages / stats.total_pages if stats.total_pages else 0.0
        yield GaugeMetricFamily("paged_num_requests_running", "Requests that run.", stats.running)
        yield GaugeMetricFamily("paged_num_requests_waiting", "Requests that wait, preempted ones too.", stats.waiting)
        yield GaugeMetricFamily("paged_kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", usage)
        pages = GaugeMetricFamily("paged_kv_cache_pages", "Pages by state.", labels=["state"])
        for state in ("free", "cached", "used"):
            pages.add_metric([state], getattr(stats, f"{state}_pages"))
        yield pages

    def _counters(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily

        metrics, stats = self.metrics, self.metrics.stats
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests, cached ones included.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.output_tokens),
            ("computed_tokens", "Tokens that steps computed.", stats.computed_tokens),
            ("recomputed_tokens", "Of those, computed before and lost to a preemption.", stats.recomputed_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("num_preemptions", "Times that a running request had to wait again.", stats.preemptions),
        ):
            yield CounterMetricFamily(f"paged_{name}", text, value)
        ended = CounterMetricFamily(
            "paged_request_success", "Requests that ended, by reason.", labels=["finished_reason"]
        )
        for reason, count in metrics.ended.items():
            ended.add_metric([reason], count)
        yield ended
        spent = CounterMetricFamily("paged_step_seconds", "Time in steps, by what it was spent on.", labels=["phase"])
        for phase in ("schedule", "execute", "update", "output"):
            spent.add_metric([phase], getattr(metrics, f"{phase}_s"))
        yield spent

    def _histograms(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import HistogramMetricFamily

        metrics = self.metrics
        for name, text, distribution in (
            ("request_queue_time_seconds", "From arrival to first admission.", metrics.queue),
            ("time_to_first_token_seconds", "From arrival to the first token.", metrics.first_token),
            ("inter_token_latency_seconds", "Between two steps that gave a request tokens.", metrics.between_tokens),
            ("e2e_request_latency_seconds", "From arrival to the end of a request not aborted.", metrics.e2e),
            ("iteration_tokens_total", "Tokens computed in a step.", metrics.step_tokens),
        ):
            buckets = [
                ("+Inf" if bound == math.inf else str(bound), float(count)) for bound, count in distribution.buckets()
            ]
            yield HistogramMetricFamily(f"paged_{name}", text, buckets, distribution.total)

"""Prometheus text: it parses, says what the data say, and has the names that docs/metrics.md lists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import prometheus_client
import pytest
from fakes import fake_engine
from prometheus_client.parser import text_string_to_metric_families

from paged import ConfigError, Metrics, SamplingParams
from scheduler import prometheus
from scheduler.engine import Engine

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def engine() -> Engine:
    """In the middle of its work: some requests have ended, one by abort, some run, some wait."""
    engine, _ = fake_engine(12, 4, seqs=2)
    for i in range(8):
        engine.add(str(i), [1, 2, 3, 4, 5, i], SamplingParams(temperature=0, max_tokens=3 + i))
    for _ in range(10):
        engine.step()
    engine.abort("3")
    engine.step()
    assert engine.stats.running
    assert engine.stats.waiting
    return engine


def samples(text: str) -> dict[str, float]:
    """By name with labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_the_text_says_what_the_data_say(engine: Engine) -> None:
    found, stats, metrics = samples(engine.metrics.prometheus()), engine.stats, engine.metrics
    wanted: dict[str, float] = {
        "paged_num_requests_running": stats.running,
        "paged_num_requests_waiting": stats.waiting,
        "paged_kv_cache_usage_perc": stats.used_pages / 12,
        "paged_prompt_tokens_total": stats.prompt_tokens,
        "paged_generation_tokens_total": stats.output_tokens,
        "paged_computed_tokens_total": stats.computed_tokens,
        "paged_recomputed_tokens_total": stats.recomputed_tokens,
        "paged_prefix_cache_queries_total": stats.prompt_tokens,
        "paged_prefix_cache_hits_total": stats.cached_tokens,
        "paged_num_preemptions_total": stats.preemptions,
    }
    for state, pages in (("free", stats.free_pages), ("cached", stats.cached_pages), ("used", stats.used_pages)):
        wanted[f"paged_kv_cache_pages{{state={state}}}"] = pages
    for reason, count in metrics.ended.items():
        wanted[f"paged_request_success_total{{finished_reason={reason}}}"] = count
    for phase in ("schedule", "execute", "update", "output"):
        wanted[f"paged_step_seconds_total{{phase={phase}}}"] = getattr(metrics, f"{phase}_s")
    for name, distribution in {
        "request_queue_time_seconds": metrics.queue,
        "time_to_first_token_seconds": metrics.first_token,
        "inter_token_latency_seconds": metrics.between_tokens,
        "e2e_request_latency_seconds": metrics.e2e,
        "iteration_tokens_total": metrics.step_tokens,
    }.items():
        assert distribution.count > 0
        wanted[f"paged_{name}_count"] = distribution.count
        wanted[f"paged_{name}_sum"] = distribution.total
        for bound, count in distribution.buckets():
            wanted[f"paged_{name}_bucket{{le={'+Inf' if bound == float('inf') else bound}}}"] = count
    assert found == wanted
    assert found["paged_request_success_total{finished_reason=abort}"] == 1


def test_counters_never_fall_and_histograms_are_cumulative(engine: Engine) -> None:
    before = samples(engine.metrics.prometheus())
    while engine.has_work:
        engine.step()
        after = samples(engine.metrics.prometheus())
        for name, value in after.items():
            if not name.startswith(("paged_num_requests", "paged_kv_cache")):
                assert value >= before[name], name
        before = after
    assert before["paged_num_requests_running"] == 0


def test_the_docs_list_what_is_exported_with_its_type() -> None:
    exported = re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().prometheus(), re.MULTILINE)
    assert re.findall(r"^\| `(paged_\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE) == exported


def test_an_engine_that_has_done_nothing_can_be_asked() -> None:
    assert set(samples(Metrics().prometheus()).values()) == {0.0}


def test_the_global_registry_is_not_touched() -> None:
    Metrics().prometheus()
    assert "paged_" not in prometheus_client.generate_latest().decode()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for call in (Metrics().prometheus, lambda: prometheus.check(tmp_path / "x.prom")):
        with pytest.raises(ConfigError, match=r"prometheus-client: pip install 'paged-kv\[metrics\]'"):
            call()


def test_a_file_is_written_whole_and_over_an_old_one(tmp_path: Path) -> None:
    path, metrics = tmp_path / "x.prom", Metrics()
    path.write_text("old")
    prometheus.check(path)
    prometheus.write(metrics, path)
    assert path.read_text() == metrics.prometheus()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_refused_before_the_job(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "x.prom"):
        with pytest.raises(ConfigError, match="is a folder, or in a folder that does not exist"):
            prometheus.check(path)

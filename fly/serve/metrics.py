"""Prometheus metrics. A metric that vLLM has too keeps vLLM's name and meaning, so that dashboards and tools made for
vLLM work; the names of the others begin with ``fly:``. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fly.engine.job import Job, Request
from fly.engine.worker import Load
from fly.runner.request import Stats, Token
from fly.types import Why

__all__ = ["Measured", "Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 32, 48, 64)
_FRESH = 0.1  # seconds for which the written text is reused
_MOST_CLAUSES = 100  # limit of label values: requests compose their own clauses, and Prometheus keeps each for ever


class Metrics:
    """The counters, gauges and histograms of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.seconds = 1.0  # moving average of a job's duration
        self._text, self._written = b"", -1.0
        self._clauses: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            metric = Counter(name, text, ("model_name", *labels), registry=self.registry)
            return metric if labels else metric.labels(model)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            metric = Gauge(name, text, ("model_name", *labels), registry=self.registry)
            return metric if labels else metric.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry).labels(model)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were kept.")
        self._by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were kept, by place in the draft.",
            "position",
        )
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = counter("vllm:generation_tokens", "Tokens that were generated.")
        self._cached = counter("vllm:prefix_cache_hits", "Tokens of prompts that were cached already.")
        self._asked = counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up.")
        self._finished = counter("vllm:request_success", "Completions that ended, by reason.", "finished_reason")
        self._preempted = counter("vllm:num_preemptions", "Times a request had to make room for others.")
        self._running = gauge("vllm:num_requests_running", "Completions that take part in steps.")
        self._waiting = gauge("vllm:num_requests_waiting", "Completions that wait for their turn.")
        self._cache = gauge("vllm:kv_cache_usage_perc", "Share of the target's cache that is held, 0 to 1.")
        self.first = histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between = histogram("vllm:inter_token_latency_seconds", "Between two steps of a request that gave tokens.")
        self.each = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens after the first."
        )
        self.request_seconds = histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.queue = histogram("vllm:request_queue_time_seconds", "From a request's arrival until the engine has it.")

        self._memory = gauge("fly:rank_load_peak_bytes", "Most memory a rank had resident until it had loaded.", "rank")
        self._draft_cache = gauge("fly:draft_cache_usage_perc", "Share of a drafter's cache that is held.", "level")
        self._k = histogram("fly:draft_length", "Tokens that were drafted in a round (K as it was chosen).", _COUNTS)
        self._stands = counter("fly:tokens", "Generated tokens, by why they were kept.", "reason")
        self._relaxed = counter(
            "fly:relaxed_tokens", "Mismatches that were kept, by the conditions that excused them.", "clause"
        )
        self._gate_asked = counter("fly:gate_asked", "Mismatches that a condition was asked about.", "clause")
        self._gate_passed = counter("fly:gate_passed", "Those where it held.", "clause")
        self._refused = counter("fly:requests_refused", "Requests that were refused, by HTTP status.", "status")
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model, reason)

    def text(self, load: Load | None = None) -> bytes:
        """Return the metrics in Prometheus' text format, with the engine's load if given. The text is written anew at
        most every 0.1 s, because anybody may ask for it."""
        if time.monotonic() > self._written + _FRESH:
            self._load(load or Load())
            self._text, self._written = generate_latest(self.registry), time.monotonic()
        return self._text

    def loaded(self, peaks: list[int]) -> None:
        """Record the peak memory of loading, in bytes per rank."""
        for rank, peak in enumerate(peaks):
            self._memory.labels(self._model, str(rank)).set(peak)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(self._model, str(status)).inc()

    def _load(self, load: Load) -> None:
        """Set the gauges of the engine's load."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        for level, share in enumerate(load.caches):
            if level:
                self._draft_cache.labels(self._model, str(level - 1)).set(share)
            else:
                self._cache.set(share)

    def step(self, tokens: list[Token], drafts: list[tuple[int, int]]) -> None:
        """Record one step of one completion: its tokens and, for each round with a draft, how many tokens were drafted
        and accepted."""
        self._generated.inc(len(tokens))
        for why, count in Counts(token.why for token in tokens).items():
            self._stands.labels(self._model, why.name.lower()).inc(count)
        for token in tokens:
            if token.why == Why.RELAXED:
                self._relaxed.labels(self._model, self._clause(token.clause or "")).inc()
        for drafted, accepted in drafts:
            self._drafts.inc()
            self._drafted.inc(drafted)
            self._accepted.inc(accepted)
            self._k.observe(drafted)
            for position in range(accepted):
                self._by_position.labels(self._model, str(position)).inc()

    def answered(self, seconds: float) -> None:
        """Note how long a job took."""
        self.seconds += 0.1 * (seconds - self.seconds)

    def ended(self, reason: str, stats: Stats | None) -> None:
        """Count a completion that ended: ``stop``, ``length``, ``abort`` (client gone or time up) or ``error``."""
        self._finished.labels(self._model, reason).inc()
        if stats is None:
            return
        self._prompt.inc(stats.prompt_tokens)
        self._asked.inc(stats.prompt_tokens)
        self._cached.inc(stats.cached)
        self._preempted.inc(stats.preempted)
        for name, gate in stats.gates.items():
            clause = self._clause(name)
            self._gate_asked.labels(self._model, clause).inc(gate.asked)
            self._gate_passed.labels(self._model, clause).inc(gate.passed)

    def _clause(self, text: str) -> str:
        """Remove a clause's parameters, which requests can vary without end. Return "other" if there are too many
        clauses."""
        name = text
        while (shorter := re.sub(r"\([^()]*\)", "", name)) != name:
            name = shorter
        if name not in self._clauses:
            if len(self._clauses) >= _MOST_CLAUSES:
                return "other"
            self._clauses.add(name)
        return name


class Measured(Job):
    """A job that records its metrics on the engine's thread."""

    def __init__(
        self,
        requests: list[Request],
        streamed: bool,
        loop: asyncio.AbstractEventLoop,
        interval: float,
        metrics: Metrics,
    ) -> None:
        super().__init__(requests, streamed, loop, interval)
        self._metrics = metrics
        self._first: dict[int, float] = {}  # time of each completion's first tokens
        self._last: dict[int, float] = {}  # time of each completion's latest tokens
        self._tokens: Counts[int] = Counts()  # number of each completion's tokens

    def admitted(self) -> None:
        self._metrics.queue.observe(time.monotonic() - self.arrived)

    def note(self, index: int, tokens: list[Token]) -> None:
        super().note(index, tokens)
        metrics = self._metrics
        news = self._news[-1]
        now = time.monotonic()
        if tokens:
            metrics.step(tokens, news.drafts)
            if index in self._last:
                metrics.between.observe(now - self._last[index])
            else:
                self._first[index] = now
                metrics.first.observe(now - self.arrived)
            self._last[index] = now
            self._tokens[index] += len(tokens)
        if news.over:
            output = news.output
            metrics.ended("error" if output is None else output.finish_reason, None if output is None else output.stats)
            metrics.request_seconds.observe(now - self.arrived)
            if (count := self._tokens[index]) > 1:
                metrics.each.observe((now - self._first[index]) / (count - 1))
        if news.error is not None or not self.left:
            metrics.answered(now - self.arrived)

    def cancelled(self) -> None:
        for _ in range(self.left):
            self._metrics.ended("abort", None)

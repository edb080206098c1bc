"""Checks what a server reports about its speculation, and measures its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fly.extras.audit.client import Reply, Server
from fly.extras.audit.context import Context, check
from fly.extras.audit.report import Finding, Verdict

_COUNTERS = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}


@check("speculation", "What the server counts of drafted and accepted tokens adds up.")
def speculation(context: Context) -> Finding:
    before = counters(context.server)
    fields = context.fields({"temperature": 0.0, "max_tokens": 48})
    requests = [(prompt, fields) for prompt in context.prompts[:12]]
    replies = context.server.ask_all(requests, 1, top=False)
    after = counters(context.server)
    counts, source = reported_counts(replies), "answers"
    if not counts and after:
        counts, source = {name: after[name] - before.get(name, 0) for name in after}, "/metrics"
    generated, seconds = _size(replies)
    figures: dict[str, Any] = {"tokens_per_second": generated / seconds if seconds else None, **counts}
    speed = f"{generated / seconds:.1f} tokens/s"
    if context.reference is not None:
        reference_tokens, reference_seconds = _size(context.reference.ask_all(requests, 1, top=False))
        figures["reference_tokens_per_second"] = reference_tokens / reference_seconds
        speed += f", {generated / seconds / (reference_tokens / reference_seconds):.2f}× the reference's"
    if not counts or not counts.get("drafted"):
        detail = f"no drafted tokens are reported; {speed}"
        return Finding("speculation", "", Verdict.UNSUPPORTED, f"{generated:,} tokens", detail=detail, figures=figures)
    accepted, drafted = counts["accepted"], counts["drafted"]
    summary = f"{accepted / drafted:.0%} of {drafted:,} drafted tokens accepted"
    if rounds := counts.get("drafts"):
        summary += f", {1 + accepted / rounds:.2f} tokens a round"
    detail = f"{summary} (by {source}); {speed}"
    fault = ""
    if not 0 <= accepted <= drafted:
        fault = f"{accepted:,} of {drafted:,} drafted tokens accepted"
    elif source == "answers" and accepted > generated:
        fault = f"{accepted:,} accepted tokens in answers of {generated:,} tokens"
    verdict = Verdict.FAIL if fault else Verdict.PASS
    return Finding("speculation", "", verdict, f"{generated:,} tokens", None, "", fault or detail, figures)


def reported_counts(replies: Sequence[Reply]) -> dict[str, int]:
    """Add up the drafted and accepted tokens (and the drafts, if counted) that answers report, under vLLM's, OpenAI's
    or llama.cpp's names; empty if they report none."""
    counts: dict[str, int] = {}

    def add(name: str, count: Any) -> None:
        if isinstance(count, int):
            counts[name] = counts.get(name, 0) + count

    for reply in replies:
        if metrics := _at(reply.body, "metrics", "speculative_decoding"):
            add("drafts", metrics.get("num_spec_steps"))
            add("drafted", metrics.get("num_draft_tokens"))
            add("accepted", metrics.get("num_accepted_draft_tokens"))
        elif timings := _at(reply.body, "timings"):
            add("drafted", timings.get("draft_n"))
            add("accepted", timings.get("draft_n_accepted"))
        elif details := _at(reply.body, "usage", "completion_tokens_details"):
            right, wrong = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
            if isinstance(right, int) and isinstance(wrong, int):
                add("drafted", right + wrong)
                add("accepted", right)
    return counts if {"drafted", "accepted"} <= counts.keys() else {}


def counters(server: Server) -> dict[str, int]:
    """Read the same counts from ``/metrics``, under vLLM's names; empty if there are none."""
    counts: dict[str, int] = {}
    text = server.fetch("/metrics")
    if not isinstance(text, str):
        return counts
    try:
        for family in text_string_to_metric_families(text):
            for name, ending in _COUNTERS.items():
                if family.name.endswith(f"spec_decode_{ending}"):
                    total = sum(each.value for each in family.samples if each.name.endswith("_total"))
                    counts[name] = int(total)
    except ValueError:  # the text is not in Prometheus' format
        return {}
    return counts if {"drafted", "accepted"} <= counts.keys() else {}


def _at(body: Mapping[str, Any], *names: str) -> Mapping[str, Any] | None:
    for name in names:
        entry = body.get(name)
        if not isinstance(entry, dict):
            return None
        body = entry
    return body


def _size(replies: Sequence[Reply]) -> tuple[int, float]:
    """Return the tokens of these answers, and the seconds that they took."""
    return sum(reply.generated or 0 for reply in replies), sum(reply.seconds for reply in replies)

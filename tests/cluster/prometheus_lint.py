"""What `promtool check metrics` says of a scrape, and what Prometheus' naming guide asks beyond it. Pure.

The rules are those of prometheus/client_golang's promlint: help, _total, reserved suffixes, types in names, base
units, camel case. Added: one set of labels per family, none that its name repeats, none with a value per request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

_NOT_BASE = {
    "milliseconds": "seconds",
    "microseconds": "seconds",
    "nanoseconds": "seconds",
    "minutes": "seconds",
    "hours": "seconds",
    "days": "seconds",
    "kilobytes": "bytes",
    "megabytes": "bytes",
    "gigabytes": "bytes",
    "mebibytes": "bytes",
    "gibibytes": "bytes",
    "bits": "bytes",
    "percent": "ratio",
    "percentage": "ratio",
}
_ABBREVIATED = frozenset({"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "kib", "mib", "gib", "pct"})
_TYPES = frozenset({"gauge", "counter", "histogram", "summary", "untyped"})
_UNITS = frozenset({"seconds", "bytes", "ratio"})
_IDS = frozenset({"id", "request", "request_id", "internal_id", "transfer", "transfer_id", "epoch", "user"})


def findings(text: str) -> list[str]:
    """What is wrong with a scrape in the text format, a sentence each; empty when nothing is."""
    return [
        f"{family.name}: {said}" for family in text_string_to_metric_families(text) for said in _of(family)
    ]


def _of(family: Metric) -> Iterator[str]:
    words = family.name.split("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", family.name) or "__" in family.name:
        yield "a name is made of lower case words and single underscores"
    if not family.documentation.strip():
        yield "it has no help"
    if family.documentation.endswith("."):
        yield "its help is a sentence among phrases"
    if _TYPES.intersection(words):
        yield "its name says its type"
    for word in words:
        if word in _NOT_BASE:
            yield f"{word} is no base unit: use {_NOT_BASE[word]}"
        if word in _ABBREVIATED:
            yield f"{word} abbreviates a unit"
    if _UNITS.intersection(words[:-1]):
        yield "its unit is not the last word of its name"
    suffixed = {"counter": ("_total", "_created"), "histogram": ("_bucket", "_sum", "_count", "_created")}
    for sample in family.samples:
        rest = sample.name.removeprefix(family.name)
        if family.type in suffixed and rest not in suffixed[family.type]:
            yield f"a {family.type} has no sample {sample.name}"
        if family.type == "gauge" and re.search(r"_(total|sum|count|bucket)$", sample.name):
            yield f"{sample.name} ends as other types do"
    yield from _labels(family)


def _labels(family: Metric) -> Iterator[str]:
    sets = {frozenset(sample.labels) - {"le"} for sample in family.samples}
    if len(sets) > 1:
        yield f"its samples have different labels: {sorted(map(sorted, sets))}"
    for label in frozenset().union(*sets):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", label) or label.startswith("__"):
            yield f"label {label} is no lower case word"
        if family.name.endswith((f"_by_{label}", f"_per_{label}")):
            yield f"label {label} is part of its name"
        if label in _IDS:
            yield f"label {label} has as many values as there are requests"
    if family.type == "histogram":
        bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
        if "+Inf" not in bounds:
            yield "a histogram without a bucket for everything"

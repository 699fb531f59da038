"""Metrics: rows of tables, one rule for names, and the labels of every series.

Names begin with `headrace_` and end in their unit: `_seconds`, `_bytes`, `_tokens`, or a plural of what is counted
(a counter's `_total` is added by the client library). Labels have few values, since a scrape of many series stalls
the event loop.

The labels namespace, service and instance are attached to everything that `process_registry` collects, and the label
model to all series of a worker. Frontends and routers serve many models; there a metric of one model has the label
itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter as ValueCounts
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, Literal, Self, TypeVar, overload

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shared.messages.cards import ServiceName

# With each counter and histogram the library shows a gauge `…_created`: a third of all names, which no query needs.
disable_created_metrics()  # type: ignore[no-untyped-call]

PREFIX = "headrace_"
Handle = TypeVar("Handle")
"""A metric that is registered: Counter, Gauge, Histogram or Distribution."""

REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""The buckets for what a client waits for: the first token, queueing, whole requests."""
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""The buckets for what happens once per step: inter-token latency, a step, a copy."""
ROUND_TRIP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0)
"""The buckets for what should take about a millisecond: a choice, a request over NATS."""
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

_WRONG_ENDS = ("_total", "_ms", "_us", "_s", "_sec", "_kb", "_mb", "_count", "_sum", "_bucket")
_NAME = re.compile(r"headrace_[a-z][a-z0-9]*(_[a-z0-9]+)*")


class MetricRow(Struct, Generic[Handle], frozen=True):
    """One metric as a row of a table. docs/metrics.md has all rows; `python -m tests.metrics_page` writes it.

    In the body of a class a row is a descriptor: after `register_metrics`, an object of the class has the metric under
    the row's name.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """The name, for a counter without `_total`."""
    labels: str
    """The names of its labels, with blanks between. Empty if it has none."""
    text: str
    """What it shows: the help text at /metrics, and the meaning in the document."""
    advice: str
    """What to do when it is high, for the document. Empty if there is nothing to do."""
    make: Callable[[CollectorRegistry], Handle]
    """Registers the metric."""

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name}: metric names are {PREFIX}words_in_lower_case"
        assert not self.name.endswith(_WRONG_ENDS), f"{self.name}: write seconds and bytes out, and leave _total out"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Handle: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Handle:
        """Return the row. After `register_metrics` Python finds the metric in the object, and does not ask here."""
        assert instance is None, f"{self.name}: no {owner.__name__} may use it before register_metrics()"
        return self


def counter(name: str, labels: str, text: str, advice: str = "") -> MetricRow[Counter]:
    """Return the row of a counter: a value that only grows. `name` has no `_total`."""
    return MetricRow("counter", name, labels, text, advice, lambda to: Counter(name, text, labels.split(), registry=to))


def gauge(name: str, labels: str, text: str, advice: str = "") -> MetricRow[Gauge]:
    """Return the row of a gauge: a value that rises and falls."""
    return MetricRow("gauge", name, labels, text, advice, lambda to: Gauge(name, text, labels.split(), registry=to))


def histogram(name: str, labels: str, buckets: Sequence[float], text: str, advice: str = "") -> MetricRow[Histogram]:
    """Return the row of a histogram. Use the buckets above, so that dashboards can compare."""

    def make(registry: CollectorRegistry) -> Histogram:
        return Histogram(name, text, labels.split(), buckets=buckets, registry=registry)

    return MetricRow("histogram", name, labels, text, advice, make)


def distribution(
    name: str, label: str, buckets: Sequence[float], text: str, advice: str = ""
) -> MetricRow[Distribution]:
    """Return the row of a Distribution: a histogram with one label, for values that come often."""

    def make(registry: CollectorRegistry) -> Distribution:
        made = Distribution(name, text, buckets, label)
        registry.register(made)
        return made

    return MetricRow("histogram", name, label, text, advice, make)


def rows_of(place: object) -> dict[str, MetricRow[Any]]:
    """Return the rows in the body of a class or module, by their names there."""
    return {attribute: row for attribute, row in vars(place).items() if isinstance(row, MetricRow)}


def register_metrics(table: object, registry: CollectorRegistry) -> None:
    """Register the rows in the body of an object's class, and give the object their metrics."""
    for attribute, row in rows_of(type(table)).items():
        setattr(table, attribute, row.make(registry))


def scraped(row: MetricRow[Counter] | MetricRow[Gauge]) -> CounterMetricFamily | GaugeMetricFamily:
    """Return an empty metric of a row, for a collector that fills it at each scrape."""
    family = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    return family(row.name, row.text, labels=row.labels.split())


def register_scraped(row: MetricRow[Counter], registry: CollectorRegistry, count: Callable[[], int]) -> None:
    """Register a counter whose value `count()` returns at each scrape."""
    registry.register(_Counted(row, count))


class Distribution(Collector):
    """A histogram whose series, one for each value of its label, take many values at once."""

    def __init__(self, name: str, explanation: str, buckets: Sequence[float], label: str) -> None:
        self._name = name
        self._explanation = explanation
        self._label = label
        self._bounds = list(buckets)
        self._series: dict[str, DistributionSeries] = {}

    def labels(self, value: str) -> DistributionSeries:
        """Return the series with this value of the label."""
        if value not in self._series:
            self._series[value] = DistributionSeries(self._bounds)
        return self._series[value]

    def describe(self) -> Iterator[Metric]:
        """Describe the metric, so that the registry refuses a second one of the same name."""
        yield HistogramMetricFamily(self._name, self._explanation, labels=[self._label])

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._explanation, labels=[self._label])
        for value, series in self._series.items():
            family.add_metric([value], *series.read())
        yield family


class DistributionSeries:
    """One series of a Distribution.

    With 512 mostly equal values it takes 0.1 µs for each, where prometheus_client takes 0.6 µs.
    """

    def __init__(self, bounds: list[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def observe_all(self, values: Sequence[float]) -> None:
        """Add values in any order."""
        for value, count in ValueCounts(values).items():
            self.observe(value, count)

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the buckets, each an upper bound and the number of values up to it, and the sum of all values."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class _Counted(Collector):
    def __init__(self, row: MetricRow[Counter], count: Callable[[], int]) -> None:
        self._row = row
        self._count = count

    def describe(self) -> Iterator[Metric]:
        """Describe the metric, so that the registry refuses a second one of the same name."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        family = scraped(self._row)
        family.add_metric([], self._count())
        yield family


class LabelledRegistry(CollectorRegistry):
    """A registry that adds `labels` to every sample. A metric that has one of them itself is refused.

    Labels of foreign series, whose collector does not describe them, are known only when they are collected. Where one
    has the name of ours it becomes `exported_…`, as Prometheus does it.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._labels = dict(labels)

    def register(self, collector: Collector) -> None:
        """Add a collector. Raise ValueError for a name that is taken, or a label that is added to every series."""
        clash = self._labels.keys() & _own_labels(collector)
        if clash:
            raise ValueError(f"{collector}: the labels {', '.join(sorted(clash))} are added to every series")
        super().register(collector)

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample._replace(labels=self._joined(sample.labels)) for sample in metric.samples]
            yield metric

    def _joined(self, own: dict[str, str]) -> dict[str, str]:
        if not self._labels.keys().isdisjoint(own):
            own = {f"exported_{name}" if name in self._labels else name: value for name, value in own.items()}
        return self._labels | own


def _own_labels(collector: Collector) -> set[str]:
    """Return the labels that a collector's metrics have, as far as it says."""
    names: set[str] = set(getattr(collector, "_labelnames", ()))
    describe = getattr(collector, "describe", None)
    for metric in describe() if describe is not None else ():
        names.update(getattr(metric, "_labelnames", ()), *(sample.labels for sample in metric.samples))
    return names


def process_registry(
    namespace: str, service: ServiceName, instance: str, further: Mapping[str, str] | None = None
) -> CollectorRegistry:
    """Return a process's registry, which has its CPU time, memory and open files already. `further` are labels of all
    its series, too."""
    labels = {"namespace": namespace, "service": service, "instance": instance, **(further or {})}
    registry = LabelledRegistry(labels)
    ProcessCollector(registry=registry)
    return registry

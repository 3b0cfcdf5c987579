"""Trust and diagnoses in Prometheus form, made when scraped. Labels come from bounded sets."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.diagnosis import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from prometheus_client import Metric

    from router.feedback import Feedback
    from router.trust import Book, BookKey
    from state.model import ReplicaId

MAX_SERIES: Final = 512
"""Books that are shown, those that were asked for last: engines may have thousands of adapters."""
LABELS: Final = ("replica", "model", "ground")


class TrustMetrics(Collector):
    """Shares, credits and token totals by book; diagnoses by replica."""

    def __init__(self, feedback: Feedback, replicas: Callable[[], Collection[ReplicaId]]) -> None:
        self._feedback = feedback
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        """Yield each family with its current values."""
        know = self._feedback.know
        books = dict(islice(reversed(know.trust.books().items()), MAX_SERIES))
        yield _gauge(
            "warmroute_prediction_precision_ratio",
            "Part of the predicted cached tokens that the engine reported, decayed.",
            books,
            lambda book: book.precision.by_token,
        )
        yield _gauge(
            "warmroute_prediction_recall_ratio",
            "Part of the reported cached tokens that was predicted, decayed.",
            books,
            lambda book: book.recall.by_token,
        )
        yield _gauge(
            "warmroute_prediction_credit_ratio",
            "Part of a prediction that counts in decisions.",
            books,
            lambda book: book.credit,
        )
        totals = CounterMetricFamily(
            "warmroute_compared_tokens",
            "Cached tokens of requests whose engine reported them.",
            labels=[*LABELS, "side"],
        )
        for key, book in books.items():
            for side, count in (
                ("predicted", book.predicted_tokens),
                ("reported", book.reported_tokens),
                ("matched", book.matched_tokens),
            ):
                totals.add_metric([*_labels(key), side], float(count))
        yield totals
        yield from self._by_replica()

    def _by_replica(self) -> Iterable[Metric]:
        found = {(one.replica, one.kind) for one in self._feedback.diagnoses.active()}
        diagnoses = GaugeMetricFamily(
            "warmroute_diagnosis", "1 while this explains wrong predictions.",
            labels=["replica", "kind"],
        )  # fmt: skip
        learned = GaugeMetricFamily(
            "warmroute_learned_blocks", "Blocks known by reports alone.", labels=["replica"]
        )
        for replica in self._replicas():
            for kind in Kind:
                diagnoses.add_metric([replica, kind.value], float((replica, kind) in found))
            learned.add_metric([replica], float(self._feedback.know.learned.resident(replica)))
        yield diagnoses
        yield learned


def _labels(key: BookKey) -> list[str]:
    return [key.replica, key.model, key.ground.value]


def _gauge(
    name: str, text: str, books: Mapping[BookKey, Book], value_of: Callable[[Book], float | None]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=LABELS)
    for key, book in books.items():
        value = value_of(book)
        if value is not None:
            family.add_metric(_labels(key), value)
    return family

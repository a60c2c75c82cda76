"""Choosing an index: reasons, memory, latency, and sizes and times as people write them."""

import pytest

from shortlist.errors import ConfigError
from shortlist.indexes.auto import choose, parse_size, parse_time
from shortlist.indexes.specs import PER_CLUSTER, clusters, parse_spec


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4_000_000_000), ("512MiB", 512 << 20), ("1.5 kb", 1500), ("1000000", 1_000_000), ("2g", 2_000_000_000)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 0.005), ("0.01s", 0.01), ("800us", 0.0008), ("2 S", 2.0)])
def test_times(text, seconds):
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "GB", "4 parsecs", "-1GB", "0", "1e9", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="4GB or 512MiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "ms", "5", "5 minutes", "-5ms", "0ms"])
def test_what_is_no_time_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="5ms or 0.01s"):
        parse_time(text)


@pytest.mark.parametrize(
    ("count", "dim", "options", "start"),
    [
        (0, 256, {}, "exact"),
        (5_000, 256, {}, "exact"),
        (182_115, 256, {}, "IVF512,PQ128x4fsr+rescore"),
        (100_000, 384, {}, "IVF512,PQ192x4fsr+rescore"),
        (1_000_000, 256, {}, "IVF1024,PQ128x4fsr+rescore"),
        (1_000_000, 256, {"memory": 60_000_000}, "IVF1024,PQ64x4fsr+rescore"),
        (1_000_000, 256, {"recall": 1.0}, "exact"),
        (1_000_000, 256, {"recall": 1.0, "memory": 500_000_000}, "exact:int8"),
        (182_115, 256, {"latency": 0.2}, "exact"),
        (182_115, 256, {"latency": 0.002}, "IVF512,PQ128x4fsr+rescore"),
        (100_000, 257, {}, "IVF512,PQ257x4fsr+rescore"),
    ],
)
def test_the_rules(count, dim, options, start):
    choice = choose(count, dim, cores=2, **options)
    assert choice.spec == start and choice.reason.endswith(".")
    parse_spec(choice.spec, dim=dim, count=count)
    assert choice.bytes <= options.get("memory", choice.bytes)


@pytest.mark.parametrize("memory", [10**5, 10**6, 10**7, 10**8, 10**9, 10**10])
@pytest.mark.parametrize("count", [100, 10_000, 1_000_000, 100_000_000])
@pytest.mark.parametrize("recall", [0.9, 1.0])
def test_never_more_than_the_memory(count, memory, recall):
    try:
        choice = choose(count, 384, memory=memory, recall=recall, cores=2)
    except ConfigError as error:
        assert "memory" in str(error) or "fits" in str(error)
    else:
        assert choice.bytes <= memory


@pytest.mark.parametrize(
    "options", [{"recall": 0}, {"recall": 1.1}, {"memory": 0}, {"latency": 0.0}, {"latency": float("nan")}, {"k": 0}]
)
def test_targets_out_of_range_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        choose(1000, 8, **options)


def test_clusters_have_vectors_to_train_on():
    # user-reports C.75
    for count in (1, 39, 100, 10_000, 10**6, 10**9):
        assert 1 <= clusters(count) and (clusters(count) == 1 or count >= PER_CLUSTER * clusters(count))

"""Specs: one string says what an index is; names expand by size and dimension; whatever is wrong is a sentence."""

from dataclasses import replace

import numpy as np
import pytest

from shortlist.errors import ConfigError
from shortlist.indexes import faiss_factories
from shortlist.indexes.kinds import new_index
from shortlist.indexes.specs import (
    NAMED,
    PER_CLUSTER,
    IndexSpec,
    SearchSettings,
    clusters,
    default_probes,
    parse_spec,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact", IndexSpec("exact", "exact")),
        (" Exact ", IndexSpec("exact", "exact")),
        ("exact:float32", IndexSpec("exact", "exact")),
        ("exact:INT8", IndexSpec("exact:int8", "exact", "int8")),
        ("exact:bfloat16", IndexSpec("exact:bfloat16", "exact", "bfloat16")),
        ("flat", IndexSpec("flat", "faiss", factory="Flat")),
        ("HNSW", IndexSpec("hnsw", "faiss", factory="HNSW32,Flat")),
        ("RaBitQ", IndexSpec("RaBitQ", "faiss", factory="RaBitQ")),
        ("HNSW48,SQ8", IndexSpec("HNSW48,SQ8", "faiss", factory="HNSW48,SQ8")),
        ("IVF64,PQ8+rescore", IndexSpec("IVF64,PQ8+rescore", "faiss", factory="IVF64,PQ8", rescore=True)),
        ("sq8+rescore", IndexSpec("sq8+rescore", "faiss", factory="IVF512,SQ8", rescore=True)),
        ("IVF64_HNSW32,PQ8x4fs", IndexSpec("IVF64_HNSW32,PQ8x4fs", "faiss", factory="IVF64_HNSW32,PQ8x4fs")),
    ],
)
def test_a_spec_says_kind_codes_factory_and_rescoring(text, expected):
    assert parse_spec(text, dim=16, count=100_000) == expected
    assert parse_spec(expected.text, dim=16, count=100_000) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exct", "did you mean 'exact'"),
        ("hnws", "did you mean 'hnsw'"),
        ("exact:int4", "exact:int8"),
        ("exact+rescore", "exact results"),
        ("", "ivf-pq"),
        ("auto", "shortlist index --index auto"),
        ("flat:int8", "did you mean 'flat'"),
        (7, "expected exact"),
    ],
)
def test_what_is_no_spec_is_a_sentence_with_what_is_valid(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_spec(text, dim=16)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 48, 97, 384])
def test_every_name_expands_to_a_factory_that_faiss_makes(name, dim):
    for count in (0, 1, 50, 5_000, 1_000_000):
        parsed = parse_spec(name, dim=dim, count=count)
        index = new_index(name, dim, count=count)
        assert index.factory == parsed.factory and index.spec == name
        # user-reports C.75: fewer vectors than clusters
        assert faiss_factories.cluster_count(parsed.factory) * PER_CLUSTER <= max(count, PER_CLUSTER)


def test_clusters_grow_with_the_square_root_and_probes_with_clusters():
    # user-reports C.77: a default of one or few probes costs a quarter to a third of recall
    assert [clusters(count) for count in (0, 50, 10_000, 100_000, 1_000_000)] == [1, 1, 128, 512, 1024]
    probes = [default_probes(nlist) for nlist in (1, 4, 64, 1024, 4096, 65_536)]
    assert probes == [1, 4, 16, 64, 128, 512]
    assert all(default_probes(nlist) >= min(nlist, 8) for nlist in range(1, 300))


def test_quantisers_and_rescoring_are_written_into_the_manifest():
    index = new_index("opq", 24, count=20_000)
    manifest = index.manifest
    assert manifest["spec"] == "opq" and manifest["factory"] == "OPQ12,IVF128,PQ12x4fsr" and manifest["rescore"]
    assert manifest["search"] == {"nprobe": None, "ef_search": None, "fetch": SearchSettings().fetch}


@pytest.mark.parametrize(
    "wrong",
    [{"nprobe": 0}, {"nprobe": 1.5}, {"nprobe": True}, {"ef_search": -1}, {"fetch": 0.5}, {"fetch": float("nan")}],
)
def test_search_settings_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        SearchSettings(**wrong)
    with pytest.raises(ConfigError, match="expected SearchSettings"):
        new_index("exact", 2).settings = wrong


def test_search_settings_survive_a_manifest():
    settings = SearchSettings(nprobe=7, ef_search=None, fetch=2.5)
    assert SearchSettings.from_record(settings.record()) == settings
    assert SearchSettings.from_record({"nprobe": 3, "of a later version": 1}) == SearchSettings(nprobe=3)
    assert SearchSettings.from_record(None) == SearchSettings()
    assert [replace(settings, fetch=fetch).candidates(10) for fetch in (1, 1.25, 4)] == [10, 13, 40]


@pytest.mark.parametrize(
    ("factory", "clusters_asked", "fewest"),
    [
        ("Flat", 0, 1),
        ("HNSW32,Flat", 0, 1),
        ("IVF64,Flat", 64, 64 * 39),
        ("OPQ16_64,IVF4096_HNSW32,PQ16", 4096, 4096 * 39),
        ("IVF2,PQ16", 2, 256),
        ("IVF2,PQ16x4fsr", 2, 2 * 39),
        ("PQ8x10", 0, 1024),
        ("IMI2x4,Flat", 0, 1),
    ],
)
def test_a_factory_says_how_many_vectors_it_needs(factory, clusters_asked, fewest):
    assert faiss_factories.cluster_count(factory) == clusters_asked
    assert faiss_factories.training_minimum(factory) == fewest
    assert faiss_factories.training_sample(factory) >= fewest


def test_fewer_clusters_leave_the_rest_of_a_factory_alone():
    assert faiss_factories.with_clusters("OPQ16,IVF256_HNSW32,PQ16", 5) == "OPQ16,IVF5_HNSW32,PQ16"


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_the_codes_of_an_exact_index_are_in_its_manifest(dtype):
    index = new_index(f"exact:{dtype}", 3)
    assert index.dtype == dtype and index.manifest["dtype"] == dtype and index.spec == f"exact:{dtype}"
    index.add(["a"], np.ones((1, 3)))
    assert index.search(np.ones((1, 3)), 1) == [[("a", 3.0)]]

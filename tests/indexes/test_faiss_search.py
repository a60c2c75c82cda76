"""How faiss is called: filters inside the search, settings by call, memory-mapped bases, a GPU only if it works."""

import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from shortlist import FaissIndex
from shortlist.indexes import faiss as faiss_module
from shortlist.indexes import faiss_factories
from shortlist.indexes.kinds import new_index, open_index
from shortlist.indexes.specs import SearchSettings

SELECTING = ["Flat", "SQ8", "RaBitQ", "IVF8,Flat", "IVF8,SQ8", "IVF8,PQ4x4fs", "IVF8,RaBitQfs", "HNSW16,Flat",
             "HNSW16,SQ8", "OPQ4,IVF8,PQ4x4fs", "L2norm,Flat", "Flat,RFlat"]  # fmt: skip
NOT_SELECTING = ["PQ4x4fs", "RaBitQfs", "PQ2"]


def filled(factory, size=900, dim=8, **options):
    vectors = np.random.default_rng(0).standard_normal((size, dim)).astype(np.float32)
    index = FaissIndex(dim, factory=factory, **options)
    index.add([f"d{row:04d}" for row in range(size)], vectors)
    return index, vectors


@pytest.mark.parametrize("factory", [*SELECTING, *NOT_SELECTING])
def test_a_mask_holds_inside_faiss(factory):
    index, vectors = filled(factory)
    mask = np.zeros(900, bool)
    mask[np.random.default_rng(1).permutation(900)[:300]] = True
    for allowed in (mask, np.arange(900) < 500, np.arange(900) == 77):
        k = min(10, int(allowed.sum()))
        positions, scores, counts = index._scan(vectors[:20], k, allowed)
        for row in range(20):
            found = positions[row, : counts[row]]
            assert allowed[found].all() and len(set(found.tolist())) == counts[row]
            assert (positions[row, counts[row] :] == -1).all() and (scores[row, counts[row] :] == -np.inf).all()
    assert index._selects == (factory in SELECTING)
    if factory in NOT_SELECTING:
        assert (index._scan(vectors[:20], 10, mask)[2] == 10).all()


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "HNSW16,Flat"])
def test_a_filtered_search_is_that_of_an_index_of_what_passes(factory):
    index, vectors = filled(factory, size=6000)
    index.settings = SearchSettings(nprobe=8, ef_search=300)
    allowed = np.arange(6000) % 6 < 5
    scores = np.where(allowed, vectors[:30] @ vectors.T, -np.inf)
    expected = np.argsort(-scores, axis=1)[:, :10]
    positions, _, _ = index.search_arrays(vectors[:30], 10, allowed)
    hits = np.mean([len(set(a) & set(b)) for a, b in zip(positions.tolist(), expected.tolist(), strict=True)])
    assert hits == 10 if factory != "HNSW16,Flat" else hits >= 9.5


def test_a_kind_that_refuses_selectors_after_all_is_searched_wider(monkeypatch):
    index, vectors = filled("PQ4x4fs")
    index._selects = True
    mask = np.arange(900) % 3 == 0
    positions, _, counts = index._scan(vectors[:5], 10, mask)
    assert not index._selects and (counts == 10).all() and mask[positions].all()


def test_probes_and_candidates_are_those_of_the_settings_and_the_faiss_index_is_left_alone():
    index, vectors = filled("IVF16,Flat", size=2000)
    queries = np.random.default_rng(3).standard_normal((50, 8)).astype(np.float32)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]

    def recall(**settings):
        index.settings = replace(index.settings, **settings)
        found = index._scan(queries, 10, None)[0]
        return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), exact.tolist(), strict=True)])

    few, some, every = recall(nprobe=1), recall(nprobe=4), recall(nprobe=16)
    assert few < some < every == 1.0
    assert recall(nprobe=1000) == 1.0
    assert index._index.nprobe == 1  # faiss's own default, untouched
    assert recall(nprobe=None) > few


def test_threads_with_other_settings_do_not_meet():
    # parameters go with the call, so a change of one index's settings cannot reach into a running search
    index, vectors = filled("IVF16,Flat", size=2000)
    queries = vectors[:100]
    index.settings = SearchSettings(nprobe=16)
    expected = index.search(queries, 5)
    wrong = []

    def search():
        for _ in range(10):
            if index.search(queries, 5) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_more_candidates_give_more_recall_and_the_very_scores():
    vectors = np.random.default_rng(4).standard_normal((2000, 16)).astype(np.float32)
    queries = np.random.default_rng(5).standard_normal((40, 16)).astype(np.float32)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    index = new_index("RaBitQ+rescore", 16)
    index.add([str(row) for row in range(2000)], vectors)
    recalls = []
    for fetch in (1.0, 5.0, 200.0):
        index.settings = replace(index.settings, fetch=fetch)
        positions, scores, _ = index.search_arrays(queries, 10)
        recalls.append(
            np.mean([len(set(a) & set(b)) / 10 for a, b in zip(positions.tolist(), exact.tolist(), strict=True)])
        )
        assert np.allclose(scores, np.take_along_axis(queries @ vectors.T, positions, axis=1), atol=1e-4)
    assert recalls[0] < recalls[1] < recalls[2] == 1.0


@pytest.mark.parametrize("spec", ["IVF8,Flat", "hnsw", "IVF8,PQ4x4fs+rescore"])
def test_an_opened_base_is_never_copied_and_vectors_added_lie_beside_it(spec, tmp_path, monkeypatch):
    vectors = np.random.default_rng(6).standard_normal((900, 8)).astype(np.float32)
    index = new_index(spec, 8)
    index.add([f"d{row}" for row in range(800)], vectors[:800])
    index.save(tmp_path / "index")
    opened = open_index(tmp_path / "index")
    assert opened._mapped
    base = opened._index
    opened.add([f"d{row}" for row in range(800, 900)], vectors[800:])
    opened.remove(["d0"])
    assert opened._index is base and base.ntotal == 800 and len(opened._tail) == 100
    (found,) = opened.search(vectors[850], 3)
    assert found[0][0] == "d850" or found[0][1] >= float(vectors[850] @ vectors[850]) - 1e-4
    assert np.array_equal(opened.vectors_at(np.array([899, 3, 800])), vectors[[899, 3, 800]])
    opened.commit()
    opened.compact()
    opened.commit()
    assert opened._index.ntotal == 899 and not len(opened._tail)


def test_equal_input_gives_equal_bytes_after_vectors_were_read_back(tmp_path):
    files = []
    for name in ("one", "two"):
        index, _ = filled("IVF8,Flat")
        if name == "two":
            index.vectors_at(np.array([5]))  # makes faiss remember where each vector lies
        index.save(tmp_path / name)
        (file,) = (tmp_path / name).glob("*/index.faiss")
        files.append(file.read_bytes())
    assert files[0] == files[1]


def test_training_draws_a_sample_and_adds_in_blocks(monkeypatch):
    # user-reports C.82, C.83: needs all in memory; fails on a large tensor
    from shortlist.indexes.blocks import VectorBlocks

    monkeypatch.setattr(faiss_factories, "_LEAST", 100)
    monkeypatch.setattr(faiss_factories, "_SAMPLE", 40)
    monkeypatch.setattr(faiss_module, "SLICE", 128)
    vectors = np.random.default_rng(7).standard_normal((1000, 4)).astype(np.float32)
    blocks = VectorBlocks(4)
    blocks.append(vectors)
    index = FaissIndex(4, factory="IVF4,Flat")
    trained, added = [], []
    train, add = faiss_factories.train, index._add
    monkeypatch.setattr(faiss_factories, "train", lambda *args: trained.append(len(args[2])) or train(*args))
    monkeypatch.setattr(index, "_add", lambda block: added.append(len(block)) or add(block))
    index._build_base(blocks)
    assert trained == [160] and max(added) == 128 and sum(added) == 1000
    assert np.array_equal(index._vectors_at(np.arange(1000)), vectors)


@pytest.mark.slow
def test_more_than_sixteen_million_numbers_train_and_search():
    # user-reports C.83: quantile over a large tensor fails
    vectors = np.random.default_rng(8).standard_normal((66_000, 256)).astype(np.float32)
    index = new_index("IVF16,SQ8", 256)
    index.add([str(row) for row in range(len(vectors))], vectors)
    assert vectors.size > 16 << 20 and index.search(vectors[:1], 1)[0][0][0] == "0"


class _Gpu:
    """faiss with a GPU, as far as an index asks: a copy of an index that counts its searches."""

    def __init__(self, faiss, *, works=True):
        self._faiss, self._works, self.searches = faiss, works, 0

    def __getattr__(self, name):
        return getattr(self._faiss, name)

    def index_cpu_to_all_gpus(self, index):
        if not self._works:
            raise RuntimeError("Error in x: 'false' failed: This index type is not implemented on GPU.")

        def search(queries, k, params=None):
            self.searches += 1
            return index.search(queries, k, params=params)

        return SimpleNamespace(search=search)


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_is_used_only_where_a_probe_and_a_copy_succeed(works, monkeypatch, caplog):
    # user-reports H.165, H.166
    index, vectors = filled("IVF8,Flat")
    expected = index.search(vectors[:5], 10)
    device = _Gpu(faiss_module.import_faiss(), works=works)
    monkeypatch.setattr(faiss_module, "import_faiss", lambda: device)
    monkeypatch.setattr(faiss_module, "gpu_status", lambda: (True, ""))
    with caplog.at_level(logging.INFO):
        assert index.search(vectors[:5], 10) == expected and index.search(vectors[:5], 10) == expected
    assert device.searches == (2 if works else 0)
    assert caplog.text.count("not implemented on GPU") == (0 if works else 1)
    # filters, and more results than a GPU gives, are searched on the CPU
    index.search(vectors[:5], 10, np.arange(900) < 880)
    assert device.searches == (2 if works else 0)
    on_cpu, _ = filled("IVF8,Flat", device="cpu")
    on_cpu.search(vectors[:5], 10)
    assert device.searches == (2 if works else 0)


def test_doctor_says_why_there_is_no_gpu_search(monkeypatch):
    # user-reports H.165, H.166
    import torch

    from shortlist.commands.doctor import examine

    report = examine()["faiss"]
    assert report["available"] and (report["gpu"] or report["reason"])
    monkeypatch.setattr(
        faiss_module, "gpu_status", lambda: (False, "a probe search on the GPU failed: no kernel image")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (sentence,) = [line for line in examine()["attention"] if "FAISS" in line]
    assert "no kernel image" in sentence and "through torch" in sentence

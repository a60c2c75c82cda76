"""Every kind of index against a dictionary, through random add, remove, compact, commit, save, open and search.

Vectors are whole numbers, so that every score is exact in float32 and ties are frequent.
"""

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shortlist import open_index
from shortlist.errors import DataError
from shortlist.indexes import new_index, verify
from shortlist.types import rank_order

DIM = 4
# Few ids: collisions and replacements are the interesting part. A base of others is large enough to train on.
names = st.sampled_from(["a", "b", "b c", "ü", "10", "9", "x\ny", "z", "base 3", "base 77", "base 178"])
vectors = st.tuples(*[st.integers(-2, 2)] * DIM).map(lambda values: np.array(values, np.float32))
years = st.integers(2000, 2004)
entries = st.dictionaries(names, st.tuples(vectors, years), min_size=1, max_size=6)
GRID = np.array(list(itertools.product(range(-2, 3), repeat=DIM)), np.float32)


def base(count):
    rows = np.random.default_rng(0).permutation(len(GRID))[:count]
    return {f"base {number}": (GRID[row], 2000 + number % 5) for number, row in enumerate(rows.tolist())}


class IndexMachine(RuleBasedStateMachine):
    spec = "exact"
    count = 200
    complete = True  # finds exactly the best
    faithful = True  # scores are those of the vectors

    @initialize(trained=st.booleans(), documents=st.booleans())
    def start(self, trained, documents):
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "index"
        self.others = 0
        self.with_documents = documents
        self.index = new_index(self.spec, DIM)
        self.model = {}
        if trained:
            self.put(base(self.count), replace=False)
        self.committed = None

    def teardown(self):
        if hasattr(self, "directory"):
            self.index = None
            self.directory.cleanup()

    def put(self, new, replace):
        documents = None
        if self.with_documents:
            documents = [
                SimpleNamespace(id=id, title=f"t {id}", text="", metadata={"year": year})
                for id, (_, year) in new.items()
            ]
        matrix = np.stack([vector for vector, _ in new.values()])
        self.index.add(list(new), matrix, replace=replace, documents=documents)
        self.model.update(new)

    @rule(new=entries, replace=st.booleans())
    def add(self, new, replace):
        if not replace and set(new) & set(self.model):
            with pytest.raises(DataError):
                self.index.add(list(new), np.stack([vector for vector, _ in new.values()]))
            return
        self.put(new, replace)

    @rule(gone=st.sets(names, max_size=5))
    def remove(self, gone):
        assert self.index.remove(gone) == len(gone & set(self.model))
        for name in gone:
            self.model.pop(name, None)

    @rule(every=st.integers(2, 4))
    def remove_many(self, every):
        gone = sorted(self.model)[::every]
        assert self.index.remove(gone) == len(gone)
        for name in gone:
            del self.model[name]

    @rule()
    def compact(self):
        self.index.compact()
        assert self.index.stats()["removed"] == 0

    @rule()
    def commit(self):
        if self.committed is None:
            return
        generation = self.index.commit()
        assert self.index.commit() == generation == self.index.stats()["generation"]
        self.committed = dict(self.model)
        verify(self.path)
        on_disk = {file.relative_to(self.path).as_posix() for file in self.path.rglob("*") if file.is_file()}
        assert on_disk == {"manifest.json", *self.index._home.manifest["files"]}

    @rule()
    def save_and_open(self):
        self.index.save(self.path, overwrite=True)
        self.index = open_index(self.path)
        self.committed = dict(self.model)

    @rule()
    def save_and_go_on(self):
        self.index.save(self.path, overwrite=True)
        if self.committed is None:
            self.index = open_index(self.path)
        self.committed = dict(self.model)

    @rule()
    def save_elsewhere(self):
        self.others += 1
        other = self.path.with_name(f"other {self.others}")
        self.index.save(other)
        opened = open_index(other)
        assert sorted(opened.ids) == sorted(self.model) and opened.spec == self.index.spec

    @rule()
    def open_again(self):
        """What was not committed is not there."""
        if self.committed is not None:
            self.index = open_index(self.path)
            self.model = dict(self.committed)

    @rule(new=entries, replace=st.booleans())
    def merge(self, new, replace):
        other = new_index("exact", DIM)
        documents = [{"id": id, "title": f"t {id}", "metadata": {"year": year}} for id, (_, year) in new.items()]
        matrix = np.stack([vector for vector, _ in new.values()])
        other.add(list(new), matrix, documents=documents if self.with_documents else None)
        if not replace and set(new) & set(self.model):
            with pytest.raises(DataError, match="in both indexes"):
                self.index.merge(other)
            return
        assert self.index.merge(other, replace=replace) == len(new)
        self.model.update(new)

    @rule(query=vectors, k=st.integers(1, 300))
    def search(self, query, k):
        self.check(query, k, None, self.model)

    @rule(query=vectors, k=st.integers(1, 12), wanted=st.sets(names), every=st.integers(1, 50))
    def search_ids(self, query, k, wanted, every):
        chosen = wanted | set(sorted(self.model)[::every])
        self.check(query, k, chosen, [name for name in self.model if name in chosen])

    @rule(query=vectors, k=st.integers(1, 12), year=years)
    def search_field(self, query, k, year):
        if self.with_documents and self.model:
            allowed = [name for name, (_, own) in self.model.items() if own >= year]
            self.check(query, k, f"year >= {year}", allowed)

    def check(self, query, k, chosen, allowed):
        ids = list(allowed)
        scores = [float(query @ self.model[name][0]) for name in ids]
        expected = [(ids[row], scores[row]) for row in rank_order(ids, scores)[:k]]
        (found,) = self.index.search(query[None], k, chosen)
        if self.complete:
            assert found == expected
            return
        assert len(found) == len(expected) == len({id for id, _ in found}) and {id for id, _ in found} <= set(ids)
        if self.faithful:
            assert found == [(id, float(query @ self.model[id][0])) for id, _ in found]
        order = rank_order([id for id, _ in found], [score for _, score in found])
        assert order.tolist() == list(range(len(found)))

    @invariant()
    def agrees(self):
        if not hasattr(self, "index"):
            return
        assert len(self.index) == len(self.model) == self.index.stats()["count"]
        ids = list(self.index.ids)
        assert len(ids) == len(self.model) and set(ids) == set(self.model)
        some = ids[:: max(1, len(ids) // 5)]
        assert all(name in self.index for name in some)
        if self.with_documents:
            assert all(self.index.document(name)["metadata"] == {"year": self.model[name][1]} for name in some)
        if self.faithful and some:
            stored = self.index.vectors_at(self.index._ids.find(some))
            assert np.array_equal(stored, np.stack([self.model[name][0] for name in some]))


# Spec, vectors to begin with, whether it finds exactly the best, whether its scores are exact.
KINDS = [
    ("exact", 200, True, True),
    ("exact:int8", 200, True, True),
    ("exact:float16", 200, True, True),
    ("flat", 200, True, True),
    ("HNSW8", 200, False, True),
    ("hnsw", 200, False, True),
    ("IVF4,Flat", 200, False, True),
    ("ivf-flat", 200, False, True),
    ("IVF2,PQ2x4fs+rescore", 600, False, True),
    ("opq", 600, False, True),
    ("sq8", 200, False, False),
    ("rabitq", 200, False, True),
    ("SQ8", 200, False, False),
    ("PQ2x4", 600, False, False),
]


def machine(spec, count, complete, faithful):
    attributes = {"spec": spec, "count": count, "complete": complete, "faithful": faithful}
    case = type(f"{spec} machine", (IndexMachine,), attributes).TestCase
    case.settings = settings(
        max_examples=12, stateful_step_count=20, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    return case


@pytest.mark.parametrize(("spec", "count", "complete", "faithful"), KINDS, ids=[kind[0] for kind in KINDS])
def test_every_kind_agrees_with_a_dictionary(spec, count, complete, faithful):
    # user-reports C.78, C.81, D.90, D.91
    machine(spec, count, complete, faithful)("runTest").runTest()

"""Both index kinds against a dictionary, through random add, remove, save, open and search."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shortlist import ExactIndex, FaissIndex, open_index
from shortlist.errors import DataError
from shortlist.types import rank_order

# Few ids and few distinct vectors: collisions, replacements and ties are the interesting part.
names = st.sampled_from(["a", "b", "b c", "ü", "10", "9", "x\ny", "z"])
vectors = st.tuples(*[st.integers(-2, 2)] * 2).map(lambda values: np.array(values, np.float32))
entries = st.dictionaries(names, vectors, min_size=1, max_size=6)


class IndexMachine(RuleBasedStateMachine):
    kind = ExactIndex

    @initialize()
    def start(self):
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "index"
        self.index = self.kind(2)
        self.model = {}

    def teardown(self):
        if hasattr(self, "directory"):
            self.directory.cleanup()

    @rule(new=entries, replace=st.booleans())
    def add(self, new, replace):
        if not replace and set(new) & set(self.model):
            with pytest.raises(DataError):
                self.index.add(list(new), np.stack(list(new.values())))
            return
        self.index.add(list(new), np.stack(list(new.values())), replace=replace)
        self.model.update(new)

    @rule(gone=st.sets(names, max_size=5))
    def remove(self, gone):
        assert self.index.remove(gone) == len(gone & set(self.model))
        for name in gone:
            self.model.pop(name, None)

    @rule()
    def save_and_open(self):
        self.index.save(self.path, overwrite=True)
        self.index = open_index(self.path)

    @rule(query=vectors, k=st.integers(1, 12))
    def search(self, query, k):
        ids = list(self.model)
        scores = [float(query @ self.model[name]) for name in ids]
        expected = [(ids[row], scores[row]) for row in rank_order(ids, scores)[:k]]
        assert self.index.search(query[None], k) == [expected]

    @invariant()
    def agrees(self):
        if hasattr(self, "index"):
            assert len(self.index) == len(self.model)
            assert set(self.index.ids) == set(self.model)
            assert all(name in self.index for name in self.model)


class FaissMachine(IndexMachine):
    kind = FaissIndex


quick = settings(
    max_examples=12, stateful_step_count=20, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestExactIndex = IndexMachine.TestCase
TestExactIndex.settings = quick
TestFaissIndex = FaissMachine.TestCase
TestFaissIndex.settings = quick

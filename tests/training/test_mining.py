"""Hard negatives: which candidates are dropped and why, counted right; files and shortlists that a run resumes with."""

import dataclasses
import gzip
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from shortlist.data import Corpus, read_lists
from shortlist.errors import ConfigError, DataError
from shortlist.training import checkpoints, mining
from shortlist.training.documents import Documents
from shortlist.training.examples import build_examples
from shortlist.training.mining import MiningCounts, MiningFilters, mine, select, write_shortlist
from shortlist.training.negatives import read_negatives, write_negatives
from shortlist.training.shortlists import MinedNegatives

CORPUS = {
    "d0": "the moon has phases",
    "d1": "bread needs flour",
    "d2": "the moon has phases",  # the text of d0
    "d3": "fever and cough",
    "d4": "volcanoes erupt",
    "d5": "volcanoes erupt",  # the text of d4
    "d6": "rain",
}
QUERIES = {"a": "moon", "b": "bread", "c": "moon"}
QRELS = {"a": {"d0": 1}, "b": {"d1": 1, "d3": 2}, "c": {"d6": 1}}


@pytest.fixture
def examples():
    return build_examples(QUERIES, QRELS, Documents(Corpus.from_documents(CORPUS)))


class FixedSearch:
    """Every query finds the documents in row order, with scores from 10 downwards."""

    def __init__(self):
        self.asked = []

    def __call__(self, queries, depth, pairs=None):
        self.asked.append((list(queries), depth))
        width = min(depth, len(CORPUS))
        rows = np.full((len(queries), depth), -1, np.int64)
        rows[:, :width] = np.arange(width)
        scores = np.where(rows >= 0, 10.0 - rows, -np.inf).astype(np.float32)
        return rows, scores, np.zeros(0) if pairs is None else (10.0 - pairs[1]).astype(np.float32)


def block(examples, **options):
    filters = MiningFilters(**{name: value for name, value in options.items() if name != "k"})
    (found,) = mine(examples, FixedSearch(), k=options.get("k", 7), depth=7, filters=filters)
    return found


def lists(found):
    return [[row for row in rows if row >= 0] for rows in found.rows.tolist()]


def test_known_positives_go_by_id_and_by_text_and_copies_stand_once(examples):
    # user-reports B.33, B.34: d2 has the text of a positive of a; d6 is a positive of c, whose text is that of a
    found = block(examples)
    assert lists(found) == [[1, 3, 4], [0, 4, 6], [1, 3, 4]]
    counts = found.counts
    # By id: d0 of a, d1 and d3 of b, d6 of c; by text: d2, d6 of a; d0, d2 of c. Copies: d5 for all, d2 for b.
    assert (counts.known_by_id, counts.known_by_text, counts.copies) == (4, 4, 4)
    assert (counts.negatives, counts.queries, counts.candidates) == (9, 3, 21)


def test_scores_are_those_of_the_kept_rows(examples):
    found = block(examples, k=2)
    assert found.scores.tolist() == [[9.0, 7.0], [10.0, 6.0], [9.0, 7.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"skip": 1}, [[3, 4], [4, 6], [3, 4]]),
        ({"max_score": 8.0}, [[3, 4], [4, 6], [3, 4]]),
        ({"min_score": 6.5}, [[1, 3], [0], [1, 3]]),
        # Positive scores: a and c have d0 and d6, mean 7; b has d1 and d3, mean 8.
        ({"margin": 0.5}, [[4], [4, 6], [4]]),
        ({"margin": 0.0}, [[3, 4], [4, 6], [3, 4]]),
        ({"relative_margin": 0.1}, [[4], [4, 6], [4]]),
        ({"relative_margin": 0.5}, [[], [6], []]),
        ({"skip": 1, "min_score": 6.5, "margin": 0.0}, [[3], [], [3]]),
    ],
)
def test_filters_by_rank_and_by_score(examples, options, expected):
    # user-reports B.41: negatives filtered by score, not rank
    assert lists(block(examples, **options)) == expected


def test_relative_margin_lies_below_negative_scores_too(examples):
    rows, scores = np.array([[1, 3]]), np.array([[-4.0, -6.0]], np.float32)
    found = select(
        examples, np.array([0]), rows, scores, k=2, filters=MiningFilters(relative_margin=0.2),
        positive_scores=np.array([-4.0]),
    )  # fmt: skip
    assert lists(found) == [[3]]


def test_counters_agree_with_a_plain_recount():
    # user-reports B.42: the "not enough negatives" report was wrong by a factor
    random = np.random.default_rng(3)
    corpus = {f"d{n}": f"text {n % 33}" for n in range(40)}
    queries = {f"q{n}": f"query {n % 18}" for n in range(25)}
    qrels = {query: {f"d{n}": 1 for n in random.choice(40, 3, replace=False)} for query in queries}
    banned = {query: {f"d{n}" for n in random.choice(40, 2)} for query in list(queries)[::2]}
    examples = build_examples(queries, qrels, Documents(Corpus.from_documents(corpus))).with_banned(banned)
    rows = np.stack([random.permutation(40)[:20] for _ in queries])
    rows[::4, 12:] = -1
    scores = -np.sort(-random.normal(0.5, 0.3, rows.shape).astype(np.float32), axis=1)
    positive = random.normal(0.8, 0.1, len(queries))
    filters = MiningFilters(skip=1, min_score=0.1, max_score=1.0, relative_margin=0.1, margin=0.2)
    found = select(examples, np.arange(25), rows, scores, k=4, filters=filters, positive_scores=positive)

    expected = dict.fromkeys((field.name for field in dataclasses.fields(MiningCounts)), 0)
    for number, query in enumerate(queries):
        own = set(qrels[query])
        texts = {corpus[d] for other, text in queries.items() if text == queries[query] for d in qrels[other]}
        expected["queries"] += 1
        seen, kept, passed = set(), [], 0
        for row, score in zip(rows[number].tolist(), scores[number].astype(float).tolist(), strict=True):
            if row < 0:
                continue
            expected["candidates"] += 1
            text = corpus[f"d{row}"]
            if text in {corpus[d] for d in banned.get(query, ())}:
                reason = "banned"
            elif f"d{row}" in own:
                reason = "known_by_id"
            elif text in texts:
                reason = "known_by_text"
            elif text in seen:
                reason = "copies"
            elif passed < 1:
                reason, passed = "skipped", passed + 1
            elif score < 0.1:
                reason = "below_min_score"
            elif score > 1.0:
                reason = "above_max_score"
            elif score > 0.9 * positive[number]:
                reason = "above_relative_margin"
            elif score > positive[number] - 0.2:
                reason = "above_margin"
            elif len(kept) == 4:
                reason = "beyond"
            else:
                reason = "negatives"
                kept.append(row)
            seen.add(text)
            expected[reason] += 1
        expected["short"] += len(kept) < 4
        expected["without"] += not kept
        assert lists(found)[number] == kept
    assert dataclasses.asdict(found.counts) == expected
    reasons = [name for name in expected if name not in ("queries", "candidates", "short", "without")]
    assert sum(expected[name] for name in reasons) == expected["candidates"]
    assert all(
        expected[name] for name in ("skipped", "above_margin", "beyond", "short", "copies", "known_by_text", "banned")
    )


def test_blocks_add_up_to_the_whole_and_bound_what_is_searched_together(examples, monkeypatch):
    # user-reports B.62: millions of queries on a small machine
    whole = block(examples)
    monkeypatch.setattr(mining, "QUERIES_AT_ONCE", 2)
    search = FixedSearch()
    done = []
    parts = list(mine(examples, search, k=7, depth=7, progress=done.append))
    assert [len(queries) for queries, _ in search.asked] == [2, 1] == done
    assert np.concatenate([part.rows for part in parts]).tolist() == whole.rows.tolist()
    assert parts[0].counts + parts[1].counts == whole.counts


def test_files_of_negatives_are_read_back_and_are_lists_too(examples, tmp_path):
    path = tmp_path / "negatives.jsonl.gz"
    counts = write_negatives(path, examples, FixedSearch(), system="fixed", k=2, depth=5)
    with gzip.open(path, "rt") as handle:
        written = [json.loads(line) for line in handle]
    assert written[1] == {
        "qid": "b", "pos": ["d1", "d3"], "neg": {"fixed": ["d0", "d4"]}, "scores": {"fixed": [10.0, 6.0]}
    }  # fmt: skip
    assert counts.negatives == 6 and counts.short == 0
    queries, rows = read_negatives(path, examples)
    assert queries.tolist() == [0, 0, 1, 1, 2, 2] and rows.tolist() == [1, 3, 0, 4, 1, 3]
    extended = examples.with_negatives("bm25", queries, rows)
    assert extended[1].negatives["bm25"].tolist() == [0, 4]
    (_, second, _) = read_lists(path, corpus=Corpus.from_documents(CORPUS), queries=QUERIES)
    assert [document.id for document in second.documents] == ["d1", "d3", "d0", "d4"]
    assert second.grades == [1, 1, 0, 0]


def test_files_of_another_collection_and_broken_lines_are_refused(examples, tmp_path):
    path = tmp_path / "negatives.jsonl.gz"
    with gzip.open(path, "wt") as handle:
        handle.write('{"qid": "a", "pos": [], "neg": {"x": ["d1"]}}\n{"qid": "b", "pos": [], "neg": {"x": ["gone"]}}\n')
    with pytest.raises(DataError, match="line 2: document 'gone' is not in the corpus"):
        read_negatives(path, examples)
    with gzip.open(path, "wt") as handle:
        handle.write('{"qid": "a"}\n')
    with pytest.raises(DataError, match="line 1: expected"):
        read_negatives(path, examples)


def test_a_search_that_fails_leaves_the_old_file(examples, tmp_path):
    path = tmp_path / "negatives.jsonl.gz"
    path.write_bytes(b"old")

    def broken(queries, depth, pairs=None):
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        write_negatives(path, examples, broken, system="x", k=2, depth=5)
    with pytest.raises(DataError, match="no"):
        write_shortlist(tmp_path / "mined.npy", examples, broken, depth=5)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_shortlists_hold_a_row_a_query(examples, tmp_path):
    counts = write_shortlist(tmp_path / "mined.npy", examples, FixedSearch(), depth=5)
    mined = np.load(tmp_path / "mined.npy")
    assert mined.dtype == np.int32 and mined.tolist() == [[1, 3, 4, -1, -1], [0, 4, -1, -1, -1], [1, 3, 4, -1, -1]]
    assert counts.negatives == 8 and counts.short == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": -1}, "skip of the negatives is -1"),
        ({"margin": -0.1}, "margin of the negatives is -0.1"),
        ({"margin": math.inf}, "margin of the negatives is inf; expected a finite number"),
        ({"min_score": math.nan}, "min_score of the negatives is nan"),
        ({"max_score": math.nan}, "max_score of the negatives is nan"),
        ({"relative_margin": math.nan}, "relative_margin of the negatives is nan"),
        ({"relative_margin": 1.0}, "relative_margin of the negatives is 1.0; expected a share"),
        ({"min_score": 1.0, "max_score": 0.5}, "min_score of the negatives is 1.0, above max_score 0.5"),
    ],
)
def test_impossible_filters_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        MiningFilters(**options)


# Shortlists during training


class Recorder:
    """Stands for the mining of a run: writes the number of the call into the file."""

    def __init__(self, examples, depth=3):
        self.calls = 0
        self.shape = (len(examples), depth)

    def __call__(self, path):
        self.calls += 1
        np.save(path, np.full(self.shape, self.calls, np.int32))
        return MiningCounts()


def refresher(examples, write, output, **options):
    batches = SimpleNamespace(examples=examples, draws=SimpleNamespace(mined=None))
    return batches, MinedNegatives(batches, write, output=output, steps_per_epoch=10, depth=3, **options)


def begin(callback, step):
    callback.on_epoch_begin(None, SimpleNamespace(global_step=step), None)


def test_negatives_are_mined_when_they_are_due(examples, tmp_path):
    write = Recorder(examples)
    batches, callback = refresher(examples, write, tmp_path, start_epoch=1, refresh_epochs=2)
    used = []
    for epoch in range(6):
        begin(callback, 10 * epoch)
        used.append(None if batches.draws.mined is None else int(batches.draws.mined[0, 0]))
    assert used == [None, 1, 1, 2, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["mined-00005.npy"]


def test_a_resumed_run_uses_the_shortlist_of_the_interrupted_one(examples, tmp_path):
    write = Recorder(examples)
    _, callback = refresher(examples, write, tmp_path, refresh_epochs=2)
    begin(callback, 0)
    (tmp_path / "checkpoints" / "step-15").mkdir(parents=True)
    again = Recorder(examples)
    again.calls = 7
    batches, resumed = refresher(examples, again, tmp_path, refresh_epochs=2)
    begin(resumed, 15)
    assert int(batches.draws.mined[0, 0]) == 1 and again.calls == 7
    begin(resumed, 20)
    assert int(batches.draws.mined[0, 0]) == 8


def test_shortlists_that_a_checkpoint_would_resume_with_are_kept(examples, tmp_path):
    _, callback = refresher(examples, Recorder(examples), tmp_path, refresh_epochs=2)
    begin(callback, 0)
    state = checkpoints.checkpoint_path(tmp_path, 15) / checkpoints.STATE
    state.mkdir(parents=True)
    (state / checkpoints.TRAINER_STATE).write_text("{}")
    begin(callback, 20)
    assert sorted(path.name for path in tmp_path.glob("*.npy")) == ["mined-00000.npy", "mined-00002.npy"]
    begin(callback, 40)
    assert sorted(path.name for path in tmp_path.glob("*.npy")) == ["mined-00000.npy", "mined-00004.npy"]


def test_a_shortlist_that_is_gone_is_mined_again_and_said(examples, tmp_path, caplog):
    write = Recorder(examples)
    batches, callback = refresher(examples, write, tmp_path)
    begin(callback, 15)
    assert write.calls == 1 and "is not there any more" in caplog.text
    assert batches.draws.mined is not None


def test_a_shortlist_of_another_run_is_refused(examples, tmp_path):
    np.save(tmp_path / "mined-00000.npy", np.zeros((2, 3), np.int32))
    _, callback = refresher(examples, Recorder(examples), tmp_path)
    with pytest.raises(DataError, match=r"holds int32 of shape \(2, 3\); expected int32 \(3, 3\)"):
        begin(callback, 5)
    (tmp_path / "mined-00000.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match="damaged or cut short"):
        begin(callback, 5)

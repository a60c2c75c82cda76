"""Lists of every shape become one record; what is missing is counted; what is unknown is named with its line."""

# ruff: noqa: E501 (one shape a line)
import json

import pytest

from shortlist.data import Collection, Corpus, Document, RankedList, load_collection, read_lists, write_lists
from shortlist.data.lists import content_id
from shortlist.errors import DataError

CORPUS = [("1", "one"), ("2", "two"), ("3", "three"), ("4", "four")]
QUERIES = {"q": "which?", "7": "seven?"}

# shape → (line, query id, query, [(id or None for content ids, title, text, grade, score)])
SHAPES = {
    "FlagEmbedding": (
        {"query": "which?", "pos": ["one"], "neg": ["two", "three"], "pos_scores": [0.9], "neg_scores": [0.1, 0.2], "prompt": "p"},
        None, "which?", [(None, "", "one", 1, 0.9), (None, "", "two", 0, 0.1), (None, "", "three", 0, 0.2)],
    ),
    "FlagEmbedding with ids": (
        {"query": "which?", "pos": ["one"], "neg": ["two"], "pos_id": ["1"], "neg_id": [2]},
        None, "which?", [("1", "", "one", 1, None), ("2", "", "two", 0, None)],
    ),
    "Tevatron 1": (
        {"query_id": 7, "query": "which?", "positive_passages": [{"docid": "1", "title": "t", "text": "one"}],
         "negative_passages": [{"docid": 2, "title": None, "text": "two"}]},
        "7", "which?", [("1", "t", "one", 1, None), ("2", "", "two", 0, None)],
    ),
    "Tevatron 2": (
        {"query_id": "q", "query": "which?", "positive_document_ids": ["1"], "negative_document_ids": ["2", "3"]},
        "q", "which?", [("1", "", "one", 1, None), ("2", "", "two", 0, None), ("3", "", "three", 0, None)],
    ),
    "msmarco-hard-negatives": (
        {"qid": 7, "pos": [1], "neg": {"bm25": [2, 3], "dense": [3, 4]}},
        "7", "seven?", [("1", "", "one", 1, None), ("2", "", "two", 0, None), ("3", "", "three", 0, None), ("4", "", "four", 0, None)],
    ),
    "msmarco-hard-negatives with scores": (
        {"qid": 7, "pos": [{"pid": 1, "ce-score": 9.5}], "neg": {"bm25": [{"pid": 2, "ce-score": -1.0}]}},
        "7", "seven?", [("1", "", "one", 1, 9.5), ("2", "", "two", 0, -1.0)],
    ),
    "ColBERT": (["q", 1, "2"], "q", "which?", [("1", "", "one", 1, None), ("2", "", "two", 0, None)]),
    "ColBERT with scores": ([7, [1, 5.0], [2, 3]], "7", "seven?", [("1", "", "one", 1, 5.0), ("2", "", "two", 0, 3.0)]),
    "BlockRank": (
        {"query": "which?", "query_id": "q", "documents": [{"doc_id": "1", "title": "t", "text": "one"}, {"doc_id": "2", "text": "two"}], "answer_ids": ["2"]},
        "q", "which?", [("1", "t", "one", 0, None), ("2", "", "two", 1, None)],
    ),
    "rank_llm": (
        {"query": {"text": "which?", "qid": "q"}, "candidates": [
            {"docid": "1", "score": 8.5, "doc": {"title": "t", "segment": "one"}}, {"docid": 2, "score": 7, "doc": {"contents": "two"}}]},
        "q", "which?", [("1", "t", "one", None, 8.5), ("2", "", "two", None, 7.0)],
    ),
    "triplet columns": (
        {"anchor": "which?", "positive": "one", "negative_10": "four", "negative_2": "three", "negative": "two"},
        None, "which?", [(None, "", "one", 1, None), (None, "", "two", 0, None), (None, "", "three", 0, None), (None, "", "four", 0, None)],
    ),
    "margin": (
        {"query": "which?", "positive": "one", "negative": "two", "label": 3.5},
        None, "which?", [(None, "", "one", 1, 3.5), (None, "", "two", 0, 0.0)],
    ),
    "label list": (
        {"query": "which?", "positive": "one", "negative": "two", "scores": [3.5, 1.0]},
        None, "which?", [(None, "", "one", 1, 3.5), (None, "", "two", 0, 1.0)],
    ),
    "pair with label": ({"sentence1": "which?", "sentence2": "one", "label": 0}, None, "which?", [(None, "", "one", 0, None)]),
    "pair with score": ({"sentence1": "which?", "sentence2": "one", "score": 0.7}, None, "which?", [(None, "", "one", None, 0.7)]),
    "pair": ({"query": "which?", "text": "one"}, None, "which?", [(None, "", "one", 1, None)]),
}  # fmt: skip


def write(tmp_path, *values, name="train.jsonl"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values), encoding="utf-8")
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_becomes_the_same_record(tmp_path, shape):
    value, query_id, query, documents = SHAPES[shape]
    [ranked] = read_lists(write(tmp_path, value), corpus=Corpus.from_documents(CORPUS), queries=QUERIES)
    assert ranked.query == query and ranked.query_id == (query_id or content_id(query))
    expected = [(id or content_id(title, text), title, text) for id, title, text, _, _ in documents]
    assert [(d.id, d.title, d.text) for d in ranked.documents] == expected
    assert ranked.grades == [grade for *_, grade, _ in documents]
    assert ranked.scores == [score for *_, score in documents]


def test_equal_texts_are_one_document(tmp_path):
    first, second = read_lists(
        write(tmp_path, {"query": "a", "pos": ["x"], "neg": ["y"]}, {"query": "b", "pos": ["y"], "neg": ["x"]})
    )
    assert first.documents[0].id == second.documents[1].id != first.documents[1].id


def test_negatives_that_reappear_as_positives_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    [ranked] = read_lists(write(tmp_path, {"query": "a", "pos": ["x"], "neg": ["y", "x", "y"]}))
    assert [d.text for d in ranked.documents] == ["x", "y"] and ranked.grades == [1, 0]
    assert (
        "1 negatives left out because they are positives" in caplog.text and "1 documents that are twice" in caplog.text
    )


def test_ids_that_are_absent_are_counted_not_fatal(tmp_path, caplog):
    path = write(
        tmp_path, {"qid": "q", "pos": ["1"], "neg": {"x": ["9", "2"]}}, {"qid": "none", "pos": ["1"], "neg": {}}
    )
    [ranked] = read_lists(path, corpus=Corpus.from_documents(CORPUS), queries=QUERIES)
    assert [d.id for d in ranked.documents] == ["1", "2"]
    assert "1 documents are not in the corpus and are left out of their lists: '9'" in caplog.text
    assert "1 lists left out because their query has no text: 'none'" in caplog.text


@pytest.mark.parametrize(
    "value, said",
    [
        ('{"query": "a", "pos": ["x"]', "line 2: not valid JSON"),
        ({"q": "a", "p": "b"}, "line 2: no list was recognised; it has 'q', 'p', expected one of"),
        ({"pos": ["x"], "neg": ["y"]}, "line 2: the list has no query"),
        ({"query": "a", "pos": [], "neg": []}, "line 2: the list has no document"),
        ({"query": "a", "pos": ["x"], "neg": ["y"], "neg_scores": [1, 2]}, "line 2: 2 scores for 1 documents"),
        ({"query": "a", "pos": ["x"], "pos_scores": [float("nan")]}, "line 2: score nan; expected a finite number"),
        ({"query": "a", "documents": [{"title": "t"}]}, "line 2: a document with neither id nor text; it has 'title'"),
        ({"query": 5, "pos": ["x"]}, 'line 2: "query" is a int; expected a string'),
        ("3", "line 2: a JSON int is no list"),
        (["q"], "line 2: a list of 1 values"),
        (["q", "1", "2"], "line 2: the query is given by its id 'q' only; pass queries="),
        (
            {"query": "a", "query_id": "q", "positive_document_ids": ["1"]},
            "line 2: documents are given by ids only, such as '1'",
        ),
    ],
)
def test_lines_that_are_refused_or_skipped(tmp_path, value, said, caplog):
    path = write(tmp_path, {"query": "a", "pos": ["x"]}, value)
    with pytest.raises(DataError, match=said):
        list(read_lists(path))
    assert len(list(read_lists(path, on_error="skip"))) == 1
    assert "1 lines skipped" in caplog.text


def test_nothing_usable_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no usable list"):
        list(read_lists(write(tmp_path)))


def test_lists_are_streamed(tmp_path):
    path = write(tmp_path, {"query": "a", "pos": ["x"]}, "broken")
    passes = read_lists(path)
    assert next(passes).query == "a", "the first list comes before the second line is read"
    with pytest.raises(DataError):
        next(passes)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_written_lists_read_back(tmp_path, name):
    lists = [
        RankedList("q 1", "a\u2028b", [Document("d 1", "t", "x", {"k": 1}), Document("2", "", "y"), Document("3", "", "z")], [2, 0, -1], [0.5, None, 1.25]),
        RankedList("2", "c", [Document("1", "", "")]),
        RankedList("3", "d", [Document("1", "", "x")], [1.0]),
    ]  # fmt: skip
    assert write_lists(iter(lists), tmp_path / name) == 3
    again = list(read_lists(tmp_path / name))
    assert again == lists
    assert again[0].positives == [lists[0].documents[0]] and again[0].negatives == lists[0].documents[1:]
    assert again[1].positives == again[1].negatives == [] and again[1].grades == [None]


def test_a_score_that_is_not_finite_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(DataError, match="score of document 'd' for query 'q' is nan"):
        write_lists([RankedList("q", "a", [Document("d")], [1.0], [float("nan")])], tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_list_file_is_a_collection(tmp_path):
    path = write(tmp_path, {"query": "a", "pos": ["x"], "neg": ["y"]}, {"query": "b", "pos": ["y"], "neg": ["z"]},
                 {"query": "a", "pos": ["w"], "neg": ["x"]}, name="mined.jsonl")  # fmt: skip
    collection = load_collection(path)
    assert (collection.kind, collection.name, collection.splits) == ("lists", "mined", ["train"])
    assert list(collection.corpus.texts()) == ["x", "y", "z", "w"], "each text once"
    assert sorted(collection.queries("train").values()) == ["a", "b"]
    qrels = collection.qrels("train")
    graded = {collection.corpus[d].text: g for d, g in qrels[content_id("a")].items()}
    assert graded == {"x": 1, "y": 0, "w": 1}, "a positive of one list stays one"
    assert len(list(collection.lists())) == len(list(collection.lists("train"))) == 3


def test_a_folder_of_list_files_has_splits(tmp_path):
    for split in ("train", "dev", "test"):
        write(
            tmp_path,
            {"query": split, "query_id": split, "documents": [{"doc_id": "1", "text": "x"}], "answer_ids": ["1"]},
            name=f"{split}.jsonl",
        )
    collection = load_collection(tmp_path)
    assert (
        collection.splits == ["train", "dev", "test"]
        and collection.queries() == {"test": "test"}
        and len(collection.corpus) == 1
    )
    write(tmp_path, {"query": "a", "pos": ["x"]}, name="more.jsonl")
    with pytest.raises(DataError, match="two list files for the split 'train'"):
        load_collection(tmp_path)


def test_candidates_without_judgements_have_lists_only(tmp_path):
    collection = load_collection(write(tmp_path, SHAPES["rank_llm"][0], name="test.jsonl"))
    assert (
        collection.judged_splits == []
        and collection.list_splits == ["test"]
        and collection.queries("test") == {"q": "which?"}
    )
    assert list(collection.lists("test"))[0].scores == [8.5, 7.0]


def test_lists_of_ids_need_a_corpus_beside_them(tmp_path):
    path = write(tmp_path / "set", SHAPES["ColBERT"][0])
    with pytest.raises(DataError, match="the lists hold ids only, such as 'q'; put corpus.jsonl and queries.jsonl"):
        load_collection(path)
    write(tmp_path / "set", *({"_id": id, "text": text} for id, text in CORPUS), name="corpus.jsonl")
    write(tmp_path / "set", *({"_id": id, "text": text} for id, text in QUERIES.items()), name="queries.jsonl")
    collection = load_collection(tmp_path / "set")
    assert collection.kind == "beir" and [d.text for d in next(collection.lists("train")).documents] == ["one", "two"]
    assert collection.default_split == "train"


def test_lists_of_a_beir_folder(tmp_path, toy, toy_beir):
    import shutil

    shutil.copytree(toy_beir, tmp_path / "set")
    (tmp_path / "set" / "lists").mkdir()
    lists = [RankedList("q1", "?", [toy.corpus["astro1"], toy.corpus["law1"]], [1.0, 0.0])]
    write_lists(lists, tmp_path / "set" / "lists" / "train.jsonl.gz")
    collection = load_collection(tmp_path / "set")
    assert (
        list(collection.lists("train")) == lists == list(collection.lists("train"))
        and list(collection.lists("test")) == []
    )
    assert "lists/train.jsonl.gz" in collection.checksums()


def test_columns_of_hugging_face_data_sets(tmp_path):
    from datasets import Dataset, DatasetDict

    rows = {"anchor": ["a", "b"], "positive": ["x", "y"], "negative_1": ["y", None], "negative_2": ["z", "x"]}
    DatasetDict({"train": Dataset.from_dict(rows), "test": Dataset.from_dict(rows)}).save_to_disk(tmp_path / "saved")
    (tmp_path / "table").mkdir()
    Dataset.from_dict(rows).to_parquet(tmp_path / "table" / "train-00000-of-00001.parquet")
    for path, splits in ((tmp_path / "saved", ["train", "test"]), (tmp_path / "table", ["train"]),
                         (tmp_path / "table" / "train-00000-of-00001.parquet", ["train"])):  # fmt: skip
        collection = load_collection(path)
        assert collection.kind == "hf" and collection.splits == splits
        first, second = collection.lists("train")
        assert [d.text for d in first.documents] == ["x", "y", "z"] and first.grades == [1, 0, 0]
        assert [d.text for d in second.documents] == ["y", "x"]
        assert sorted(collection.corpus.texts()) == ["x", "y", "z"] and list(collection.queries("train").values()) == [
            "a",
            "b",
        ]
        assert len(collection.checksums()) >= 1


def test_unknown_columns_are_listed(tmp_path):
    from datasets import Dataset

    Dataset.from_dict({"foo": ["a"], "bar": ["x"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        DataError, match="the columns 'foo', 'bar' were not understood; rename them to 'query', 'positive'"
    ):
        load_collection(tmp_path / "saved")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="could not be opened as a Hugging Face data set"):
        load_collection(tmp_path / "broken")


def test_lists_of_a_collection_can_be_written(tmp_path, toy):
    collection = Collection.from_parts(
        toy.corpus, {"q": "?"}, lists={"train": [RankedList("q", "?", toy.corpus.slice(0, 3), [1, 0, 0])]}
    )
    assert write_lists(collection.lists("train"), tmp_path / "x.jsonl") == 1

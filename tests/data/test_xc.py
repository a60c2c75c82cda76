import gzip
import json
import logging

import numpy as np
import pytest
import scipy.sparse

from shortlist.data import xc
from shortlist.data.label_qrels import LabelQrels, positive_counts
from shortlist.data.load import load_collection
from shortlist.data.matrices import write_label_matrix
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.types import Qrels

LABELS = [{"uid": "a", "title": "apples"}, {"uid": 7, "title": "bears", "content": "big"}, {"title": "cats"}]
TRAIN = [
    {"uid": "t0", "title": "red apples", "content": "", "target_ind": [0], "target_rel": [1.0]},
    {"uid": "t1", "title": "apples for bears", "content": "x", "target_ind": [1, 0], "target_rel": [1.0, 1.0]},
    {"uid": "t2", "title": "nothing", "content": None, "target_ind": [], "target_rel": []},
]
TEST = [{"uid": "s0", "title": "a bear", "content": "in the wood", "target_ind": [1]}]


def lines(path, records):
    text = "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(text.encode())
    return path


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "labels"
    lines(path / "lbl.json", LABELS)
    lines(path / "trn.json", TRAIN)
    lines(path / "tst.json", TEST)
    return path


def text_folder(path, *, sub="", matrix="Y.{}.npz"):
    lines(path / sub / "trn_X.txt", ["red apples\n", "apples for bears\n", "nothing\n"])
    lines(path / sub / "tst_X.txt", ["a bear\n"])
    lines(path / sub / "Y.txt", ["apples\n", "bears\n", "cats\n"])
    train = scipy.sparse.csr_matrix([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    test = scipy.sparse.csr_matrix([[0, 1, 0]])
    if matrix.endswith("npz"):
        write_label_matrix(path / matrix.format("trn"), train)
        write_label_matrix(path / matrix.format("tst"), test)
    else:
        lines(path / matrix.format("trn"), ["3 3\n", "0:1\n", "0:1 1:1\n", "\n"])
        lines(path / matrix.format("tst"), ["1 3\n", "1:1\n"])
    return path


def test_toy_labels_are_the_documents_and_points_the_queries(toy_xc):
    collection = load_collection(toy_xc)
    assert collection.kind == "xc" and collection.splits == ["train", "test"] and collection.default_split == "test"
    assert len(collection.corpus) == 12 and collection.corpus.ids[0] == "astronomy"
    assert len(collection.queries("train")) == 60 and len(collection.queries("test")) == 20
    assert collection.queries("train")["tr2"] == "Tides, the moon and the ocean"
    assert set(collection.qrels("train")["tr0"]) == {"astronomy"}
    assert collection.qrels("train")["tr3"] == {"astronomy": 1, collection.corpus.ids[4]: 1}
    assert collection.propensity == (0.55, 1.5) and "PSP@5" in collection.measures
    assert collection.filters("test")["te0"] == {collection.corpus.ids[4]}
    assert collection.filters("train") == {}
    assert set(collection.checksums()) == {"lbl.json.gz", "trn.json.gz", "tst.json.gz", "filter_labels_test.txt"}
    train, dev = collection.dev_split()
    assert len(train) + len(dev) == 60 and len(dev) >= 1


def test_json_lines_give_the_label_matrix_of_the_documented_shape(folder):  # user-reports A.27
    parts = xc.read(folder)
    assert parts.label_ids == ["a", "7", "2"]  # a missing uid is the line number from 0
    np.testing.assert_array_equal(parts.relevance("train").toarray(), [[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    assert parts.relevance("test").shape == (1, 3)
    assert parts.point_ids("train") == ["t0", "t1", "t2"]
    assert parts.queries("train") == {"t0": "red apples", "t1": "apples for bears x", "t2": "nothing"}
    assert parts.train_counts == {"a": 2, "7": 1, "2": 0}
    assert [d.text for d in parts.labels()] == ["", "big", ""]


def test_qrels_are_made_from_the_matrix_and_behave_like_any(folder):
    qrels = xc.read(folder).qrels("train")
    assert isinstance(qrels, LabelQrels) and dict(qrels) == {"t0": {"a": 1}, "t1": {"a": 1, "7": 1}, "t2": {}}
    assert len(qrels) == 3 and qrels.num_judgements == 3 and "t2" in qrels and "zz" not in qrels
    assert qrels.relevant("t1") == {"a": 1, "7": 1} and qrels.relevant("zz") == {}
    assert Qrels(qrels)["t1"] == qrels["t1"]
    with pytest.raises(KeyError):
        qrels["zz"]
    assert positive_counts(qrels) == {"a": 2, "7": 1, "2": 0}
    assert positive_counts(Qrels({"q": {"x": 2, "y": 0}})) == {"x": 1}


def test_fractional_relevance_is_grade_one_and_kept_beside(folder):
    lines(folder / "trn.json", [{**TRAIN[1], "target_rel": [0.3, 0.0]}])
    parts = xc.read(folder)
    assert parts.qrels("train")["t1"] == {"7": 1, "a": 0}
    np.testing.assert_allclose(sorted(parts.relevance("train").data), [0.0, 0.3], atol=1e-7)
    assert parts.train_counts == {"a": 0, "7": 1, "2": 0}
    lines(folder / "trn.json", [{**TRAIN[1], "target_rel": [3, 1]}])
    assert xc.read(folder).qrels("train")["t1"] == {"7": 3, "a": 1}


@pytest.mark.parametrize(
    "sub, matrix", [("", "Y.{}.npz"), ("raw", "Y.{}.npz"), ("", "{}_X_Y.txt"), ("raw", "raw/Y.{}.npz")]
)
def test_text_lines_with_matrices_read_alike_in_and_beside_raw(tmp_path, sub, matrix):
    path = text_folder(tmp_path / "set", sub=sub, matrix=matrix)
    for place in {path, path / sub} if not matrix.startswith("{}") else {path}:
        assert xc.detect(place)
        parts = xc.read(place)
        assert parts.name == "set"
        assert parts.qrels("train")["train-1"] == {"0": 1, "1": 1}
        assert parts.queries("test") == {"test-0": "a bear"}
        assert parts.label_ids == ["0", "1", "2"]
        assert list(load_collection(place).all_queries()) == ["train-0", "train-1", "train-2", "test-0"]


def test_pecos_text_and_the_wikipedia_archive(tmp_path):
    pecos = tmp_path / "pecos"
    lines(pecos / "train.txt", ["0,2\tred apples\tand a tab\n", "\tno label\n"])
    lines(pecos / "test.txt", ["1\ta bear\n"])
    lines(pecos / "output-labels.txt", ["apples\n", "bears\n", "cats\n"])
    parts = xc.read(pecos)
    assert parts.qrels("train")["train-0"] == {"0": 1, "2": 1} and parts.qrels("train")["train-1"] == {}
    assert parts.queries("train")["train-0"] == "red apples\tand a tab"
    wiki = tmp_path / "Wikipedia-500K.raw"
    lines(wiki / "trn.raw.json.gz", TRAIN)
    lines(wiki / "tst.raw.json.gz", TEST)
    lines(wiki / "Yf.txt", ["12->Category:Apples\n", "13->Bears->Brown bears\n", "cats\n"])
    parts = xc.read(wiki)
    assert [d.text for d in parts.labels()] == ["Category:Apples", "Brown bears", "cats"]
    assert parts.propensity == (0.5, 0.4)


def test_titles_only_sets_leave_the_bodies_out(folder):
    titles = folder.rename(folder.with_name("LF-AmazonTitles-131K"))
    collection = load_collection(titles)
    assert collection.queries("train")["t1"] == "apples for bears" and collection.corpus["7"].text == ""
    assert collection.propensity == (0.6, 2.6)
    bodies = titles.rename(folder.with_name("LF-Amazon-131K"))
    assert load_collection(bodies).queries("train")["t1"] == "apples for bears x"


def test_missing_filter_files_of_an_amazon_set_are_reported(folder, caplog):
    xc.read(folder.rename(folder.with_name("LF-Amazon-131K")))
    assert "filter_labels_train.txt and filter_labels_test.txt not found" in caplog.text


def test_sizes_are_compared_before_anything_starts(tmp_path):  # user-reports A.30
    path = text_folder(tmp_path / "set")
    lines(path / "trn_X.txt", ["one\n", "two\n"])
    with pytest.raises(DataError, match=r"Y.trn.npz has shape \(3, 3\), but trn_X.txt has 2 lines.*expected.*\(2, 3\)"):
        load_collection(path)
    path = text_folder(tmp_path / "other")
    lines(path / "Y.txt", ["apples\n", "bears\n"])
    with pytest.raises(DataError, match=r"shape \(3, 3\).*Y.txt 2 \(labels\)"):
        load_collection(path)
    (path / "Y.trn.npz").unlink()
    with pytest.raises(MissingInputError, match="no label matrix beside it; expected Y.trn.npz or trn_X_Y.txt"):
        load_collection(path)


def test_header_of_a_text_matrix_is_checked_at_opening(tmp_path):  # user-reports A.29
    path = text_folder(tmp_path / "set", matrix="{}_X_Y.txt")
    lines(path / "trn_X_Y.txt", ["3 33333333333333\n", "0:1\n", "\n", "\n"])
    with pytest.raises(DataError, match=r"shape \(3, 33333333333333\)"):
        load_collection(path)
    lines(path / "trn_X_Y.txt", ["0:1\n", "\n", "\n"])
    with pytest.raises(DataError, match="line 1: expected a header"):
        load_collection(path)


@pytest.mark.parametrize(
    "record, message",
    [
        ("{broken\n", "trn.json, line 2: not valid JSON"),
        ("[1]\n", "line 2: found a list"),
        ({**TRAIN[0], "target_ind": [3]}, "line 2: label number 3, but lbl.json has 3 labels"),
        ({**TRAIN[0], "target_ind": [-1]}, "line 2: label number -1"),
        ({**TRAIN[0], "target_ind": ["2"]}, 'line 2: "target_ind" holds "2"; expected label line numbers'),
        ({**TRAIN[0], "target_ind": [3.5]}, 'line 2: "target_ind" holds 3.5; expected'),
        ({**TRAIN[0], "target_ind": [0, 2.0]}, r'line 2: "target_ind" holds 2.0; expected .* \(not 2.0, no string\)'),
        ({**TRAIN[0], "target_ind": [True]}, 'line 2: "target_ind" holds true; expected'),
        ({**TRAIN[0], "target_ind": None}, 'line 2: "target_ind" is null; expected'),
        ({**TRAIN[0], "target_ind": {"0": 1}}, 'line 2: "target_ind" is {"0": 1}; expected'),
        ({"uid": "x", "title": "no targets"}, 'line 2: "target_ind" is not there'),
        ({**TRAIN[0], "target_rel": [1.0, 1.0]}, 'line 2: "target_rel" has 2 values for 1'),
        ({**TRAIN[0], "target_rel": ["1"]}, "line 2: relevance '1'"),
        ('{"uid": "n", "title": "x", "target_ind": [0], "target_rel": [NaN]}\n', "relevance nan"),
        ({**TRAIN[0], "target_rel": [1e300]}, r"trn.json, line 2: relevance 1e\+300; expected at most 2147483647"),
        ({**TRAIN[0], "target_rel": [2**63]}, "line 2: relevance 9223372036854775808; expected at most"),
        ({**TRAIN[0], "target_rel": [-(2**40)]}, "line 2: relevance -1099511627776"),
        ({**TRAIN[0], "title": "a \ud800 b"}, 'trn.json, line 2: "title" is not valid Unicode text'),
        ({**TRAIN[0], "content": "a \udc00"}, 'line 2: "content" is not valid Unicode text'),
        ({"uid": "x", "target_ind": []}, "line 2: neither title nor content"),
        ({**TRAIN[0], "title": 5}, 'line 2: "title" is a int'),
        ({**TRAIN[0], "uid": ""}, "line 2: the label or point id is empty"),
    ],
)
def test_broken_points_are_refused_or_skipped_and_counted(folder, caplog, record, message):
    lines(folder / "trn.json", [TRAIN[0], record, TRAIN[1]])
    with pytest.raises(DataError, match=message):
        load_collection(folder).qrels("train")
    with caplog.at_level(logging.WARNING):
        collection = load_collection(folder, on_error="skip")
        assert dict(collection.qrels("train")) == {"t0": {"a": 1}, "t1": {"a": 1, "7": 1}}
        assert list(collection.queries("train")) == ["t0", "t1"]
    assert "1 lines skipped" in caplog.text


def test_filters_go_by_line_even_when_lines_were_skipped(folder):
    lines(folder / "trn.json", ["broken\n", TRAIN[0], TRAIN[1]])
    lines(folder / "filter_labels_train.txt", ["2 0\n", "0 1\n", "\n", "1 2\n"])
    assert xc.read(folder, on_error="skip").filters("train") == {"t1": {"a"}, "t0": {"2"}}


@pytest.mark.parametrize(
    "line, message", [("0 3\n", "outside"), ("3 0\n", "outside"), ("0\n", "two line numbers"), ("a b\n", "two line")]
)
def test_filter_files_of_other_data_are_refused(folder, line, message):
    lines(folder / "filter_labels_train.txt", ["0 1\n", line])
    with pytest.raises(DataError, match=f"filter_labels_train.txt, line 2.*{message}"):
        xc.read(folder).filters("train")


def test_a_broken_label_line_always_raises_because_labels_are_line_numbers(folder):
    lines(folder / "lbl.json", [LABELS[0], "broken\n", LABELS[1]])
    with pytest.raises(DataError, match="lbl.json, line 2: not valid JSON"):
        load_collection(folder, on_error="skip")


def test_a_label_that_is_no_unicode_text_is_refused_by_line_and_field(folder):
    lines(folder / "lbl.json", [LABELS[0], {"title": "b \ud83d"}, LABELS[2]])
    with pytest.raises(DataError, match='lbl.json, line 2: "title" is not valid Unicode text'):
        load_collection(folder)


def test_repeated_ids_name_both_lines(folder):
    lines(folder / "trn.json", [TRAIN[0], TRAIN[1], TRAIN[0]])
    with pytest.raises(DataError, match="point id 't0' is on line 1 and again on line 3"):
        xc.read(folder).point_ids("train")
    lines(folder / "lbl.json", [LABELS[0], LABELS[0], LABELS[1]])
    with pytest.raises(DataError, match="label id 'a' is on line 1 and again on line 2"):
        _ = xc.read(folder).label_ids


def test_uids_that_restart_in_each_split_work_split_by_split(folder):
    lines(folder / "tst.json", [{**TEST[0], "uid": "t0"}])
    collection = load_collection(folder)
    assert collection.queries("train")["t0"] != collection.queries("test")["t0"]
    with pytest.raises(DataError, match="point 't0' of split 'test' is another text"):
        collection.all_queries()


def test_blank_lines_bom_crlf_and_line_separators_do_not_shift_labels(folder):  # user-reports A.22
    text = "".join(json.dumps(r, ensure_ascii=False) + "\r\n" for r in [{"title": "a\u2028b"}, {"title": "c\x85"}])
    (folder / "lbl.json").write_bytes(("\ufeff" + text + "\n\n").encode())
    lines(folder / "trn.json", [TRAIN[0], TRAIN[1], "\n"])
    parts = xc.read(folder)
    assert parts.num_labels == 2 and [d.title for d in parts.labels()] == ["a\u2028b", "c\x85"]
    assert parts.point_ids("train") == ["t0", "t1"]


def test_latin_1_labels_are_refused_with_the_line(folder):
    (folder / "lbl.json").write_bytes(b'{"title": "a"}\n{"title": "caf\xe9"}\n{"title": "b"}\n')
    with pytest.raises(DataError, match="lbl.json, line 2: byte 0xe9"):
        load_collection(folder)


@pytest.mark.parametrize("matrix", ["Y.{}.npz", "{}_X_Y.txt"])
def test_a_relevance_too_large_for_a_grade_is_refused_and_the_largest_is_kept(tmp_path, folder, matrix):
    path = text_folder(tmp_path / "text", matrix=matrix)
    large = scipy.sparse.csr_matrix([[0, 0, 0], [1, 1e20, 0], [0, 0, 0]])
    if matrix.endswith("npz"):
        write_label_matrix(path / "Y.trn.npz", large)
    else:
        lines(path / "trn_X_Y.txt", ["3 3\n", "\n", "0:1 1:1e20\n", "\n"])
    with pytest.raises(DataError, match=r"row 1 \(from 0\), label 1 has relevance 1e\+20; expected at most 2147483647"):
        load_collection(path).qrels("train")
    lines(folder / "trn.json", [{**TRAIN[0], "target_rel": [2**31 - 1]}])
    assert load_collection(folder).qrels("train").relevant("t0") == {"a": 2**31}  # the matrix is float32


def test_incomplete_folders_say_what_is_missing(folder, tmp_path):
    (folder / "lbl.json").unlink()
    with pytest.raises(MissingInputError, match="no label texts; expected one of lbl.json"):
        xc.read(folder)
    with pytest.raises(MissingInputError, match="no extreme-classification data"):
        xc.read(tmp_path)
    with pytest.raises(ConfigError, match="on_error"):
        xc.read(text_folder(tmp_path / "x"), on_error="ignore")
    parts = xc.read(tmp_path / "x")
    with pytest.raises(MissingInputError, match="no split 'dev'; it has train, test"):
        parts.queries("dev")


def test_other_folders_are_not_taken_for_label_sets(toy_beir, tmp_path):
    assert not xc.detect(toy_beir) and not xc.detect(tmp_path) and not xc.detect(tmp_path / "none")
    lines(tmp_path / "hf" / "train.json", [{"query": "a"}])
    lines(tmp_path / "tsv" / "train.txt", ["query\tpositive\n"])
    lines(tmp_path / "tsv" / "labels.txt", ["x\n"])
    assert not xc.detect(tmp_path / "hf") and not xc.detect(tmp_path / "tsv")

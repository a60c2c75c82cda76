"""Qrels and runs: every shape in use is read, all else refused by file and line; runs are written strictly."""

import gzip
import io
import sys

import numpy as np
import pytest

from shortlist.data import read_qrels, read_run, trec, write_qrels, write_run
from shortlist.data.lines import read_blocks
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.types import Qrels, Run


def write(tmp_path, text, name="file"):
    path = tmp_path / name
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\n10\t20\t1\n",
        "q1\td1\t2\nq1\td2\t0\n10\t20\t1\n",
        "\ufeffquery-id\tcorpus-id\tscore\r\nq1\td1\t2\r\nq1\td2\t0\r\n10\t20\t1\r\n",
        "q1 0 d1 2\nq1 0 d2 0\n\n10 0 20 1\n",
        "q1\tQ0\td1\t2\nq1\tQ0\td2\t0\n10\tQ0\t20\t1",
        "q1  0\td1   2\n  q1 0 d2 0\n10 0 20 1\n",
        "q1 d1 2.0\nq1 d2 0\n10 20 1\n",
        "qid 0 docid grade\nq1 0 d1 2\nq1 0 d2 0\n10 0 20 1\n",
    ],
    ids=["beir", "no-header", "bom-crlf", "trec", "msmarco", "ragged-blanks", "float-grades", "trec-header"],
)
@pytest.mark.parametrize("name", ["q.tsv", "q.gz"])
def test_qrels_of_every_shape(tmp_path, text, name):
    qrels = read_qrels(write(tmp_path, text, name))
    assert {q: dict(d) for q, d in qrels.items()} == {"q1": {"d1": 2, "d2": 0}, "10": {"20": 1}}


def test_ids_with_a_blank_are_read_from_tab_separated_qrels(tmp_path):
    assert dict(read_qrels(write(tmp_path, "q 1\tdoc 1\t1\n"))["q 1"]) == {"doc 1": 1}


def test_negative_grades_are_kept_and_not_relevant(tmp_path):
    qrels = read_qrels(write(tmp_path, "q1 0 d1 -2\nq1 0 d2 1\n"))
    assert dict(qrels["q1"]) == {"d1": -2, "d2": 1} and qrels.relevant("q1") == {"d2": 1}


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no judgement"),
        ("query-id\tcorpus-id\tscore\n", "holds no judgement"),
        ("q1 d1\n", "line 1: 2 columns"),
        ("q1 0 d1 1\nq1 0 d2 1 x\n", "line 2: 5 columns; expected .* and 4 as in the lines before"),
        ("q1 0 d1 1\nq1 d2 1\n", "line 2: 3 columns"),
        ("q1 0 d1 0.5\n", "line 1: grade '0.5'; expected a whole number"),
        ("q1 0 d1 nan\n", "line 1: grade 'nan'"),
        ("q1 0 d1 yes\n", "line 1: grade 'yes'"),
        ("q1 0 d1 1_0\n", "line 1: grade '1_0'"),
        ("q1 0 d1 99999999999999999999\n", "line 1: grade '9+'; expected a whole number of at most"),
        ("q1\t0\t\t1\n", "line 1: an empty query or document id"),
        (b"q1 0 caf\xe9 1\n", "line 1: byte 0xe9"),
        ("q1 0 d1 1\nq2 0 d1 1\nq1 0 d1 0\n", "judged twice for query 'q1': 1 in line 1 and 0 in line 3"),
    ],
)
def test_qrels_that_are_refused(tmp_path, text, said):
    with pytest.raises(DataError, match=said) as info:
        read_qrels(write(tmp_path, text))
    assert "file" in str(info.value)


def test_repeated_judgement_counts_once_and_is_told(tmp_path, caplog):
    qrels = read_qrels(write(tmp_path, "q1 0 d1 1\nq1 0 d1 1\n"))
    assert qrels.num_judgements == 1 and "1 judgements are repeated" in caplog.text


def test_missing_qrels():
    with pytest.raises(MissingInputError, match="does not exist"):
        read_qrels("nowhere.tsv")


def test_qrels_and_runs_from_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(b"q1 0 d1 1\n")

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert dict(read_qrels("-")["q1"]) == {"d1": 1}
    Stdin.buffer = io.BytesIO(b"q1\td1\t1\n")
    assert read_run("-").name == "stdin"


@pytest.mark.parametrize("format", ["trec", "beir"])
def test_qrels_round_trip(tmp_path, format):
    qrels = Qrels({"q1": {"d1": 2, "d2": -1}, 3: {4: 1.0}})
    write_qrels(qrels, tmp_path / "q.gz", format=format)
    assert read_qrels(tmp_path / "q.gz") == qrels


def test_trec_qrels_refuse_an_id_with_a_blank_and_write_nothing(tmp_path):
    with pytest.raises(DataError, match="document id 'd 1'"):
        write_qrels({"q1": {"d 1": 1}}, tmp_path / "q")
    assert not list(tmp_path.iterdir())
    write_qrels({"q1": {"d 1": 1}}, tmp_path / "q", format="beir")
    assert dict(read_qrels(tmp_path / "q")["q1"]) == {"d 1": 1}


def test_trec_run_ignores_the_rank_and_breaks_ties_by_id_descending(tmp_path):  # user-reports E.111
    run = read_run(
        write(tmp_path, "q1 Q0 a 1 0.5 t\nq1 Q0 b 2 0.5 t\nq1 Q0 c 3 0.9 t\nq2 Q0 a 0 -1e-3 t\n", "x.run.gz")
    )
    assert run.ranking("q1")[0] == ["c", "b", "a"] and list(run) == ["q1", "q2"]


def test_a_run_is_named_after_its_tag_or_its_file(tmp_path):
    assert read_run(write(tmp_path, "q1 Q0 a 1 0.5 bm25\n", "x.run.gz")).name == "bm25"
    assert read_run(write(tmp_path, "q1\ta\t1\n", "y.run.gz")).name == "y"
    assert read_run(tmp_path / "x.run.gz", name="mine").name == "mine"


def test_interleaved_queries_are_gathered(tmp_path):
    run = read_run(write(tmp_path, "q1 Q0 a 1 2 t\nq2 Q0 a 1 2 t\nq1 Q0 b 2 1 t\n"))
    assert run.ranking("q1")[0] == ["a", "b"]


def test_msmarco_runs_of_three_and_four_columns(tmp_path):
    assert read_run(write(tmp_path, "1\t20\t2\n1\t10\t1\n1\t30\t3\n")).ranking("1")[0] == ["10", "20", "30"]
    four = read_run(write(tmp_path, "1\t20\t1\t0.1\n1\t10\t2\t0.7\n"))
    assert four.ranking("1")[0] == ["10", "20"], "with a score the rank is ignored"


def test_third_column_that_is_no_rank_is_a_score(tmp_path):
    assert read_run(write(tmp_path, "1\t20\t2.5\n1\t10\t1\n")).ranking("1")[0] == ["20", "10"]


def test_ranks_may_start_at_zero(tmp_path):
    assert read_run(write(tmp_path, "1\t20\t0\n1\t10\t1\n2\t30\t0\n")).ranking("1")[0] == ["20", "10"]
    assert read_run(write(tmp_path, "q Q0 a 0 3 t\nq Q0 b 1 2 t\n")).ranking("q")[0] == ["a", "b"]


def test_whole_numbers_that_cannot_be_ranks_are_scores(tmp_path):
    assert read_run(write(tmp_path, "1\t20\t7\n1\t10\t7\n1\t30\t2\n")).ranking("1")[0] == ["20", "10", "30"]
    assert read_run(write(tmp_path, "1\t20\t5\n1\t10\t0\n")).ranking("1")[0] == ["20", "10"]


_LINES = ["q1 Q0 d1 1 3.5 t", "q1 Q0 dé 2 -1e-3 t", "q2\tQ0\td 1\t1\t2\tt", "q1 Q0 d2 3 +.5 t", "  q3 Q0  d1 1 1 t", ""]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("lines", [_LINES, _LINES[:2], _LINES[2:3], ["q\td\t3", "q\te\t1"], ["", "", "q d 1 2.5", ""]])
def test_blocks_and_lines_give_the_same_run(tmp_path, monkeypatch, lines, end):
    path = write(tmp_path, "\ufeff" + end.join(lines))
    runs = [read_run(path)]
    with monkeypatch.context() as patch:
        patch.setattr(trec, "_even_part", lambda block, width: None)
        runs.append(read_run(path))
    for size in (1, 7, 20):
        with monkeypatch.context() as patch:
            patch.setattr(trec, "read_blocks", lambda path, size=size: read_blocks(path, size=size))
            runs.append(read_run(path))
    first = runs[0]
    for run in runs:
        assert run.name == first.name and list(run) == list(first)
        assert all(run.ranking(q)[0] == first.ranking(q)[0] for q in run)
        assert all((run.ranking(q)[1] == first.ranking(q)[1]).all() for q in run)


@pytest.mark.parametrize(
    "line, said",
    [
        ("q1 Q0 d1 1 0.5", "line 501: 5 columns; expected .* and 6 as in the lines before"),
        ("q1 Q0 d1 1 0.5 t x", "line 501: 7 columns"),
        ("q1 Q0 d1 1 nan t", "line 501: score 'nan' is not a finite"),
        ("q1 Q0 d1 1 1e39 t", "line 501: score '1e39' is not a finite"),
        ("q1 Q0 d1 1 1,5 t", "line 501: score '1,5' is not a number"),
        ("q1 Q0 d1 1 1_5 t", "line 501: score '1_5' is not a number"),
        ("q1 Q0 d1 1 \u0661 t", "line 501: score '\u0661' is not a number"),
        ("q1\tQ0\t\t1\t0.5\tt", "line 501: an empty query or document id"),
        ("q1 Q0 caf\u00a0e 1 0.5 t", "line 501: 7 columns"),
        (b"q1 Q0 caf\xe9 1 0.5 t", "line 501: byte 0xe9 at position 10"),
        ("q1 Q0 e250 1 0.5 t", "'e250' is ranked twice for query 'q1', in lines 251 and 501"),
    ],
)
@pytest.mark.parametrize("size", [1000, 1 << 22])
def test_a_bad_line_among_many_is_named(tmp_path, monkeypatch, line, said, size):
    monkeypatch.setattr(trec, "read_blocks", lambda path: read_blocks(path, size=size))
    many = "".join(f"q1 Q0 e{number} 1 {-number} t\n" for number in range(500)).encode()
    line = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(DataError, match=said):
        read_run(write(tmp_path, many + line + b"\n" + many.replace(b"q1", b"q2")))


def test_a_document_ranked_twice_on_standard_input_is_refused_without_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": io.BytesIO(b"q\td\t1\nq\td\t2\n")}))
    with pytest.raises(DataError, match="ranked twice for query 'q'; keep one"):
        read_run("-")


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no ranking"),
        ("q1 Q0 d1 1 0.5\n", "line 1: 5 columns; expected"),
        ("q1 Q0 d1 1 0.5 t\nq1 Q0 d 2 2 0.4 t\n", "line 2: 7 columns; .* Ids and tags cannot hold blanks"),
        ("q1 Q0 d1 1 nan t\n", "line 1: score 'nan' is not a finite"),
        ("q1 Q0 d1 1 inf t\n", "line 1: score 'inf'"),
        ("q1 Q0 d1 1 1e39 t\n", "line 1: score '1e39' is not a finite float32"),
        ("q1 Q0 d1 1 high t\n", "line 1: score 'high' is not a number"),
        (
            "q1 Q0 d1 1 3 t\nq2 Q0 d1 1 3 t\nq1 Q0 d1 2 2 t\n",
            "document 'd1' is ranked twice for query 'q1', in lines 1 and 3",
        ),
        ("q1\td1\t1\nq1\td1\t2\n", "in lines 1 and 2"),
        ("q1\td1\t1\t9\nq1\td1\t2\t8\n", "in lines 1 and 2"),
    ],
)
def test_runs_that_are_refused(tmp_path, text, said):  # user-reports A.31, J
    with pytest.raises(DataError, match=said):
        read_run(write(tmp_path, text))


def test_written_scores_are_strictly_decreasing_after_float32(tmp_path):  # user-reports E.115, J
    scores = {"a": 16777217.0, "b": 16777216.0, "c": 1.0, "d": 1.0 + 1e-9, "e": -1e-30, "f": 0.0}
    run = Run({"q1": scores}, name="my run")
    write_run(run, tmp_path / "x.run")
    rows = [line.split() for line in (tmp_path / "x.run").read_text().splitlines()]
    values = np.array([row[4] for row in rows], dtype=np.float32)
    assert (np.diff(values) < 0).all()
    assert [row[2] for row in rows] == run.ranking("q1")[0] == ["b", "a", "d", "c", "f", "e"]
    assert [row[3] for row in rows] == list("123456") and {row[5] for row in rows} == {"my_run"}
    assert read_run(tmp_path / "x.run").ranking("q1")[0] == run.ranking("q1")[0]


def test_run_keeps_query_order_and_every_float32(tmp_path):
    generator = np.random.default_rng(0)
    run = Run({f"q{9 - i}": dict(zip("abcdefgh", generator.normal(size=8), strict=True)) for i in range(9)})
    write_run(run, tmp_path / "x.run.gz", tag="tag")
    again = read_run(tmp_path / "x.run.gz")
    assert list(again) == list(run)
    for query in run:
        assert again.ranking(query)[0] == run.ranking(query)[0]
        np.testing.assert_array_equal(again.ranking(query)[1], run.ranking(query)[1])


def test_equal_runs_give_equal_bytes(tmp_path):
    for name in ("a.run.gz", "b.run.gz"):
        write_run({"q": {"d": 1.0}}, tmp_path / name)
    assert (tmp_path / "a.run.gz").read_bytes() == (tmp_path / "b.run.gz").read_bytes()


def test_msmarco_format(tmp_path):
    write_run({"1": {"10": 0.5, "20": 0.7}}, tmp_path / "x.tsv", format="msmarco")
    assert (tmp_path / "x.tsv").read_text() == "1\t20\t1\n1\t10\t2\n"
    with pytest.raises(ConfigError, match="expected 'trec' or 'msmarco'"):
        write_run({}, tmp_path / "x.tsv", format="csv")


@pytest.mark.parametrize(
    "run, said", [({"q 1": {"d": 1.0}}, "query id 'q 1'"), ({"q": {"d\u00a01": 1.0}}, r"document id 'd\\xa01'")]
)
def test_ids_with_a_blank_are_refused_by_the_writer_and_the_old_file_stays(tmp_path, run, said):
    path = tmp_path / "x.run"
    path.write_text("old")
    with pytest.raises(DataError, match=said):
        write_run(run, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("id", ["", " d", "d\t1", "d\n1", "d\ud83d"])
def test_ids_that_tab_separated_qrels_cannot_carry_are_refused(tmp_path, id):
    with pytest.raises(DataError, match="nothing was written"):
        write_qrels({"q": {id: 1}}, tmp_path / "q.tsv", format="beir")
    with pytest.raises(DataError, match="nothing was written"):
        write_run({"q": {id: 1}}, tmp_path / "q.run")
    assert not list(tmp_path.iterdir())


def test_masked_scores_are_written_and_read_again(tmp_path):
    run = Run({"q": dict.fromkeys("abc", float(np.finfo(np.float32).min))})
    write_run(run, tmp_path / "x.run")
    assert read_run(tmp_path / "x.run").ranking("q")[0] == ["c", "b", "a"]


@pytest.mark.parametrize("tag", ["two words", "", " x"])
def test_tag_is_one_word(tmp_path, tag):
    with pytest.raises(ConfigError, match="one word"):
        write_run({"q": {"d": 1.0}}, tmp_path / "x.run", tag=tag)

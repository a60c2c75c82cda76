import json

import numpy as np
import pytest

from shortlist.commands import data as command
from shortlist.data import Collection, RankedList, load_collection, read_lists, read_qrels
from shortlist.data.convert import convert, label_matrix
from shortlist.data.documents import Document
from shortlist.data.matrices import read_label_matrix
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError


def same(one, other):
    assert list(one.corpus) == list(other.corpus)
    assert one.splits == other.splits
    for split in one.splits:
        assert {q: dict(d) for q, d in one.qrels(split).items()} == {q: dict(d) for q, d in other.qrels(split).items()}
        assert one.queries(split) == other.queries(split)


def test_beir_round_trip_loses_nothing(toy, tmp_path):
    same(toy, load_collection(convert(toy, tmp_path / "out", to="beir")))


def test_beir_keeps_one_split_when_asked(toy, tmp_path):
    assert load_collection(convert(toy, tmp_path / "out", split="dev")).splits == ["dev"]
    with pytest.raises(MissingInputError, match="no judgements for split 'valid'; judged are: train, dev, test"):
        convert(toy, tmp_path / "other", split="valid")
    assert not (tmp_path / "other").exists()


def test_label_sets_become_beir_folders(toy_xc, tmp_path):
    xc = load_collection(toy_xc)
    beir = load_collection(convert(xc, tmp_path / "out"))
    assert beir.kind == "beir" and list(beir.corpus.ids) == list(xc.corpus.ids)
    for split in ("train", "test"):
        assert {q: dict(d) for q, d in beir.qrels(split).items()} == {q: dict(d) for q, d in xc.qrels(split).items()}


def test_points_without_labels_are_counted_when_the_judgements_cannot_hold_them(tmp_path, caplog):
    for name, records in {
        "lbl": [{"uid": "a", "title": "moon"}],
        "trn": [{"uid": "p", "title": "the moon", "target_ind": [0]}],
        "tst": [{"uid": "q", "title": "moon", "target_ind": [0]}, {"uid": "r", "title": "rain", "target_ind": []}],
    }.items():
        (tmp_path / f"{name}.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    xc = load_collection(tmp_path)
    assert "r" in xc.qrels("test")
    converted = load_collection(convert(xc, tmp_path / "out"))
    assert "r" not in converted.qrels("test")
    assert "1 of 2 queries of" in caplog.text and "/test have no label" in caplog.text and "/train" not in caplog.text


def test_json_lines_become_matrices_that_read_back_alike(toy_xc, tmp_path):  # user-reports A.26, A.27
    xc = load_collection(toy_xc)
    folder = convert(xc, tmp_path / "out", to="npz")
    assert {p.name for p in folder.iterdir()} == {
        "Y.txt", "Y_ids.txt", "trn_X.txt", "trn_ids.txt", "Y.trn.npz", "tst_X.txt", "tst_ids.txt", "Y.tst.npz",
        "filter_labels_test.txt",
    }  # fmt: skip
    assert read_label_matrix(folder / "Y.trn.npz").shape == (60, 12)
    assert read_label_matrix(folder / "Y.tst.npz").shape == (20, 12)
    back = load_collection(folder)
    assert list(back.queries("train").values()) == list(xc.queries("train").values())
    ids = (folder / "trn_ids.txt").read_text().split()
    labels = (folder / "Y_ids.txt").read_text().split("\n")
    for row, point in enumerate(ids):
        found = {labels[int(column)] for column in back.qrels("train")[f"train-{row}"]}
        assert found == set(xc.qrels("train")[point])
    assert back.filters("test") == {"test-0": {"4"}, "test-6": {"10"}, "test-11": {"9"}}


def test_fractional_relevance_stays_in_the_matrix(tmp_path):
    record = {"uid": "p", "title": "x", "target_ind": [1, 0], "target_rel": [0.25, 1.0]}
    (tmp_path / "trn.json").write_text(json.dumps(record) + "\n")
    (tmp_path / "lbl.json").write_text('{"title": "a"}\n{"title": "b"}\n')
    path = convert(load_collection(tmp_path), tmp_path / "Y.trn.npz", to="npz", split="train")
    np.testing.assert_allclose(read_label_matrix(path).toarray(), [[1.0, 0.25]])


def test_any_collection_gives_a_matrix_of_queries_by_documents(toy, caplog):
    ids, matrix = label_matrix(toy, "test")
    assert matrix.shape == (6, 60) and ids == list(toy.qrels("test"))
    row = toy.qrels("test").relevant(ids[0])
    assert {toy.corpus.ids[c]: v for c, v in zip(*_row(matrix, 0), strict=True)} == row
    odd = Collection.from_parts([("d", "t")], {"q": "t"}, qrels={"test": {"q": {"d": 1, "gone": 1, "bad": 0}}})
    assert label_matrix(odd)[1].toarray().tolist() == [[1.0]]
    assert "1 relevant documents are not in the corpus and have no column: 'gone'" in caplog.text


def _row(matrix, row):
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return matrix.indices[part].tolist(), matrix.data[part].tolist()


def test_line_breaks_do_not_shift_the_lines_of_a_text_file(tmp_path, caplog):
    collection = Collection.from_parts(
        {"d1": "one\ntwo", "d2": "three"}, {"q": "a\r\nb"}, qrels={"train": {"q": {"d2": 1}}}
    )
    folder = convert(collection, tmp_path / "out", to="npz")
    assert (folder / "Y.txt").read_text() == "one two\nthree\n" and (folder / "trn_X.txt").read_text() == "a b\n"
    assert "2 texts had line breaks" in caplog.text


@pytest.mark.parametrize("name, start", [("out.tsv", "query-id\t"), ("out.qrels", "q"), ("out.qrels.gz", None)])
def test_qrels_in_the_form_of_their_name(toy, tmp_path, name, start):
    path = convert(toy, tmp_path / name, to="qrels", split="test")
    assert {q: dict(d) for q, d in read_qrels(path).items()} == {q: dict(d) for q, d in toy.qrels("test").items()}
    if start:
        assert path.read_text().startswith(start)


def test_lists_are_written_as_they_are_or_made_from_the_judgements(toy, tmp_path):
    made = list(read_lists(convert(toy, tmp_path / "made.jsonl", to="lists", split="test")))
    assert [ranked.query_id for ranked in made] == list(toy.queries("test"))
    grades = {d.id: g for d, g in zip(made[0].documents, made[0].grades, strict=True)}
    assert grades == toy.qrels("test")[made[0].query_id]
    given = RankedList("q", "text", [Document("a"), Document("b", "", "t")], [1, 0], [0.5, None])
    collection = Collection.from_parts({"a": "", "b": "t"}, {"q": "text"}, lists={"train": [given]})
    (back,) = read_lists(convert(collection, tmp_path / "given.jsonl", to="lists"))
    assert back.grades == [1, 0] and back.scores == [0.5, None]
    folder = load_collection(convert(collection, tmp_path / "beir"))
    assert [ranked.query_id for ranked in folder.lists("train")] == ["q"]


@pytest.mark.parametrize(
    "to, name", [("beir", "out"), ("npz", "out"), ("npz", "Y.npz"), ("qrels", "q"), ("lists", "l")]
)
def test_output_that_exists_is_refused_unless_overwritten(toy, tmp_path, to, name):
    output = tmp_path / name
    convert(toy, output, to=to, split="test")
    before = {p: p.read_bytes() for p in [output, *output.rglob("*")] if p.is_file()}
    with pytest.raises(OutputExistsError, match="exists already"):
        convert(toy, output, to=to, split="test")
    convert(toy, output, to=to, split="test", overwrite=True)
    assert {p: p.read_bytes() for p in [output, *output.rglob("*")] if p.is_file()} == before


def test_the_collection_itself_is_never_the_output(toy_beir, tmp_path):
    import shutil

    copy = shutil.copytree(toy_beir, tmp_path / "data" / "copy")
    for output in (copy, tmp_path / "data", tmp_path):
        with pytest.raises(ConfigError, match="is or holds the collection itself"):
            convert(load_collection(copy), output, overwrite=True)
    assert (copy / "corpus.jsonl").exists()


def test_unknown_formats_and_matrices_without_judgements_are_refused(toy, tmp_path):
    with pytest.raises(ConfigError, match="cannot convert to 'parquet'; expected one of beir, qrels, lists, npz"):
        convert(toy, tmp_path / "out", to="parquet")
    with pytest.raises(DataError, match="no judgements"):
        convert(Collection.from_parts({"d": "t"}, {}), tmp_path / "out", to="npz")
    assert list(tmp_path.iterdir()) == []


def test_folder_of_collections_is_converted_one_by_one(toy_beir, tmp_path):
    import shutil

    for name in ("android", "tex"):
        shutil.copytree(toy_beir, tmp_path / "cqa" / name)
    out = convert(load_collection(tmp_path / "cqa"), tmp_path / "out", to="beir")
    assert sorted(p.name for p in out.iterdir()) == ["android", "tex"]
    assert len(load_collection(out / "tex").corpus) == 60
    with pytest.raises(DataError, match="holds 2 collections"):
        convert(load_collection(tmp_path / "cqa"), tmp_path / "q.tsv", to="qrels")


def test_command_prints_where_it_wrote(toy_beir, tmp_path, capsys):
    command.convert(toy_beir, tmp_path / "out", to="npz")
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"

"""`shortlist update`: what comes in and goes out of an index, in one step that happens or does not."""

import json
import logging

import pytest

from shortlist import DualEncoder
from shortlist.cli import main
from shortlist.commands.index import index
from shortlist.commands.update import update
from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingInputError, ShortlistError
from shortlist.indexes import open_index, verify
from shortlist.indexes.lifecycle import writing


def collection(folder, documents):
    folder.mkdir()
    lines = [json.dumps({"_id": id, "title": title, "text": text}) for id, title, text in documents]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def more(tmp_path):
    return collection(tmp_path / "more", [("new-1", "Bees", "bees make honey"), ("new-2", "", "ships cross oceans")])


@pytest.fixture(params=["exact", "flat"])
def built(request, tmp_path, toy_beir, model):
    index(model=model, data=toy_beir, output=tmp_path / "index", index=request.param)
    return tmp_path / "index"


def test_documents_come_in_with_their_vectors_and_texts(built, more, toy, model):
    result = update(index=built, data=more)
    assert (result["added"], result["removed"], result["count"]) == (2, 0, len(toy.corpus) + 2)
    opened = open_index(built)
    assert list(opened.ids) == [*toy.corpus.ids, "new-1", "new-2"]
    assert opened.document("new-1")["title"] == "Bees" and opened.document(toy.corpus.ids[0]) is not None
    query = DualEncoder.from_pretrained(model).encode_documents(["Bees bees make honey"])
    wanted = DualEncoder.from_pretrained(model).encode_documents(["ships cross oceans"])
    assert opened.search(wanted, 1)[0][0][0] == "new-2"
    assert "new-1" in [id for id, _ in opened.search(query, 5)[0]]
    verify(built)


def test_removing_reads_one_id_a_line_and_ignores_unknown_ones(built, tmp_path, toy, caplog):
    gone = list(toy.corpus.ids)[:3]
    (tmp_path / "gone.txt").write_text("\n".join([*gone, "", "nobody", gone[0]]) + "\r\n")
    with caplog.at_level(logging.INFO, logger="shortlist"):
        result = update(index=built, remove=tmp_path / "gone.txt")
    assert result["removed"] == 3 and "removed 3 of 4 ids" in caplog.text
    assert list(open_index(built).ids) == list(toy.corpus.ids)[3:]


def test_a_file_of_which_no_id_is_there_is_suspected(built, tmp_path, toy, caplog):
    (tmp_path / "wrong.json").write_text('{\n  "ids": []\n}\n')
    assert update(index=built, remove=tmp_path / "wrong.json")["removed"] == 0
    assert "none of the ids in" in caplog.text and "one id a line" in caplog.text


def test_compaction_drops_what_was_removed_and_merges_what_was_added(built, more, tmp_path, toy):
    (tmp_path / "gone.txt").write_text(f"{toy.corpus.ids[0]}\nnew-1\n")
    update(index=built, data=more)
    assert open_index(built).stats()["segments"] == 2
    facts = update(index=built, remove=tmp_path / "gone.txt", compact=True)
    assert (facts["segments"], facts["removed"], facts["count"]) == (1, 2, len(toy.corpus))
    opened = open_index(built)
    assert opened.stats()["removed"] == 0
    assert list(opened.ids) == [*list(toy.corpus.ids)[1:], "new-2"]


def test_known_documents_are_refused_before_encoding_and_replaced_when_asked(built, more, tmp_path, toy, monkeypatch):
    update(index=built, data=more)
    again = collection(tmp_path / "again", [("new-1", "Wasps", "wasps make no honey"), ("new-3", "", "rivers")])
    generation = open_index(built).stats()["generation"]
    with monkeypatch.context() as patch:
        patch.setattr(DualEncoder, "stream_documents", None)
        with pytest.raises(DataError, match=r"1 of 2 documents are in the index already \(for example 'new-1'\)"):
            update(index=built, data=again)
    assert open_index(built).stats()["generation"] == generation
    result = update(index=built, data=again, replace=True)
    assert result["count"] == len(toy.corpus) + 3
    assert open_index(built).document("new-1")["title"] == "Wasps"


def test_merging_takes_all_of_the_other_index(built, more, tmp_path, toy, model):
    index(model=model, data=more, output=tmp_path / "other")
    assert update(index=built, merge=[tmp_path / "other"])["merged"] == 2
    opened = open_index(built)
    assert list(opened.ids) == [*toy.corpus.ids, "new-1", "new-2"] and opened.document("new-1")["title"] == "Bees"


def test_another_model_is_refused_by_both_names_and_nothing_changes(built, more, tmp_path, other_model):
    # user-reports C.70
    before = (built / "manifest.json").read_bytes()
    with pytest.raises(IndexMismatchError, match=r"built with .* \(fingerprint .*would be encoded by .*other-model"):
        update(index=built, data=more, model=other_model)
    index(model=other_model, data=more, output=tmp_path / "foreign")
    with pytest.raises(IndexMismatchError, match="model fingerprint"):
        update(index=built, merge=[tmp_path / "foreign"])
    assert (built / "manifest.json").read_bytes() == before


def test_an_error_in_the_middle_leaves_the_old_index_and_no_lock(built, more, tmp_path, toy, monkeypatch):
    (tmp_path / "gone.txt").write_text(toy.corpus.ids[0])

    def broken(*_args, **_options):
        raise RuntimeError("the model died")

    with monkeypatch.context() as patch:
        patch.setattr(DualEncoder, "stream_documents", broken)
        with pytest.raises(RuntimeError):
            update(index=built, remove=tmp_path / "gone.txt", data=more)
    assert list(open_index(built).ids) == list(toy.corpus.ids)
    assert update(index=built, data=more)["added"] == 2


def test_a_second_writer_is_told_before_it_encodes(built, more):
    with writing(open_index(built)), pytest.raises(ShortlistError, match="another process is writing the index"):
        update(index=built, data=more)
    assert update(index=built, data=more)["added"] == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigError, "nothing to update"),
        ({"remove": "nowhere.txt"}, MissingInputError, "no file nowhere.txt"),
        ({"compact": True, "replace": True}, ConfigError, "--replace is for documents that come in"),
        ({"merge": ["{index}"]}, ConfigError, "is the index itself"),
        ({"data": "nowhere"}, MissingInputError, "nowhere"),
    ],
)
def test_what_cannot_be_done_is_said(built, options, error, message):
    merge = [str(built) if value == "{index}" else value for value in options.get("merge", [])]
    with pytest.raises(error, match=message):
        update(index=built, **{**options, "merge": merge})


def test_an_index_with_a_frequency_prior_takes_no_new_documents(tmp_path, toy_beir, model, more):
    index(model=model, data=toy_beir, output=tmp_path / "index", frequency_prior="train")
    with pytest.raises(ConfigError, match="frequency prior"):
        update(index=tmp_path / "index", data=more)


def test_the_command_line_updates(built, more, tmp_path, toy):
    main_exits = pytest.raises(SystemExit)
    with main_exits as ended:
        main(["update", str(built), "--data", str(more)])
    assert not ended.value.code
    assert len(open_index(built)) == len(toy.corpus) + 2

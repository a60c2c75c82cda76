import json

import pytest

from shortlist.commands import data as command
from shortlist.data import Collection, Corpus, load_collection
from shortlist.data.info import collection_info
from shortlist.errors import DataError


def write(folder, corpus, queries, **qrels):
    folder.mkdir(parents=True)
    (folder / "qrels").mkdir()
    (folder / "corpus.jsonl").write_text("".join(json.dumps(r) + "\n" for r in corpus))
    (folder / "queries.jsonl").write_text("".join(json.dumps(r) + "\n" for r in queries))
    for split, rows in qrels.items():
        (folder / "qrels" / f"{split}.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return folder


@pytest.fixture
def odd(tmp_path):
    """A collection with one of every oddity that the report is for."""
    return write(
        tmp_path / "odd",
        [
            {"_id": "d1", "title": "Moon", "text": "the moon", "metadata": {"page": "m", "year": 1}},
            {"_id": "d2", "title": None, "text": "the sun"},
            {"_id": "d3", "text": "the sun"},
            {"_id": "d4", "title": "the", "text": "sun"},
            {"_id": "d5", "title": " ", "text": ""},
            {"_id": "d6", "text": ""},
        ],
        [
            {"_id": "q1", "text": "moon"},
            {"_id": "q2", "text": "sun"},
            {"_id": "q3", "text": "sun"},
            {"_id": "q4", "text": " "},
            {"_id": "q5", "text": "never judged"},
        ],
        train=[("q1", "d1", 2), ("q2", "d2", 1), ("q2", "gone", 1), ("nobody", "d1", 1)],
        test=[("q1", "d1", 1), ("q3", "d2", 0), ("q3", "d1", -1), ("q4", "d1", 1)],
    )


def test_counts_fill_rates_and_lengths(odd):  # user-reports A.9
    documents = collection_info(load_collection(odd))["documents"]
    assert documents["count"] == 6 and documents["empty"] == 2
    assert documents["filled"] == {
        "title": {"count": 2, "rate": 0.3333},
        "text": {"count": 4, "rate": 0.6667},
        "metadata": {"count": 1, "rate": 0.1667},
    }
    assert documents["metadata_fields"]["page"] == {"count": 1, "rate": 0.1667}
    assert documents["words"] == {"mean": 1.5, "min": 0, "p50": 2, "p90": 3, "p95": 3, "p99": 3, "max": 3}
    assert documents["characters"]["max"] == len("Moon the moon")


def test_exact_duplicates_are_counted_and_nothing_is_removed(odd):  # user-reports A.25
    info = collection_info(load_collection(odd))
    assert info["documents"]["duplicates"] == {"groups": 1, "copies": 2, "examples": [["d2", "d3", "d4"]]}
    assert info["queries"]["duplicates"] == {"groups": 1, "copies": 1, "examples": [["q2", "q3"]]}


def test_judgements_that_point_nowhere_are_listed(odd):  # user-reports A.10, A.11
    splits = collection_info(load_collection(odd))["splits"]
    assert splits["train"]["absent_documents"] == {"count": 1, "examples": ["gone"]}
    assert splits["train"]["absent_queries"] == {"count": 1, "examples": ["nobody"]}
    assert splits["test"]["absent_documents"]["count"] == 0


def test_grades_and_queries_without_relevant_documents(odd):
    info = collection_info(load_collection(odd))
    test = info["splits"]["test"]
    assert test["grades"] == {"-1": 1, "0": 1, "1": 2}
    assert test["queries"] == 3 and test["judgements"] == 4
    assert test["without_relevant"] == {"count": 1, "examples": ["q3"]}
    assert test["empty_queries"] == {"count": 1, "examples": ["q4"]}
    assert info["queries"]["judged_in_no_split"] == {"count": 1, "examples": ["q5"]}
    assert test["relevant_per_query"]["mean"] == 0.67


def test_queries_shared_by_splits_by_id_and_by_text(odd):
    (shared,) = collection_info(load_collection(odd))["shared_queries"]
    assert shared["splits"] == ["train", "test"]
    assert shared["by_id"] == {"count": 1, "examples": ["q1"]}
    assert shared["by_text"]["count"] == 2 and set(shared["by_text"]["examples"]) == {"q1", "q3"}


def test_toy_collection_is_clean(toy):
    info = collection_info(toy)
    assert info["documents"]["count"] == 60 and info["queries"]["count"] == 20
    assert {split: one["queries"] for split, one in info["splits"].items()} == {"train": 10, "dev": 4, "test": 6}
    assert all(pair["by_id"]["count"] == 0 for pair in info["shared_queries"])
    json.dumps(info, allow_nan=False)


def test_label_sets_report_labels_per_point_and_head_torso_tail(toy_xc):
    info = collection_info(load_collection(toy_xc))
    labels = info["labels"]
    assert info["documents"]["count"] == 12 and info["queries"]["count"] == 80
    assert [labels["groups"][name]["labels"] for name in ("head", "torso", "tail")] == [1, 5, 6]
    assert sum(group["share_of_train"] for group in labels["groups"].values()) == pytest.approx(1, abs=1e-3)
    assert labels["groups"]["head"]["training_points"][0] >= labels["groups"]["tail"]["training_points"][1]
    assert labels["propensity"] == [0.55, 1.5]
    assert labels["filtered_pairs"] == {"train": 0, "test": 3}
    assert labels["labels_per_point"]["train"]["min"] >= 0
    total = sum(len(judged) for judged in load_collection(toy_xc).qrels("train").values())
    assert info["splits"]["train"]["judgements"] == total == info["splits"]["train"]["grades"]["1"]


def test_a_label_set_is_described_as_its_user_needs_it(tmp_path, capsys):
    labels = ["one", "", "three", "unseen", *[f"l{n}" for n in range(8)]]
    (tmp_path / "LF-AmazonToy").mkdir()
    folder = tmp_path / "LF-AmazonToy"
    (folder / "lbl.json").write_text("".join(json.dumps({"title": text}) + "\n" for text in labels))
    train = [[0, 1], [0, 2], [0, 4, 5, 6], [7, 8, 9, 10, 11], []]
    for stem, rows in (("trn", train), ("tst", [[0], [3]])):
        lines = [json.dumps({"title": f"{stem} {row}", "target_ind": row}) + "\n" for row in rows]
        (folder / f"{stem}.json").write_text("".join(lines))
    (folder / "filter_labels_test.txt").write_text("1 0\n")
    labels = command.info(folder)["labels"]
    assert labels["count"] == 12 and labels["without_text"] == {"count": 1, "examples": ["1"]}
    assert labels["propensity"] == [0.6, 2.6] and labels["propensity_family"] == "amazon"
    assert labels["without_training_points"] == {"count": 1, "examples": ["3"], "share_of_test": 0.5}
    assert sum(group["labels"] for group in labels["groups"].values()) == 11  # the unseen label is in no group
    assert labels["groups"]["tail"]["training_points"][0] == 1
    printed = capsys.readouterr().out
    for part in ("labels a train point", "labels a test point", "train points a label", "labels without text: 1",
                 "propensity A = 0.6, B = 2.6 (family amazon)", "never to be predicted: test 1", "zero-shot",
                 "1 labels have no training point: 3."):  # fmt: skip
        assert part in printed


def test_the_groups_of_labels_are_those_of_the_evaluation(toy_xc):
    from shortlist.data.label_qrels import positive_counts
    from shortlist.data.registry import FAMILIES
    from shortlist.metrics import evaluate
    from shortlist.metrics.xc import PROPENSITY_FAMILIES

    assert FAMILIES == PROPENSITY_FAMILIES
    collection = load_collection(toy_xc)
    counts = positive_counts(collection.qrels("train"))
    run = {query: {label: 1.0} for query in collection.qrels("test") for label in list(counts)[:1]}
    measured = evaluate(collection.qrels("test"), run, ["R@1"], train_counts=counts, by_frequency=True).by_frequency
    described = collection_info(collection)["labels"]["groups"]
    for group in measured:
        if group.name in described:
            assert group.labels == described[group.name]["labels"]
            assert list(group.training_points) == described[group.name]["training_points"]


def test_points_without_labels_do_not_shift_the_counts_of_others(tmp_path):
    records = [{"uid": "a", "title": "x", "target_ind": []}, {"uid": "b", "title": "y", "target_ind": [0, 1]},
               {"uid": "c", "title": "z", "target_ind": []}]  # fmt: skip
    (tmp_path / "trn.json").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "lbl.json").write_text('{"title": "one"}\n{"title": "two"}\n')
    split = collection_info(load_collection(tmp_path))["splits"]["train"]
    assert split["without_relevant"] == {"count": 2, "examples": ["a", "c"]}
    assert split["relevant_per_query"]["max"] == 2 and split["judgements"] == 2


def test_folder_of_collections_reports_each(tmp_path, capsys):  # user-reports A.15
    for name in ("android", "tex"):
        write(tmp_path / "cqa" / name, [{"_id": "d", "text": "t"}], [{"_id": "q", "text": "t"}], test=[("q", "d", 1)])
    info = command.info(tmp_path / "cqa")
    assert {name: one["documents"]["count"] for name, one in info["subsets"].items()} == {"android": 1, "tex": 1}
    assert "2 collections" in capsys.readouterr().out


def test_corpus_alone_and_lists_are_described(tmp_path):
    only = collection_info(Collection.from_parts(Corpus.from_documents([("d", "text")]), {}))
    assert only["splits"] == {} and only["default_split"] is None and only["queries"]["words"] is None
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"query": "q", "pos": ["a"], "neg": ["b", "c"]}) + "\n")
    lists = collection_info(load_collection(path))["lists"]["train"]
    assert lists["lists"] == 1 and lists["documents"]["max"] == 3 and lists["negatives"]["max"] == 2


def test_command_prints_findings_for_people_and_json_for_machines(odd, capsys):
    command.info(odd)
    printed = capsys.readouterr().out
    for sentence in (
        "2 documents have neither title nor text and are kept",
        "2 documents repeat the text of another, in 1 groups: d2 = d3 = d4.",
        "train: 1 judged documents are not in the corpus: gone.",
        "train: 1 judged queries are not in the queries file: nobody.",
        "1 queries are in both train and test: q1.",
        "test: 1 judged queries have no relevant document: q3.",
        "1 queries are judged in no split: q5.",
    ):
        assert sentence in printed
    assert "documents are empty" not in printed  # one sentence a finding
    assert "words" in printed and "characters" in printed
    command.info(odd, as_json=True)
    assert json.loads(capsys.readouterr().out) == collection_info(load_collection(odd))


def test_a_known_set_of_another_size_is_noticed(odd, capsys):  # user-reports A.14
    command.info(odd.rename(odd.with_name("arguana")))
    printed = capsys.readouterr().out
    assert "arguana is published with 8,674 documents; here are 6." in printed
    assert "a query's own id is removed" in printed


def test_broken_lines_fail_or_are_skipped_and_told(odd, capsys):
    with open(odd / "corpus.jsonl", "a") as handle:
        handle.write("{broken\n")
    with pytest.raises(DataError, match="corpus.jsonl, line 7"):
        command.info(odd)
    info = command.info(odd, on_error="skip")
    assert info["documents"]["count"] == 6 and any("1 line" in note for note in info["notes"])
    assert "! " in capsys.readouterr().out

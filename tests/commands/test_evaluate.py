"""`shortlist evaluate`: arguments told apart, one table for all runs, JSON for machines, refusals in sentences."""

import gzip
import json

import pytest

from shortlist.commands.evaluate import evaluate_files
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError

QRELS = "q1 0 a 1\nq1 0 b 0\nq2 0 c 2\nq3 0 d 1\n"
RUN = "q1 Q0 b 1 2.0 mine\nq1 Q0 a 2 1.0 mine\nq2 Q0 c 1 1.0 mine\nzz Q0 a 1 1.0 mine\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "qrels.txt").write_text(QRELS)
    (tmp_path / "one.run").write_text(RUN)
    with gzip.open(tmp_path / "two.run.gz", "wt") as handle:
        handle.write(RUN.replace("b 1 2.0", "b 1 0.5").replace("mine", "other"))
    return [str(tmp_path / name) for name in ("qrels.txt", "one.run", "two.run.gz")]


def test_one_table_with_a_column_a_run(files, capsys):
    payload = evaluate_files([*files, "P_1", "recall_100"])
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert lines["P@1"] == ["0.3333", "0.6667"] and lines["R@100"] == ["0.6667", "0.6667"]
    assert lines["queries"] == ["3", "3"] and lines["answered"] == ["2", "2"] and lines["Judged@10"] == ["0.6667"] * 2
    assert "'q3'" in printed and "'zz'" in printed
    assert [run["mean"] for run in payload["runs"]] == [
        {"P@1": pytest.approx(1 / 3), "R@100": pytest.approx(2 / 3)},
        {"P@1": pytest.approx(2 / 3), "R@100": pytest.approx(2 / 3)},
    ]


def test_measures_may_stand_anywhere_and_have_defaults(files):
    assert list(evaluate_files(["MRR@10", *files])["runs"][0]["mean"]) == ["RR@10"]
    assert list(evaluate_files(files)["runs"][0]["mean"]) == ["nDCG@10", "R@100"]


def test_json_is_all_that_is_printed(files, capsys):
    payload = evaluate_files([*files[:2], "nDCG@10"], as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == payload
    (run,) = printed["runs"]
    assert list(run) == ["name", "mean", "counts"] and run["counts"]["missing"] == 1 and run["counts"]["unjudged"] == 1
    assert run["mean"]["nDCG@10"] == pytest.approx((1 / 1.5849625007211562 + 1 + 0) / 3)


def test_per_query_lists_the_missing_query(files, tmp_path):
    # user-reports E.117
    target = tmp_path / "out" / "per_query.jsonl"
    evaluate_files([*files, "P@1"], per_query=target)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == 6 and {row["run"] for row in rows} == {run["name"] for run in evaluate_files(files)["runs"]}
    assert [row["measures"] for row in rows if row["query_id"] == "q3"] == [{"P@1": 0.0}] * 2
    with pytest.raises(OutputExistsError):
        evaluate_files([*files, "P@1"], per_query=target)
    evaluate_files([*files[:2], "P@1"], per_query=target, overwrite=True)
    assert len(target.read_text().splitlines()) == 3


def test_runs_of_one_name_get_their_file_names(files, tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.run").write_text(RUN)
    paths = [str(tmp_path / folder / "same.run") for folder in ("x", "y")]
    assert [run["name"] for run in evaluate_files([files[0], *paths])["runs"]] == paths
    names = [run["name"] for run in evaluate_files([*files, paths[0]])["runs"]]
    # Tags are names; `mine` stands in two of the files, which get their file names.
    assert names == ["one.run", "other", "same.run"]


def test_what_is_neither_measure_nor_file_is_named(files):
    with pytest.raises(MissingInputError, match=r"gone\.run"):
        evaluate_files([*files, "gone.run"])
    with pytest.raises(MissingInputError, match="elsewhere"):
        evaluate_files([*files, "some/elsewhere"])
    with pytest.raises(ConfigError, match=r"nDCG@10"):
        evaluate_files([*files, "nDGC@10"])
    with pytest.raises(ConfigError, match="unknown measure 'ERR@20'"):
        evaluate_files([*files, "ERR@20"])


def test_too_few_files_say_how_the_command_is_written(files, toy_beir):
    for arguments in ([], ["nDCG@10"], files[:1]):
        with pytest.raises(ConfigError, match="QRELS RUN"):
            evaluate_files(arguments)
    with pytest.raises(ConfigError, match="at least one run"):
        evaluate_files(["nDCG@10"], data=toy_beir)
    with pytest.raises(ConfigError, match="--data"):
        evaluate_files(files, split="test")
    with pytest.raises(ConfigError, match="exclude_self"):
        evaluate_files(files, exclude_self="maybe")


def test_bad_files_are_named_with_what_is_wrong(files, tmp_path):
    # issue 2, done item 7; user-reports J: bare unpacking errors
    other = tmp_path / "other.run"
    for content, message in (
        ("q1 Q0 a 1 0.5\n", "columns"),
        ("q1 Q0 a 1 nan mine\n", "nan"),
        ("q1 Q0 a 1 2 mine\nq1 Q0 a 2 1 mine\n", "twice"),
        ("x1 Q0 a 1 2 mine\nx2 Q0 a 2 1 mine\n", "no query id in common"),
        ("", "no ranking"),
    ):
        other.write_text(content)
        with pytest.raises(DataError, match=message) as caught:
            evaluate_files([files[0], str(other)])
        assert "other.run" in str(caught.value)
    other.write_text("")
    with pytest.raises(DataError, match=r"other\.run"):
        evaluate_files([str(other), files[1]])


def test_a_collection_gives_qrels_and_measures(toy_beir, toy, tmp_path, capsys):
    qrels = toy.qrels("test")
    perfect = tmp_path / "perfect.run"
    lines = [f"{query} Q0 {id} 0 {grade} p\n" for query in qrels for id, grade in qrels[query].items() if grade > 0]
    perfect.write_text("".join(lines))
    payload = evaluate_files([str(perfect)], data=toy_beir)
    assert payload["runs"][0]["mean"] == {"nDCG@10": pytest.approx(1.0), "R@100": pytest.approx(1.0)}
    assert payload["runs"][0]["counts"]["queries"] == len(qrels)
    with pytest.raises(DataError, match="in common"):
        evaluate_files([str(perfect)], data=toy_beir, split="train")


def test_exclude_self_can_be_asked_for_and_is_printed(tmp_path, capsys):
    # user-reports E.110
    (tmp_path / "qrels").write_text("a 0 b 1\n")
    (tmp_path / "run").write_text("a Q0 a 1 2 r\na Q0 b 2 1 r\n")
    arguments = [str(tmp_path / "qrels"), str(tmp_path / "run"), "P@1"]
    assert evaluate_files(arguments)["runs"][0]["mean"] == {"P@1": 0.0}
    assert "exclude_self" not in capsys.readouterr().out
    assert evaluate_files(arguments, exclude_self="true")["runs"][0]["mean"] == {"P@1": 1.0}
    assert "exclude_self" in capsys.readouterr().out


def test_the_registry_decides_about_self_retrieval(tmp_path):
    # user-reports E.107, E.109: a property of the data set, off elsewhere
    means = {}
    for name in ("arguana", "other"):
        folder = tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        (folder / "corpus.jsonl").write_text('{"_id": "a", "text": "x"}\n{"_id": "b", "text": "y"}\n')
        (folder / "queries.jsonl").write_text('{"_id": "a", "text": "x"}\n')
        (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\na\tb\t1\n")
        (folder / "out.run").write_text("a Q0 a 1 2 r\na Q0 b 2 1 r\n")
        means[name] = evaluate_files([str(folder / "out.run"), "P@1"], data=folder)["runs"][0]["mean"]["P@1"]
        assert evaluate_files([str(folder / "out.run"), "P@1"], data=folder, exclude_self="false")["runs"][0][
            "mean"
        ] == {"P@1": 0.0}
    assert means == {"arguana": 1.0, "other": 0.0}


def test_an_xc_collection_brings_filters_and_propensities(toy_xc, tmp_path, capsys):
    from shortlist import evaluate, load_collection
    from shortlist.data import write_run
    from shortlist.types import Run

    collection = load_collection(toy_xc)
    qrels, labels = collection.qrels("test"), list(collection.corpus.ids)
    run = Run({query: {label: float(-position) for position, label in enumerate(labels)} for query in qrels}, name="r")
    write_run(run, tmp_path / "out.run")
    payload = evaluate_files([str(tmp_path / "out.run")], data=toy_xc)
    printed = capsys.readouterr().out
    assert list(payload["runs"][0]["mean"]) == ["P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@100"]
    assert "A=0.55, B=1.5" in printed and "filters" in printed
    assert payload["runs"][0]["counts"]["filtered"] == sum(map(len, collection.filters("test").values())) > 0
    counts = {}
    for labels_of in collection.qrels("train").values():
        for label in labels_of:
            counts[label] = counts.get(label, 0) + 1
    expected = evaluate(
        qrels, run, ["PSP@3"], filters=collection.filters("test"), train_counts=counts, propensity=(0.55, 1.5),
        num_train=len(collection.qrels("train")),
    )  # fmt: skip
    assert payload["runs"][0]["mean"]["PSP@3"] == pytest.approx(expected.mean["PSP@3"])


def test_psp_without_a_train_split_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "text": "x"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "x"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    (tmp_path / "out.run").write_text("q Q0 a 1 2 r\n")
    with pytest.raises(DataError, match="no train split"):
        evaluate_files([str(tmp_path / "out.run"), "PSP@1"], data=tmp_path)


def write_xc(folder, labels, train, test):
    folder.mkdir()
    (folder / "lbl.json").write_text("".join(json.dumps({"uid": uid, "title": text}) + "\n" for uid, text in labels))
    for stem, rows in (("trn", train), ("tst", test)):
        records = [
            {
                "uid": f"{stem}{row}",
                "title": f"text {row}",
                "target_ind": list(targets),
                "target_rel": list(targets.values()),
            }
            for row, targets in enumerate(rows)
        ]
        (folder / f"{stem}.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def uneven(tmp_path):
    """Twelve labels: `head` on nine of ten training points, `new` on none, two with one text; graded relevance."""
    labels = [
        ("head", "a"),
        *[(f"m{n}", f"text {n}") for n in range(8)],
        ("twin1", "twin"),
        ("twin2", "twin"),
        ("new", "n"),
    ]
    train = [{0: 1, 1 + row % 8: 1} for row in range(9)] + [{9: 1, 10: 2}]
    test = [{0: 1, 11: 1}, {9: 3, 10: 1}, {}]
    return write_xc(tmp_path / "uneven", labels, train, test)


RANKED = {"tst0": "head new m0 m1", "tst1": "twin2 twin1 head m1", "tst2": "head m0"}


@pytest.fixture
def uneven_run(tmp_path):
    lines = [
        f"{query} Q0 {label} {rank} {-rank} r\n"
        for query, ranked in RANKED.items()
        for rank, label in enumerate(ranked.split(), 1)
    ]
    (tmp_path / "xc.run").write_text("".join(lines))
    return str(tmp_path / "xc.run")


def test_measures_by_training_frequency_are_printed_and_in_the_json(uneven, uneven_run, capsys):
    # issue 3, item 7: head, torso, tail in deciles, zero-shot labels apart
    payload = evaluate_files([uneven_run, "P@1", "R@2", "PSP@1"], data=uneven, by_frequency=True)
    printed = capsys.readouterr().out
    assert "by training frequency" in printed and "decile 10" in printed and "zero-shot" in printed
    groups = {group["name"]: group for group in payload["runs"][0]["by_frequency"]}
    assert groups["head"]["labels"] == 1 and groups["head"]["training_points"] == [9, 9]
    assert groups["zero-shot"] == {
        "name": "zero-shot", "labels": 1, "training_points": [0, 0], "training_positives": 0, "test_positives": 1,
        "test_queries": 1, "values": {"P@1": 0.0, "R@2": 1.0, "PSP@1": 0.0},
    }  # fmt: skip
    assert sum(group["labels"] for name, group in groups.items() if name.startswith("decile")) == 11
    assert groups["head"]["values"]["P@1"] == pytest.approx(1 / 3)
    assert groups["tail"]["values"]["P@1"] == pytest.approx(1 / 3)
    capsys.readouterr()
    evaluate_files([uneven_run, "P@1", "R@2", "PSP@1"], data=uneven, by_frequency=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == payload


def test_what_holds_for_every_run_is_said_once(uneven, uneven_run, tmp_path, capsys):
    other = tmp_path / "other.run"
    other.write_text("".join(f"{query} Q0 head 1 1 other\n" for query in list(RANKED)[1:]))
    evaluate_files([uneven_run, str(other), "PSP@1"], data=uneven)
    printed = capsys.readouterr().out
    assert printed.count("PSP: propensity") == 1 and "r: PSP" not in printed
    assert "other: judged but not in the run, counted as 0: 'tst0'." in printed


def test_points_without_labels_and_equal_label_texts_are_counted_as_they_are(uneven, uneven_run):
    (run,) = evaluate_files([uneven_run, "P@2", "R@2", "nDCG@2"], data=uneven)["runs"]
    assert run["counts"]["queries"] == 3 and run["counts"]["without_relevant"] == 1
    # Both labels called "twin" are documents of their own: two hits for tst1.
    assert run["mean"]["P@2"] == pytest.approx(2 / 3) and run["mean"]["R@2"] == pytest.approx(2 / 3)
    # Extreme classification's nDCG is binary, so the grade of 3 at rank 2 costs nothing.
    assert run["mean"]["nDCG@2"] == pytest.approx(2 / 3) and run["settings"]["binary_gain"] is True


def test_equal_label_texts_stand_beside_each_other_in_a_run(uneven, tmp_path):
    from shortlist.commands.search import search
    from shortlist.data import load_collection

    (tmp_path / "q.jsonl").write_text('{"_id": "q", "text": "twin"}\n')
    run = search(bm25=True, data=uneven, queries=tmp_path / "q.jsonl", output=tmp_path / "bm25.run")
    assert list(run["q"])[:2] == ["twin2", "twin1"]  # equal scores: by id, descending
    assert len(load_collection(uneven).corpus) == 12


def test_the_family_of_propensities_can_be_named(uneven, uneven_run, capsys):
    (run,) = evaluate_files([uneven_run, "PSP@1"], data=uneven)["runs"]
    assert run["settings"]["propensity"] == {"A": 0.55, "B": 1.5, "family": "other", "num_train": 10}
    assert "A=0.55, B=1.5 (family other), 10 training points" in capsys.readouterr().out
    (run,) = evaluate_files([uneven_run, "PSP@1"], data=uneven, propensity="amazon")["runs"]
    assert run["settings"]["propensity"]["A"] == 0.6
    amazon = uneven.rename(uneven.with_name("LF-AmazonSomething"))
    (run,) = evaluate_files([uneven_run, "PSP@1"], data=amazon)["runs"]
    assert run["settings"]["propensity"]["family"] == "amazon"
    with pytest.raises(ConfigError, match="amazn"):
        evaluate_files([uneven_run, "PSP@1"], data=amazon, propensity="amazn")


def test_what_needs_training_counts_needs_a_collection_with_a_train_split(files, toy_beir, uneven, uneven_run):
    for option in ({"by_frequency": True}, {"propensity": "amazon"}):
        with pytest.raises(ConfigError, match="needs training counts"):
            evaluate_files(files, **option)
    (uneven / "trn.json").unlink()
    with pytest.raises(DataError, match=r"by_frequency groups.*no train split.*Leave it out"):
        evaluate_files([uneven_run, "P@1"], data=uneven, by_frequency=True)


def test_a_run_over_documents_can_be_split_by_frequency_too(toy_beir, toy, tmp_path):
    qrels = toy.qrels("test")
    lines = [f"{query} Q0 {id} 0 {grade} p\n" for query in qrels for id, grade in qrels[query].items() if grade > 0]
    (tmp_path / "perfect.run").write_text("".join(lines))
    payload = evaluate_files([str(tmp_path / "perfect.run"), "R@100"], data=toy_beir, by_frequency=True)
    zero = payload["runs"][0]["by_frequency"][-1]
    assert zero["name"] == "zero-shot" and zero["labels"] > 0 and zero["values"]["R@100"] == pytest.approx(1.0)

"""Training on a file of lists: what the judgements say beside it, and a resumed run on another file."""

import json

import pytest

from shortlist import load_collection
from shortlist.commands.train import train
from shortlist.commands.train_dual_encoder import DualEncoderJob
from shortlist.config import load_config
from shortlist.errors import DataError


@pytest.fixture
def lists(tmp_path, toy_xc):
    """For every training query its first label, and all others as negatives, known positives among them."""
    collection = load_collection(toy_xc)
    path = tmp_path / "lists.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for query in collection.qrels("train"):
            first = next(iter(collection.qrels("train").relevant(query)))
            others = [label for label in collection.corpus.ids if label != first]
            file.write(json.dumps({"qid": query, "pos": [first], "neg": {"all": others}}) + "\n")
    return path


@pytest.fixture
def settings(tmp_path, toy_xc, tiny_static, lists):
    path = tmp_path / "lists.yaml"
    path.write_text(
        f"model: {{path: {tiny_static}}}\n"
        f"data: {{path: {toy_xc}, dev: none, negatives: given, lists: {lists}}}\n"
        "training: {learning_rate: 0.05, batch_size: 4, max_steps: 2, logging_steps: 1}\n",
        encoding="utf-8",
    )
    return path


def test_a_label_of_a_query_is_never_its_negative_whatever_a_file_says(settings, toy_xc):
    # user-reports B.33, B.37
    job = DualEncoderJob(load_config(settings))
    qrels = load_collection(toy_xc).qrels("train")
    batch = job._batches()([(0, index) for index in range(len(job.examples))])
    labels = job.documents.ids(batch["document_rows"].numpy())
    rows, columns = batch["positives"].rows.tolist(), batch["positives"].columns.tolist()
    found = {(row, labels[column]) for row, column in zip(rows, columns, strict=True)}
    judged = {(row, label) for row, query in enumerate(job.examples.query_ids) for label in qrels.relevant(query)}
    assert len(judged) > len(job.examples) and judged <= found


def test_resume_refuses_lists_that_have_changed(settings, lists, tmp_path):
    train(settings, output=tmp_path / "out")
    manifest = tmp_path / "out/manifest.json"
    record = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**record, "finished": False}), encoding="utf-8")
    lists.write_text(lists.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"data.lists \(.*lists.jsonl\) has changed since the run"):
        train(settings, output=tmp_path / "out", resume=True)

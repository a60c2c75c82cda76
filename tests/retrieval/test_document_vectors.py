"""The label side: one-vs-all head and hybrid give the vectors they should, by id, saved and opened again."""

import json
import shutil

import numpy as np
import pytest
import torch

from shortlist.errors import ConfigError, DataError, MissingInputError, NonFiniteError
from shortlist.retrieval import engine
from shortlist.retrieval.document_vectors import take_rows
from shortlist.retrieval.dual_encoder import DualEncoder
from shortlist.retrieval.encode import encode_corpus

TEXTS = {"b": "the moon and the ocean", "a": "bread and butter", "c": "a house on the river"}
IDS = ["a", "b", "c"]
QUERIES = ["the moon", "bread", "", "a river and the ocean"]


@pytest.fixture(params=["static", "transformer"])
def text(request, tiny_static, tiny_transformer):
    return DualEncoder.from_pretrained(tiny_static if request.param == "static" else tiny_transformer, dtype="float32")


def random_vectors(encoder, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(IDS), encoder.dim, generator=generator), torch.randn(len(IDS), generator=generator)


@pytest.fixture
def head(text):
    vectors, biases = random_vectors(text)
    return text.with_document_vectors(IDS, "vectors", vectors=vectors, biases=biases)


@pytest.fixture
def hybrid(text):
    return text.with_document_vectors(IDS, "text_and_vectors", vectors=random_vectors(text)[0])


# Vectors ------------------------------------------------------------------------------------------------


def test_the_head_scores_a_query_by_weights_and_bias_of_each_label(text, head):
    vectors, biases = random_vectors(text)
    phi = text.encode_queries(QUERIES)
    documents = head.encode_documents(TEXTS)
    queries = head.encode_queries(QUERIES)
    assert head.dim == text.dim + 1 == documents.shape[1] and head.similarity == "dot"
    np.testing.assert_array_equal(queries, np.column_stack([phi, np.ones(len(QUERIES), np.float32)]))
    # TEXTS is not in the order of the rows: a document is known by its id.
    expected = phi @ vectors.numpy()[[1, 0, 2]].T + biases.numpy()[[1, 0, 2]]
    np.testing.assert_allclose(queries @ documents.T, expected, atol=1e-5)


def test_the_head_does_not_read_the_text(head):
    np.testing.assert_array_equal(
        head.encode_documents(TEXTS), head.encode_documents(dict.fromkeys(TEXTS, "something else"))
    )


def test_the_hybrid_adds_its_vectors_to_the_encoded_texts_and_normalises(text, hybrid):
    vectors = random_vectors(text)[0].numpy()
    total = text.encode_documents(TEXTS) + vectors[[1, 0, 2]]
    np.testing.assert_allclose(
        hybrid.encode_documents(TEXTS), total / np.linalg.norm(total, axis=1, keepdims=True), atol=1e-6
    )
    np.testing.assert_array_equal(hybrid.encode_queries(QUERIES), text.encode_queries(QUERIES))
    assert hybrid.dim == text.dim and hybrid.similarity == "cosine"


def test_an_untrained_hybrid_is_the_text_encoder(text):
    hybrid = text.with_document_vectors(IDS, "text_and_vectors")
    np.testing.assert_allclose(hybrid.encode_documents(TEXTS), text.encode_documents(TEXTS), atol=1e-6)


def test_the_training_side_gives_the_vectors_of_the_encoding_side(text, head, hybrid):
    for encoder in (head, hybrid):
        tower = encoder.document_tower
        tokens = tower.tokens(list(TEXTS.values()), max_length=None).at_rows(tower.rows_of(list(TEXTS)))
        with torch.no_grad():
            trained = encoder.embed_documents(tower.collate(tokens))
        np.testing.assert_allclose(trained.numpy(), encoder.encode_documents(TEXTS), atol=1e-6)


def test_features_without_rows_are_refused(head, hybrid):
    for encoder in (head, hybrid):
        with pytest.raises(DataError, match="mapping id → text"):
            encoder.embed_documents(encoder.tokenize_documents(["x"]))


def test_rows_in_order_are_taken_without_a_copy():
    table = torch.nn.Parameter(torch.randn(6, 3))
    assert take_rows(table, torch.arange(6)) is table
    assert take_rows(table, torch.arange(2, 5)).data_ptr() == table[2].data_ptr()
    for rows in ([0, 1, 2, 3, 4, 5], [2, 3, 4], [4, 0, 5], [3, -1, 0, -1], [5, 4, 3, 2, 1, 0], [1], [-1, 0, 1], []):
        picked = take_rows(table, torch.tensor(rows, dtype=torch.int64))
        expected = torch.stack([table[row] if row >= 0 else torch.zeros(3) for row in rows]) if rows else table[:0]
        assert torch.equal(picked, expected)
        weights = torch.arange(1.0, 1 + picked.numel()).view(picked.shape)
        mine = torch.autograd.grad((picked * weights).sum(), table)[0]
        theirs = torch.autograd.grad((expected * weights).sum(), table, allow_unused=True)[0]
        assert torch.equal(mine, torch.zeros_like(table) if theirs is None else theirs)


# Ids ----------------------------------------------------------------------------------------------------


def test_a_document_unknown_to_the_hybrid_is_its_text_alone_and_reported_once(text, hybrid, monkeypatch, caplog):
    monkeypatch.setattr(engine, "WINDOW", 2)
    texts = {**TEXTS, "new": "stars and planets", "newer": "butter", "newest": "", "last": "house"}
    vectors = hybrid.encode_documents(texts)
    np.testing.assert_allclose(vectors[3:], text.encode_documents(list(texts.values())[3:]), atol=1e-6)
    np.testing.assert_allclose(vectors[:3], hybrid.encode_documents(TEXTS), atol=1e-6)
    (line,) = [record.message for record in caplog.records if "zero-shot" in record.message]
    assert "4 of 7" in line and "'new', 'newer', 'newest'" in line and "last" not in line


def test_a_document_unknown_to_the_head_is_refused_by_name(head):
    texts = {**TEXTS, "n1": "", "n2": "", "n3": "", "n4": ""}
    with pytest.raises(
        DataError, match=r"4 of 7 documents have no vector.*'n1', 'n2', 'n3': .*trained with 3"
    ) as raised:
        head.encode_documents(texts)
    assert "n4" not in str(raised.value)


@pytest.mark.parametrize("texts", [["the moon"], "the moon"])
def test_texts_without_ids_are_refused(head, hybrid, texts):
    for encoder in (head, hybrid):
        with pytest.raises(DataError, match="pass a mapping id → text"):
            encoder.encode_documents(texts)


@pytest.mark.parametrize("ids", [["a", "a", "b"], ["a", "", "b"], ["a", "b"]])
def test_ids_must_be_distinct_and_one_a_vector(tiny_static, ids):
    text = DualEncoder.from_pretrained(tiny_static)
    with pytest.raises(DataError, match="twice|empty|2 ids for 3"):
        text.with_document_vectors(ids, "vectors", vectors=torch.zeros(3, text.dim))


def test_a_corpus_is_encoded_by_its_ids(head, hybrid, toy, tmp_path):
    ids = list(toy.corpus.ids)
    random = torch.randn(len(ids), head.dim - 1, generator=torch.Generator().manual_seed(3))
    for side, encoder in (("vectors", head), ("text_and_vectors", hybrid)):
        text = encoder.text_encoder()
        model = text.with_document_vectors(ids[::-1], side, vectors=random)
        store = encode_corpus(model, toy.corpus, tmp_path / side, shard_size=20)
        vectors = np.concatenate([block for _, block in store])
        free = random.numpy()[::-1]
        if side == "vectors":
            np.testing.assert_array_equal(vectors[:, :-1], free)
        else:
            total = text.encode_documents(dict(zip(ids, toy.corpus.texts(text.template), strict=True))) + free
            np.testing.assert_allclose(vectors, total / np.linalg.norm(total, axis=1, keepdims=True), atol=1e-5)
        assert store.manifest["document_side"] == side and store.manifest["documents"] == len(ids)


# Files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["vectors", "text_and_vectors"])
@pytest.mark.parametrize("shared", [True, False])
def test_saved_and_opened_it_gives_the_same_vectors(text, tmp_path, side, shared):
    if not shared:
        text = DualEncoder.from_pretrained(text.source, shared=False, dtype="float32")
        with torch.no_grad():
            next(text.document_tower.parameters()).mul_(1.5)
    encoder = text.with_document_vectors(["x y", "é\n", "c"], side, vectors=random_vectors(text)[0])
    encoder.temperature = 0.05
    folder = encoder.save_pretrained(tmp_path / "model", loss="one_vs_all_bce")
    opened = DualEncoder.from_pretrained(folder, dtype="float32")
    texts = dict(zip(["c", "x y", "é\n"], TEXTS.values(), strict=True))
    np.testing.assert_allclose(opened.encode_documents(texts), encoder.encode_documents(texts), atol=1e-6)
    np.testing.assert_allclose(opened.encode_queries(QUERIES), encoder.encode_queries(QUERIES), atol=1e-6)
    assert opened.fingerprint == encoder.fingerprint and opened.document_side == side
    assert opened.temperature == 0.05 and opened.source == str(folder)
    assert {file.suffix for file in folder.rglob("*") if file.is_file()}.isdisjoint({".bin", ".pt", ".pkl"})
    again = opened.save_pretrained(tmp_path / "again")
    assert DualEncoder.from_pretrained(again).fingerprint == encoder.fingerprint


def test_other_readers_find_the_text_encoder_alone_and_are_told(text, head, hybrid, tmp_path):
    for name, encoder in (("head", head), ("hybrid", hybrid)):
        folder = encoder.save_pretrained(tmp_path / name)
        # Half of the model under the name of the whole would score wrongly without a word.
        assert not (folder / "modules.json").exists() and not (folder / "config.json").exists()
        assert json.loads((folder / "shortlist.json").read_text())["format_version"] == 2
        card = (folder / "README.md").read_text()
        assert "sentence-transformers and transformers cannot open this folder" in card and "`text/`" in card
        assert "for each of 3 documents" in card and "tags: [retrieval, dual-encoder]" in card
        alone = DualEncoder.from_pretrained(folder / "text")
        assert alone.fingerprint == text.fingerprint and alone.document_side == "text"
        assert (folder / "text" / "modules.json").is_file()


def test_a_text_encoder_is_written_as_before(text, tmp_path):
    folder = text.save_pretrained(tmp_path / "model")
    settings = json.loads((folder / "shortlist.json").read_text())
    assert settings["format_version"] == 1 and not {"document_side", "temperature"} & set(settings)
    assert "document_side" not in text.settings() and text.text_encoder() is text


def test_adapters_are_kept_under_document_vectors(tiny_transformer, tmp_path):
    # user-reports B.57: after load every saved tensor is used
    text = DualEncoder.from_pretrained(tiny_transformer, dtype="float32").add_lora(rank=2, alpha=4)
    with torch.no_grad():
        for name, parameter in text.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    encoder = text.with_document_vectors(IDS, "text_and_vectors", vectors=random_vectors(text)[0])
    opened = DualEncoder.from_pretrained(encoder.save_pretrained(tmp_path / "model"), dtype="float32")
    np.testing.assert_allclose(opened.encode_documents(TEXTS), encoder.encode_documents(TEXTS), atol=1e-5)
    assert opened.fingerprint == encoder.fingerprint


def test_the_fingerprint_changes_with_vectors_biases_and_the_order_of_ids(text, head):
    vectors, biases = random_vectors(text)
    seen = {text.fingerprint, head.fingerprint}
    for ids, weight, bias, side in [
        (IDS, vectors + 0.1, biases, "vectors"),
        (IDS, vectors, biases + 0.1, "vectors"),
        (["b", "a", "c"], vectors, biases, "vectors"),
        (IDS, vectors, None, "text_and_vectors"),
        (["b", "a", "c"], vectors, None, "text_and_vectors"),
    ]:
        fingerprint = text.with_document_vectors(ids, side, vectors=weight, biases=bias).fingerprint
        assert fingerprint not in seen
        seen.add(fingerprint)
    before = head.fingerprint
    with torch.no_grad():
        head.document_tower.weight[1, 0] += 1
    assert head.fingerprint != before


def test_the_fingerprint_of_the_embedded_encoder_is_what_it_was():
    assert DualEncoder.from_pretrained("shortlist/static-en").fingerprint == "3d513cb5a1e563a5"


def test_damaged_folders_are_named(tiny_static, tmp_path):
    text = DualEncoder.from_pretrained(tiny_static)
    one_vs_all = text.with_document_vectors(IDS, "vectors").save_pretrained(tmp_path / "head")
    with pytest.raises(ConfigError, match="have 16 numbers and the text encoder gives 8"):
        DualEncoder.from_pretrained(one_vs_all, dim=8)

    def broken(name):
        return shutil.copytree(one_vs_all, tmp_path / name)

    folder = broken("missing")
    (folder / "document_vectors" / "vectors.safetensors").unlink()
    with pytest.raises(MissingInputError, match="vectors.safetensors is missing"):
        DualEncoder.from_pretrained(folder)
    folder = broken("cut")
    file = folder / "document_vectors" / "vectors.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged"):
        DualEncoder.from_pretrained(folder)
    folder = broken("mixed")
    other = text.with_document_vectors(["a", "b"], "vectors").save_pretrained(tmp_path / "other")
    shutil.copy(other / "document_vectors" / "vectors.safetensors", folder / "document_vectors")
    with pytest.raises(DataError, match=r"shape \(2, 16\) for 3 ids"):
        DualEncoder.from_pretrained(folder)
    folder = broken("edited")
    settings = json.loads((folder / "shortlist.json").read_text())
    for value, message in [("text_and_vectors", "holds biases"), ("tables", "expected vectors or")]:
        (folder / "shortlist.json").write_text(json.dumps({**settings, "document_side": value}))
        with pytest.raises(DataError, match=message):
            DualEncoder.from_pretrained(folder)


def test_a_vector_that_is_not_finite_is_named(tiny_static):
    # user-reports B.51
    encoder = DualEncoder.from_pretrained(tiny_static).with_document_vectors(IDS, "text_and_vectors")
    with torch.no_grad():
        encoder.document_tower.weight[1] = torch.nan
    with pytest.raises(NonFiniteError, match="'b'.*the weight weight of the model is not finite"):
        encoder.encode_documents(TEXTS)


# Training -----------------------------------------------------------------------------------------------


def test_head_parameters_are_the_free_ones(head, hybrid):
    assert [tuple(p.shape) for p in head.document_tower.head_parameters()] == [(3, head.dim - 1), (3,)]
    assert [tuple(p.shape) for p in hybrid.document_tower.head_parameters()] == [(3, hybrid.dim)]
    # The weights of the text are not counted twice where both sides share them.
    shared = sum(p.numel() for p in hybrid.text_encoder().parameters())
    assert sum(p.numel() for p in hybrid.parameters()) == shared + 3 * hybrid.dim


def test_a_frozen_encoder_is_a_fixed_feature_extractor(hybrid):
    hybrid.freeze_text()
    free = hybrid.document_tower.head_parameters()
    assert {id(p) for p in hybrid.parameters() if p.requires_grad} == {id(p) for p in free}
    hybrid.train()
    assert hybrid.training and not any(tower.training for tower in hybrid.text_towers())
    features = hybrid.tokenize_documents(list(TEXTS.values())) | {"rows": torch.tensor([1, 0, -1])}
    first, second = hybrid.embed_documents(features), hybrid.embed_documents(features)
    assert torch.equal(first, second)
    (first * torch.arange(first.numel()).view(first.shape)).sum().backward()
    assert free[0].grad[:2].abs().sum() > 0 and not free[0].grad[2].any()


def test_document_vectors_are_put_on_a_text_encoder_only(head, text):
    with pytest.raises(ConfigError, match="has document vectors already"):
        head.with_document_vectors(IDS, "vectors")
    with pytest.raises(ConfigError, match="expected vectors or text_and_vectors"):
        text.with_document_vectors(IDS, "free")


def test_looked_up_vectors_are_one_micro_batch(text, toy):
    from shortlist.settings import NegativeSource
    from shortlist.training.batches import BatchBuilder
    from shortlist.training.documents import Documents
    from shortlist.training.examples import build_examples

    examples = build_examples(toy.all_queries(), toy.qrels("train"), Documents(toy.corpus, by_row=True))
    sizes = {}
    for side in ("vectors", "text_and_vectors"):
        encoder = text.with_document_vectors(list(toy.corpus.ids), side)
        batch = BatchBuilder(examples, encoder, sources=(NegativeSource("all"),), micro_batch_size=16)([(0, 0), (0, 1)])
        sizes[side] = [len(part["rows"]) for part in batch["documents"]]
        rows = torch.cat([part["rows"] for part in batch["documents"]])
        assert torch.equal(rows, batch["document_rows"])
        vectors = torch.cat([encoder.embed_documents(part) for part in batch["documents"]])
        assert vectors.shape == (len(toy.corpus), encoder.dim)
    assert sizes["vectors"] == [len(toy.corpus)] and max(sizes["text_and_vectors"]) == 16

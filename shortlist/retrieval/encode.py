"""Encoding of texts and corpora (see engine.py for how)."""

from shortlist.retrieval.engine import EncodingCounts, encode_texts

__all__ = ["EncodingCounts", "encode_texts"]

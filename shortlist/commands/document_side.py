"""What model.document_side and model.freeze_encoder make of an encoder before it is trained."""

from __future__ import annotations

import logging
import math

import numpy as np
import torch

from shortlist.data import Corpus
from shortlist.errors import ConfigError
from shortlist.retrieval.document_vectors import DocumentVectors, TextAndVectors
from shortlist.retrieval.dual_encoder import DualEncoder
from shortlist.settings import TrainConfig

logger = logging.getLogger(__name__)

# Length of a vector that starts from nothing: small beside an encoded text, and not zero, so that it has a direction.
_SMALL = 0.1


def with_document_side(encoder: DualEncoder, config: TrainConfig, corpus: Corpus) -> DualEncoder:
    """`encoder` with the label side that `config` asks for, a free vector for each row of `corpus`.

    Vectors of the one-vs-all head start as the encoded texts and its biases at the logit of one document in all: the
    head begins where the text encoder stands and, under binary cross-entropy, near the base rate; from random vectors
    or biases of zero the first epochs go into pushing all scores down. Free vectors of the hybrid start at zero. A
    model that has document vectors already keeps those of the documents it knows.

    Raises:
        ConfigError: the model has another document side, or settings exclude each other; the keys are named.
    """
    side, found = config.model.document_side, encoder.document_side
    if found not in ("text", side):
        raise ConfigError(
            f"model.path is {config.model.path}, whose document side is {found}, but model.document_side is {side}: "
            f"set model.document_side={found} to train it further, or model.path={config.model.path}/text for its text "
            "encoder alone."
        )
    if side == "vectors" and config.training.matryoshka:
        raise ConfigError(
            "training.matryoshka cuts vectors at the end, where model.document_side vectors has the bias; leave "
            "matryoshka out, or set model.document_side to text_and_vectors."
        )
    if side != "text":
        encoder = _attach(encoder, config, corpus)
    if config.model.freeze_encoder:
        _freeze(encoder, config)
    return encoder


def _attach(encoder: DualEncoder, config: TrainConfig, corpus: Corpus) -> DualEncoder:
    ids, text, old = list(corpus.ids), encoder.text_encoder(), encoder.document_tower
    vectors, biases = _start(text, config, corpus)
    if isinstance(old, DocumentVectors | TextAndVectors):
        places = old.ids.find(ids)
        known, rows = np.flatnonzero(places >= 0), places[places >= 0]
        vectors[known] = old.weight.detach().cpu()[rows]
        if isinstance(old, DocumentVectors):
            biases[known] = old.bias.detach().cpu()[rows]
        logger.info(
            "%s of %s documents keep their vectors, %s start anew",
            f"{len(known):,}", f"{len(ids):,}", f"{len(ids) - len(known):,}",
        )  # fmt: skip
    one_vs_all = config.model.document_side == "vectors"
    return text.with_document_vectors(
        ids, config.model.document_side, vectors=vectors, biases=biases if one_vs_all else None
    )


def _start(text: DualEncoder, config: TrainConfig, corpus: Corpus) -> tuple[torch.Tensor, torch.Tensor]:
    """Untrained vectors `(docs, dim)` and biases `(docs,)` on the CPU."""
    biases = torch.full((len(corpus),), -config.training.temperature * math.log(max(2, len(corpus) - 1)))
    vectors = torch.zeros(len(corpus), text.dim)
    if config.model.document_side == "vectors":
        start = 0
        for part, encoded in text.stream_documents(
            zip(corpus.ids, corpus.texts(text.template), strict=True), total=len(corpus)
        ):
            vectors[start : start + len(part)] = torch.from_numpy(encoded)
            start += len(part)
        # Documents without text: equal vectors of zero would be trained apart by their biases alone at first.
        empty = (vectors == 0).all(dim=1)
        generator = torch.Generator().manual_seed(config.seed)
        random = torch.randn(int(empty.sum()), text.dim, generator=generator)
        vectors[empty] = random * (_SMALL / math.sqrt(text.dim))
    return vectors, biases


def _freeze(encoder: DualEncoder, config: TrainConfig) -> None:
    if config.model.lora is not None:
        raise ConfigError("model.freeze_encoder and model.lora exclude each other: adapters change the encoder.")
    encoder.freeze_text(projections=config.model.projection_dim is None)
    if not any(parameter.requires_grad for parameter in encoder.parameters()):
        raise ConfigError(
            "model.freeze_encoder leaves nothing to train: set model.document_side to vectors or text_and_vectors, or "
            "model.projection_dim for a new dense layer."
        )

"""DualEncoder: query and document texts to vectors of one space, by transformer or static towers."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shortlist.devices import resolve_device
from shortlist.errors import ConfigError, DataError
from shortlist.retrieval.device import resolve_dtype
from shortlist.retrieval.document_vectors import DocumentVectors, TextAndVectors, TextTower, WithOne
from shortlist.retrieval.static import StaticTower
from shortlist.retrieval.transformer import TransformerTower
from shortlist.types import Texts

if TYPE_CHECKING:
    import os

Tower = TransformerTower | StaticTower | WithOne | DocumentVectors | TextAndVectors

DEFAULT_MODEL = "shortlist/static-en"
DEFAULT_TEMPLATE = "{title} {text}"


class DualEncoder(nn.Module):
    """Two towers (or one for both sides) that put queries and documents in one vector space.

    The similarity is the inner product of the vectors: cosine if they are normalised, dot if not.
    `parameters()` are what training changes; `embed_*` keep gradients, `encode_*` give numpy.

    Args:
        query_tower: encodes queries, and documents too if there is no `document_tower`.
        document_tower: a second tower, with its own weights.
        prompts: text put before each query and document, {"query": "", "document": ""}.
        query_max_length: tokens kept of a query, prompt and special tokens included; None keeps all.
        doc_max_length: the same for a document.
        template: how title and text of a document become one text.
        dtype: "float32", "bfloat16", "float16", or "auto" (bfloat16 where the device is fast at it).
        base_model: where the weights came from, for the model card and for adapters.
    """

    def __init__(
        self,
        query_tower: Tower,
        document_tower: Tower | None = None,
        *,
        prompts: Mapping[str, str] | None = None,
        query_max_length: int | None = None,
        doc_max_length: int | None = None,
        template: str = DEFAULT_TEMPLATE,
        dtype: str = "auto",
        base_model: str | None = None,
    ):
        super().__init__()
        unknown = set(prompts or {}) - {"query", "document"}
        if unknown:
            raise ConfigError(f"prompts have the key {sorted(unknown)[0]!r}; expected 'query' and 'document'.")
        self.query_tower = query_tower
        self.document_tower = document_tower or query_tower
        if self.query_tower.dim != self.document_tower.dim:
            raise ConfigError(
                f"the query tower gives {self.query_tower.dim} numbers and the document tower "
                f"{self.document_tower.dim}; both sides need one dimension: set dim, or a projection."
            )
        if "{title}" not in template and "{text}" not in template:
            raise ConfigError(
                f"template {template!r} has neither {{title}} nor {{text}}: all documents would be alike."
            )
        _check_length("query_max_length", query_max_length, self.query_tower)
        _check_length("doc_max_length", doc_max_length, self.document_tower)
        self.prompts = {"query": "", "document": "", **(prompts or {})}
        self.query_max_length = query_max_length
        self.doc_max_length = doc_max_length
        self.template = template
        self.dtype_setting = dtype
        self.base_model = base_model
        self.source: str | None = None
        # What scores were divided by in training, None where it is not known.
        self.temperature: float | None = None
        self._frozen = False
        self._fingerprint: tuple[Any, str] | None = None

    # Opening and saving -------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        pooling: str | None = None,
        normalise: bool | None = None,
        query_max_length: int | None = None,
        doc_max_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        dim: int | None = None,
        projection_dim: int | None = None,
        template: str | None = None,
        shared: bool | None = None,
    ) -> DualEncoder:
        """Open a folder of ours, a sentence-transformers or Hugging Face checkpoint, or a named model.

        A path that exists never touches the network. Arguments left at None come from the checkpoint; a
        checkpoint that says nothing gets mean pooling (last for decoders), L2 norm, and at most 512 tokens.

        Args:
            path_or_name: a folder, "shortlist/static-en" (the embedded model), or a hub name.
            device: "auto", "cpu", "cuda", "cuda:1", "mps".
            dtype: of the computation in `encode_*`. An explicit half type also loads the weights in it,
                so such an encoder should not be trained.
            pooling: "mean", "cls" or "last".
            normalise: L2 norm, and with it cosine similarity.
            query_max_length: tokens kept of a query.
            doc_max_length: tokens kept of a document.
            prompts: {"query": …, "document": …}.
            dim: keep the first `dim` numbers of each vector, before the norm (Matryoshka).
            projection_dim: add a new, untrained dense layer to this dimension.
            template: of title and text.
            shared: False gives each side its own copy of the weights; None keeps what the checkpoint has.

        Raises:
            MissingInputError: nothing of that name here, or on the hub.
            DataError: a checkpoint that is incomplete, of a newer format, or of an unsupported kind.
        """
        from shortlist.retrieval.checkpoints import load_encoder

        encoder = load_encoder(
            path_or_name, dtype=dtype, pooling=pooling, normalise=normalise, query_max_length=query_max_length,
            doc_max_length=doc_max_length, prompts=prompts, dim=dim, projection_dim=projection_dim,
            template=template, shared=shared,
        )  # fmt: skip
        static = all(tower.kind == "static" for tower in encoder.text_towers())
        # A sum of a few rows is done before the copy to an accelerator would be.
        return encoder.to(torch.device("cpu") if static and device == "auto" else resolve_device(device)).eval()

    def save_pretrained(self, path: str | os.PathLike[str], *, overwrite: bool = False, **facts: Any) -> Path:
        """Write a folder that this class, AutoModel (transformer towers) and sentence-transformers open.

        Of a model with document vectors the others open the text encoder alone, in the folder's `text/`.
        `facts` go into the model card (`model_card`). Written atomically; an existing folder is refused
        unless `overwrite` (OutputExistsError).
        """
        from shortlist.retrieval.saving import save_encoder

        return save_encoder(self, path, overwrite=overwrite, **facts)

    def push_to_hub(self, repository: str, *, private: bool = True, **facts: Any) -> str:
        """Save, and upload to the Hugging Face hub as `repository`; returns the address of the commit."""
        from shortlist.retrieval.hub import push

        return push(self, repository, private=private, **facts)

    def add_lora(
        self,
        *,
        rank: int = 16,
        alpha: int = 32,
        dropout: float = 0.0,
        target_modules: str | list[str] = "all-linear",
    ) -> DualEncoder:
        """Wrap each transformer backbone in a LoRA adapter (Hu et al. 2021); only adapters and projections train.

        `save_pretrained` then writes the adapter and the name of its base model.
        """
        from peft import LoraConfig, get_peft_model

        for tower in self.text_towers():
            if not isinstance(tower, TransformerTower):
                raise ConfigError("LoRA needs a transformer tower; a static tower has one matrix, train it whole.")
            config = LoraConfig(
                r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=target_modules,
                task_type="FEATURE_EXTRACTION",
            )  # fmt: skip
            try:
                with warnings.catch_warnings():
                    # peft asks transformers for a name that transformers has given up; nothing for a user to do.
                    warnings.simplefilter("ignore", FutureWarning)
                    tower.backbone = get_peft_model(tower.backbone, config)
            except ValueError as error:  # peft's sentence says which target it does not know
                linear = {name.rpartition(".")[2] for name, part in tower.backbone.named_modules()
                          if isinstance(part, nn.Linear)}  # fmt: skip
                raise ConfigError(
                    f"LoRA with target_modules {target_modules!r}: {error} This model's linear layers are called "
                    f"{', '.join(sorted(linear))}."
                ) from None
        return self

    def with_document_vectors(
        self, ids: Sequence[str], side: str, *, vectors: Tensor | None = None, biases: Tensor | None = None
    ) -> DualEncoder:
        """This encoder with a free vector for each document `ids`: the same text weights, another document side.

        Args:
            ids: the documents by row.
            side: "vectors" (a vector and a bias in place of the text: the one-vs-all head) or "text_and_vectors" (added
                to the encoded text).
            vectors: float `(docs, dim)`; zeros if None.
            biases: float `(docs,)`, for "vectors"; zeros if None.

        Raises:
            ConfigError: this encoder has document vectors already, or `vectors` another dimension.
        """
        query, document = self.query_tower, self.document_tower
        if not isinstance(query, TextTower) or not isinstance(document, TextTower):
            raise ConfigError("this encoder has document vectors already; start from its text_encoder().")
        if side == "vectors":
            start = torch.zeros(len(ids), query.dim) if vectors is None else vectors
            if start.shape[1] != query.dim:
                raise ConfigError(
                    f"the document vectors have {start.shape[1]} numbers and the text encoder gives {query.dim}; "
                    "dim and projection_dim of a model with document vectors cannot be changed."
                )
            return self._with_towers(WithOne(query), DocumentVectors(ids, start, biases))
        if side != "text_and_vectors":
            raise ConfigError(f"document side {side!r} is unknown; expected vectors or text_and_vectors.")
        return self._with_towers(query, TextAndVectors(document, ids, vectors))

    def text_encoder(self) -> DualEncoder:
        """The encoder of texts inside one with document vectors, with the same weights; itself where there are none."""
        if not self.document_tower.by_row:
            return self
        query = self.query_tower.text if isinstance(self.query_tower, WithOne) else self.query_tower
        document = self.document_tower.text if isinstance(self.document_tower, TextAndVectors) else None
        return self._with_towers(query, None if document is query else document)

    def _with_towers(self, query: Tower, document: Tower | None) -> DualEncoder:
        """A dual encoder of these towers with the settings of this one."""
        encoder = DualEncoder(
            query, document, prompts=self.prompts, query_max_length=self.query_max_length,
            doc_max_length=self.doc_max_length, template=self.template, dtype=self.dtype_setting,
            base_model=self.base_model,
        )  # fmt: skip
        encoder.source, encoder.temperature = self.source, self.temperature
        return encoder.to(self.device).train(self.training)

    def freeze_text(self, *, projections: bool = True) -> DualEncoder:
        """Make the text towers fixed feature extractors: no gradients, no dropout; projections too unless excepted."""
        for tower in self.text_towers():
            tower.requires_grad_(False)
            if not projections and isinstance(tower, TransformerTower):
                tower.projections.requires_grad_(True)
        self._frozen = True
        return self.train(self.training)

    def train(self, mode: bool = True) -> DualEncoder:
        """Training mode or not, as for every module; frozen text towers stay without dropout."""
        super().train(mode)
        if self._frozen:
            for tower in self.text_towers():
                tower.eval()
        return self

    # What it is ---------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether one tower serves both sides."""
        return self.query_tower is self.document_tower

    def towers(self) -> list[Tower]:
        """The distinct towers: one or two."""
        return [self.query_tower] if self.shared else [self.query_tower, self.document_tower]

    def text_towers(self) -> list[TextTower]:
        """The distinct towers that read text: one or two."""
        found: dict[int, TextTower] = {}
        for tower in self.towers():
            text = tower if isinstance(tower, TextTower) else getattr(tower, "text", None)
            if text is not None:
                found.setdefault(id(text), text)
        return list(found.values())

    @property
    def document_side(self) -> str:
        """ "text", "vectors" (one-vs-all head) or "text_and_vectors" (hybrid)."""
        sides = {DocumentVectors: "vectors", TextAndVectors: "text_and_vectors"}
        return sides.get(type(self.document_tower), "text")

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.query_tower.dim

    @property
    def similarity(self) -> str:
        """ "cosine" if vectors are normalised, else "dot"; either way the inner product of the vectors."""
        return "cosine" if self.query_tower.normalise and self.document_tower.normalise else "dot"

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the computation in `encode_*`, "auto" resolved for the device."""
        return resolve_dtype(self.dtype_setting, self.device)

    def settings(self) -> dict[str, Any]:
        """What a manifest records beside the fingerprint: prompts, lengths, pooling, norm, dtype, device."""
        tower = self.document_tower
        by_row: dict[str, Any] = {}
        if isinstance(tower, DocumentVectors | TextAndVectors):
            by_row = {"document_side": self.document_side, "documents": len(tower)}
        return {
            "dim": self.dim,
            "prompts": dict(self.prompts),
            "query_max_length": self.query_max_length,
            "doc_max_length": self.doc_max_length,
            "pooling": getattr(self.query_tower if self.document_side == "vectors" else tower, "pooling", "mean"),
            "normalise": tower.normalise,
            "similarity": self.similarity,
            "template": self.template,
            **by_row,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    def weights_version(self) -> tuple[Any, ...]:
        """A value that changes when a weight is written to or replaced: the key of everything cached from weights."""
        return tuple((id(p), p.data_ptr(), p._version, p.device, p.dtype) for p in self.parameters())

    @property
    def fingerprint(self) -> str:
        """16 hex digits over weights, pooling, projections, norm, dim and prompts: equal ones make equal vectors.

        Weights count in bfloat16, so that the numerical type of the computation does not enter. Lengths and
        template do not enter either: an index records them, and they may differ at search.
        """
        version = (self.weights_version(), json.dumps([self.prompts, [t.settings() for t in self.towers()]]))
        if self._fingerprint is None or self._fingerprint[0] != version:
            digest = hashlib.sha256(version[1].encode())
            for tower in self.towers():
                for name, tensor in sorted(tower.state_dict().items()):
                    if "pooler." in name or not tensor.is_floating_point():
                        continue
                    digest.update(name.encode())
                    digest.update(tensor.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy())
            self._fingerprint = (version, digest.hexdigest()[:16])
        return self._fingerprint[1]

    # Training side ------------------------------------------------------------------------------------

    def tokenize_queries(self, texts: list[str]) -> dict[str, Tensor]:
        """Features of queries on the CPU, prompt added, cut at `query_max_length`."""
        return self.query_tower.tokenize(self.with_prompt(texts, "query"), max_length=self.query_max_length)

    def tokenize_documents(self, texts: list[str]) -> dict[str, Tensor]:
        """Features of documents on the CPU, prompt added, cut at `doc_max_length`."""
        return self.document_tower.tokenize(self.with_prompt(texts, "document"), max_length=self.doc_max_length)

    def embed_queries(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(queries, dim)` in float32, with gradients."""
        return self.query_tower(features)

    def embed_documents(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(docs, dim)` in float32, with gradients."""
        return self.document_tower(features)

    def forward(self, queries: dict[str, Tensor], documents: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Vectors of both sides, `(queries, dim)` and `(docs, dim)`."""
        return self.embed_queries(queries), self.embed_documents(documents)

    def with_prompt(self, texts: list[str], side: str) -> list[str]:
        """`texts` with the prompt of `side` ("query" or "document") before each."""
        prompt = self.prompts[side]
        return [prompt + text for text in texts] if prompt else texts

    # Encoding -----------------------------------------------------------------------------------------

    def encode_queries(
        self, texts: Texts, *, batch_tokens: int | None = None, show_progress: bool | None = None
    ) -> NDArray[np.float32]:
        """Float32 vectors `(queries, dim)` in input order; `texts` is a string, a list, or a mapping id → text."""
        return self._encode(texts, "query", batch_tokens, show_progress)

    def encode_documents(
        self, texts: Texts, *, batch_tokens: int | None = None, show_progress: bool | None = None
    ) -> NDArray[np.float32]:
        """Float32 vectors `(docs, dim)` in input order; `texts` is a string, a list, or a mapping id → text.

        A model with document vectors needs the mapping.
        `batch_tokens` bounds the tokens of one forward pass, padding included (default by device).
        """
        return self._encode(texts, "document", batch_tokens, show_progress)

    def encode_stream(
        self,
        items: Iterable[tuple[str, str]],
        *,
        side: str = "document",
        total: int | None = None,
        batch_tokens: int | None = None,
        show_progress: bool | None = None,
    ) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        """Ids and vectors of (id, text) pairs in blocks, in order, with memory for a few thousand texts at a time.

        `side` is "document" or "query"; `total` is for the progress bar.
        """
        from shortlist.retrieval.engine import encode_stream

        return encode_stream(
            self, items, side=side, total=total, batch_tokens=batch_tokens, show_progress=show_progress
        )

    def stream_documents(
        self, items: Iterable[tuple[str, str]], *, total: int | None = None
    ) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        """Ids and vectors `(docs, dim)` of (id, text) pairs, block by block in order, reported once."""
        from shortlist.retrieval.encode import encode_stream

        return encode_stream(self, items, total=total)

    def _encode(
        self, texts: Texts, side: str, batch_tokens: int | None, show_progress: bool | None
    ) -> NDArray[np.float32]:
        from shortlist.retrieval.engine import encode_texts

        ids, values = as_texts(texts)
        return encode_texts(self, values, side=side, ids=ids, batch_tokens=batch_tokens, show_progress=show_progress)


def _check_length(name: str, length: int | None, tower: Tower) -> None:
    if length is not None and length < 1:
        raise ConfigError(f"{name} is {length}; expected at least 1 token.")
    if length is not None and tower.longest is not None and length > tower.longest:
        raise ConfigError(f"{name} is {length}, but the model has positions for {tower.longest} tokens.")


def as_texts(texts: Texts) -> tuple[list[str] | None, list[str]]:
    """Ids (None unless `texts` is a mapping) and texts as a list; DataError names the first that is not a string."""
    ids: list[str] | None = None
    if isinstance(texts, str):
        values = [texts]
    elif isinstance(texts, Mapping):
        ids, values = [str(key) for key in texts], list(texts.values())
    elif isinstance(texts, Iterable):
        values = list(texts)
    else:
        raise DataError(f"texts is {type(texts).__name__} ({texts!r:.60}); expected a string, a list or a mapping.")
    for position, value in enumerate(values):
        if not isinstance(value, str):
            name = f"text {ids[position]!r}" if ids else f"text number {position}"
            raise DataError(f"{name} is {type(value).__name__} ({value!r:.60}); expected a string.")
    return ids, values

"""The label side of extreme classification: a free vector for every document, in place of its text or beside it.

`DocumentVectors` is the linear one-vs-all head of extreme classification over the text encoder as feature extractor:
score(q, l) = <phi(q), w_l> + b_l, written as one inner product of (phi(q), 1) and (w_l, b_l) so that any inner-product
index serves it. `TextAndVectors` is the hybrid: normalise(phi(text_l) + v_l), which starts as the text encoder (v = 0)
and falls back to it for a document that training has not seen. A trained document is known by its id: features carry
its row in "rows" (−1: unknown), and `rows_of` looks ids up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.indexes.ids import IdTable, IdWriter, check_ids
from shortlist.retrieval.static import StaticTower
from shortlist.retrieval.tokens import Tokens
from shortlist.retrieval.transformer import TransformerTower

TextTower = TransformerTower | StaticTower

VECTORS_FILE = "vectors.safetensors"


class WithOne(nn.Module):
    """A text tower whose vectors end in a 1, which meets a document's bias: (phi(q), 1).

    Args:
        text: the feature extractor phi.
    """

    by_row = False
    # The one is not part of a unit vector, so that the similarity is the plain inner product.
    normalise = False

    def __init__(self, text: TextTower):
        super().__init__()
        self.text = text
        self.kind = text.kind
        self.sort_by_length = text.sort_by_length
        self.longest = text.longest
        self.pooling = getattr(text, "pooling", "mean")
        self.dim = text.dim + 1
        self.full_dim = self.dim

    def settings(self) -> dict[str, Any]:
        """What is not a weight but decides the vector."""
        return {"kind": "with_one", "text": self.text.settings()}

    def tokens(self, texts: Sequence[str], *, max_length: int | None) -> Tokens:
        """Token ids of `texts`."""
        return self.text.tokens(texts, max_length=max_length)

    def collate(self, tokens: Tokens, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Features of the forward pass."""
        return self.text.collate(tokens, device=device)

    def tokenize(self, texts: Sequence[str], *, max_length: int | None) -> dict[str, Tensor]:
        """Features of `texts`, on the CPU."""
        return self.text.tokenize(texts, max_length=max_length)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(texts, dim)` in float32, the last number 1, with gradients."""
        return _with_column(self.text(features), 1.0)

    def vectors(self, features: dict[str, Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same, the text tower computing in `dtype`."""
        return _with_column(self.text.vectors(features, dtype=dtype), 1.0)

    def inference_module(self, dtype: torch.dtype) -> nn.Module:
        """The module whose layers compute `vectors`."""
        return self.text.inference_module(dtype)


class DocumentVectors(nn.Module):
    """A vector and a bias for each document, no text: the linear one-vs-all classifier head, (w_l, b_l).

    The baseline that users of extreme classification know. It cannot score a document that it was not trained with.

    Args:
        ids: the documents' ids by row.
        vectors: float `(docs, dim - 1)`, not normalised.
        biases: float `(docs,)`; zeros if None.

    Raises:
        DataError: an id that is empty or given twice, or other than one a vector.
    """

    by_row = True
    reads_text = False
    kind = "vectors"
    sort_by_length = False
    longest: int | None = None
    normalise = False
    pooling = "none"

    def __init__(self, ids: Sequence[str], vectors: Tensor, biases: Tensor | None = None):
        super().__init__()
        self.ids = DocumentIds(ids, len(vectors))
        self.weight = nn.Parameter(vectors.detach().clone().float())
        self.bias = nn.Parameter(torch.zeros(len(vectors)) if biases is None else biases.detach().clone().float())
        self.dim = vectors.shape[1] + 1
        self.full_dim = self.dim

    def __len__(self) -> int:
        return len(self.ids)

    def head_parameters(self) -> list[nn.Parameter]:
        """The free vectors `(docs, dim - 1)` and the biases `(docs,)`."""
        return [self.weight, self.bias]

    def settings(self) -> dict[str, Any]:
        """What is not a weight but decides which document gets which vector."""
        return {"kind": self.kind, "dim": self.dim, "documents": len(self), "ids": self.ids.fingerprint}

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id; DataError naming ids that the model was not trained with."""
        rows = self.ids.find(ids)
        unknown = [ids[position] for position in np.flatnonzero(rows < 0).tolist()]
        if unknown:
            named = ", ".join(repr(id) for id in unknown[:3])
            raise DataError(
                f"{len(unknown):,} of {len(ids):,} documents have no vector in this model, such as {named}: it knows a "
                f"document by its id alone, and was trained with {len(self):,} of them. Use the collection it was "
                "trained on, or train with model.document_side text or text_and_vectors, which read the text."
            )
        return rows

    def tokens(self, texts: Sequence[str], *, max_length: int | None) -> Tokens:
        """One empty list a text: the text is not read."""
        return Tokens.from_lists([()] * len(texts))

    def collate(self, tokens: Tokens, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Features of the forward pass: "rows" `(docs,)`, where `tokens` carry them."""
        return _rows_feature(tokens, device)

    def tokenize(self, texts: Sequence[str], *, max_length: int | None) -> dict[str, Tensor]:
        """Nothing: add "rows"."""
        return {}

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(docs, dim)` in float32, the bias last, with gradients."""
        rows = _rows(features)
        return torch.cat([take_rows(self.weight, rows), take_rows(self.bias, rows)[:, None]], dim=1)

    def vectors(self, features: dict[str, Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same; always in float32."""
        return self(features)

    def inference_module(self, dtype: torch.dtype) -> nn.Module:
        """The module whose layers compute `vectors`."""
        return self


class TextAndVectors(nn.Module):
    """The encoded text plus a free vector for each document, normalised if the text tower normalises.

    The free vectors take up what a document's text does not say about it. A document without one (trained or not by
    another name) is the encoded text alone, so that new documents can be added without training.

    Args:
        text: the text tower of the documents, often that of the queries too.
        ids: the documents' ids by row.
        vectors: float `(docs, dim)`; zeros if None, and training starts from the text encoder.

    Raises:
        ConfigError: the vectors have another dimension than the text tower.
        DataError: an id that is empty or given twice, or other than one a vector.
    """

    by_row = True

    def __init__(self, text: TextTower, ids: Sequence[str], vectors: Tensor | None = None):
        super().__init__()
        if vectors is None:
            vectors = torch.zeros(len(ids), text.dim)
        if vectors.shape[1] != text.dim:
            raise ConfigError(
                f"the document vectors have {vectors.shape[1]} numbers and the text encoder gives {text.dim}; "
                "dim and projection_dim of a model with document vectors cannot be changed."
            )
        self.text = text
        self.kind = text.kind
        self.sort_by_length = text.sort_by_length
        self.longest = text.longest
        self.normalise = text.normalise
        self.pooling = getattr(text, "pooling", "mean")
        self.dim = self.full_dim = text.dim
        self.ids = DocumentIds(ids, len(vectors))
        self.weight = nn.Parameter(vectors.detach().clone().float())

    def __len__(self) -> int:
        return len(self.ids)

    def head_parameters(self) -> list[nn.Parameter]:
        """The free vectors `(docs, dim)`."""
        return [self.weight]

    def settings(self) -> dict[str, Any]:
        """What is not a weight but decides the vector."""
        return {
            "kind": "text_and_vectors",
            "documents": len(self),
            "ids": self.ids.fingerprint,
            "text": self.text.settings(),
        }

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id, −1 for one without a vector of its own."""
        return self.ids.find(ids)

    def tokens(self, texts: Sequence[str], *, max_length: int | None) -> Tokens:
        """Token ids of `texts`."""
        return self.text.tokens(texts, max_length=max_length)

    def collate(self, tokens: Tokens, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Features of the forward pass: those of the text, and "rows" `(docs,)` where `tokens` carry them."""
        return {**self.text.collate(tokens, device=device), **_rows_feature(tokens, device)}

    def tokenize(self, texts: Sequence[str], *, max_length: int | None) -> dict[str, Tensor]:
        """Features of `texts`, on the CPU, to which "rows" must be added."""
        return self.text.tokenize(texts, max_length=max_length)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(docs, dim)` in float32, with gradients."""
        return self._with_free(self.text(features), features)

    def vectors(self, features: dict[str, Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same, the text tower computing in `dtype`."""
        return self._with_free(self.text.vectors(features, dtype=dtype), features)

    def inference_module(self, dtype: torch.dtype) -> nn.Module:
        """The module whose layers compute the text part of `vectors`."""
        return self.text.inference_module(dtype)

    def _with_free(self, encoded: Tensor, features: dict[str, Tensor]) -> Tensor:
        with torch.autocast(encoded.device.type, enabled=False):
            total = encoded.float() + take_rows(self.weight, _rows(features))
            return functional.normalize(total, dim=-1) if self.normalise else total


class DocumentIds:
    """Ids by row and rows by id.

    Raises:
        DataError: an id that is empty or given twice, or not `expected` of them.
    """

    def __init__(self, ids: Sequence[str], expected: int):
        checked = check_ids(ids, expected)
        self._table = IdTable()
        self._table.append(checked)
        digest = hashlib.sha256()
        for id in checked:
            encoded = id.encode("utf-8")
            digest.update(b"%d:%s" % (len(encoded), encoded))
        # 16 hex digits over all ids in order: part of the fingerprint of the model.
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._table)

    def find(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id, −1 where it is not there."""
        return self._table.find(ids)

    def all(self) -> list[str]:
        """All ids by row."""
        return list(self._table)


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]` with gradients, zeros where a row is −1; a view without a copy where the rows are consecutive.

    Scoring all documents asks for all rows in order: a copy of a million vectors a step, and its gradient, are saved.
    """
    count = len(rows)
    if not count:
        return table[:0]
    first = int(rows[0])
    if first >= 0 and torch.equal(rows, torch.arange(first, first + count, device=rows.device)):
        return table if count == len(table) else table[first : first + count]
    known = rows >= 0
    if bool(known.all()):
        return table.index_select(0, rows)
    return table.index_select(0, rows.clamp(min=0)) * known.to(table.dtype)[:, None]


def save_document_vectors(tower: DocumentVectors | TextAndVectors, folder: Path) -> None:
    """Write ids and free vectors of `tower` to the new folder `folder`: safetensors, and ids as in an index."""
    folder.mkdir()
    names = ("weight", "bias")
    tensors = {
        name: parameter.detach().float().cpu().contiguous()
        for name, parameter in zip(names, tower.head_parameters(), strict=False)
    }
    save_file(tensors, folder / VECTORS_FILE)
    writer = IdWriter(folder)
    writer.append(tower.ids.all())
    writer.close()


def read_document_vectors(folder: Path) -> tuple[list[str], Tensor, Tensor | None]:
    """Ids, free vectors and biases (None for the hybrid) written by `save_document_vectors`.

    Raises:
        MissingInputError: a file is not there.
        DataError: a file is damaged, or ids and vectors differ in number.
    """
    file = folder / VECTORS_FILE
    try:
        tensors = load_file(file)
        ids = list(IdTable.open(folder))
    except FileNotFoundError as error:
        raise MissingInputError(f"{error.filename or file} is missing; copy the whole model folder.") from None
    except (SafetensorError, ValueError, EOFError) as error:
        raise DataError(f"{folder} is damaged ({error}); copy the model folder again.") from None
    vectors, biases = tensors.pop("weight", None), tensors.pop("bias", None)
    if vectors is None or tensors:
        found = ", ".join(sorted(tensors)[:3]) or "none"
        raise DataError(f"{file}: expected the tensors 'weight' and 'bias'; found others: {found}.")
    if vectors.ndim != 2 or len(vectors) != len(ids) or (biases is not None and biases.shape != (len(ids),)):
        raise DataError(
            f"{file} holds vectors of shape {tuple(vectors.shape)} for {len(ids)} ids; the files are not of one model."
        )
    return ids, vectors, biases


def _with_column(vectors: Tensor, value: float) -> Tensor:
    return torch.cat([vectors, vectors.new_full((len(vectors), 1), value)], dim=1)


def _rows_feature(tokens: Tokens, device: torch.device | str | None) -> dict[str, Tensor]:
    if tokens.rows is None:
        return {}
    rows = torch.from_numpy(tokens.rows)
    return {"rows": rows.to(device) if device else rows}


def _rows(features: dict[str, Tensor]) -> Tensor:
    rows = features.get("rows")
    if rows is None:
        raise DataError(
            "the features of the documents have no 'rows': a model with document vectors needs to know which documents "
            "they are; pass a mapping id → text to encode_documents, or add rows from document_tower.rows_of(ids)."
        )
    return rows

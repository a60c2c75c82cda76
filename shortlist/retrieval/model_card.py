"""The README.md that goes with every saved model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shortlist.manifest import library_versions

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder

_USE = """\
```python
from shortlist import DualEncoder

encoder = DualEncoder.from_pretrained("path/to/this/folder")
vectors = encoder.encode_documents(["a text", "another"])
```
"""

_USE_BY_ID = """\
```python
from shortlist import DualEncoder

encoder = DualEncoder.from_pretrained("path/to/this/folder")
queries = encoder.encode_queries(["a text", "another"])
documents = encoder.encode_documents({"id of a document": "its text"})
```

sentence-transformers and transformers cannot open this folder: they have no document vectors. What they open is the
text encoder alone, in `text/`.
"""
_SIDES = {
    "vectors": "a text encoder for queries; a vector and a bias for each of {} documents, no text",
    "text_and_vectors": "encoded text on both sides, and a vector added for each of {} documents",
}


def model_card(
    encoder: DualEncoder,
    *,
    data: str | Mapping[str, Any] | None = None,
    loss: str | None = None,
    measures: Mapping[str, Mapping[str, float]] | None = None,
    config: str | None = None,
    notes: str | None = None,
) -> str:
    """Markdown with base model, data, loss, prompts, lengths, measures, config and versions; the licence is left open.

    Args:
        encoder: the model described.
        data: what it was trained on, a sentence or name → count.
        loss: name of the training loss.
        measures: data set and split (with its version) → {measure: value}.
        config: the resolved configuration as YAML.
        notes: anything else, Markdown.
    """
    settings = encoder.settings()
    facts = {
        "base model": encoder.base_model or "not recorded",
        "towers": _SIDES[encoder.document_side].format(f"{settings['documents']:,}")
        if encoder.document_tower.by_row
        else ("one for both sides" if encoder.shared else "one for queries, one for documents"),
        "parameters": f"{sum(parameter.numel() for parameter in encoder.parameters()):,}",
        "vector": f"{encoder.dim} numbers, compared by {encoder.similarity}",
        "pooling": settings["pooling"],
        "query prompt": repr(encoder.prompts["query"]),
        "document prompt": repr(encoder.prompts["document"]),
        "longest query": _tokens(encoder.query_max_length),
        "longest document": _tokens(encoder.doc_max_length),
        "document template": repr(encoder.template),
        "fingerprint": encoder.fingerprint,
    }
    if loss:
        facts["loss"] = loss
    tags = "retrieval, dual-encoder" + ("" if encoder.document_tower.by_row else ", sentence-transformers")
    lines = ["---", "library_name: shortlist", f"tags: [{tags}]", "---", ""]
    lines += ["# Dual encoder", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "## Use", "", _USE_BY_ID if encoder.document_tower.by_row else _USE]
    if data:
        rows = [f"- {name}: {count}" for name, count in data.items()] if isinstance(data, Mapping) else [data]
        lines += ["## Training data", "", *rows, ""]
    if measures:
        lines += ["## Measures", "", "| data | measure | value |", "|---|---|---|"]
        lines += [
            f"| {name} | {measure} | {value:.4f} |"
            for name, values in measures.items()
            for measure, value in values.items()
        ]
        lines.append("")
    if notes:
        lines += ["## Notes", "", notes, ""]
    if config:
        lines += ["## Configuration", "", "```yaml", config.strip(), "```", ""]
    lines += ["## Versions", "", ", ".join(f"{name} {version}" for name, version in library_versions().items()), ""]
    lines += ["## Licence", "", "To be filled in by whoever publishes this model.", ""]
    return "\n".join(lines)


def _tokens(length: int | None) -> str:
    return "no limit" if length is None else f"{length} tokens"

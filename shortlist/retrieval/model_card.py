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
        "towers": "one for both sides" if encoder.shared else "one for queries, one for documents",
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
    lines = ["---", "library_name: shortlist", "tags: [retrieval, dual-encoder, sentence-transformers]", "---", ""]
    lines += ["# Dual encoder", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "## Use", "", _USE]
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

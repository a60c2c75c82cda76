"""Writing dual encoders so that this package, AutoModel and sentence-transformers open the same folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from shortlist.files import atomic_directory, write_json
from shortlist.manifest import library_versions
from shortlist.retrieval.checkpoints import FORMAT_VERSION, HEAD_FILE, SETTINGS_FILE, TEXT_FOLDER, VECTORS_FOLDER
from shortlist.retrieval.document_vectors import DocumentVectors, TextAndVectors, TextTower, save_document_vectors
from shortlist.retrieval.model_card import model_card
from shortlist.retrieval.static import StaticTower
from shortlist.retrieval.transformer import Projection, TransformerTower

if TYPE_CHECKING:
    import os

    from shortlist.retrieval.dual_encoder import DualEncoder

logger = logging.getLogger(__name__)

_MODULES = "sentence_transformers.models."
# Encoders of texts alone are what they were in version 1.
_TEXT_FORMAT_VERSION = 1


def save_encoder(encoder: DualEncoder, path: str | os.PathLike[str], *, overwrite: bool = False, **facts: Any) -> Path:
    """Write `encoder` to the folder `path`; see `DualEncoder.save_pretrained`."""
    with atomic_directory(path, overwrite=overwrite) as folder:
        if isinstance(encoder.document_tower, DocumentVectors | TextAndVectors):
            # No modules.json here: whoever knows no document vectors must not open half of the model for the whole.
            (folder / TEXT_FOLDER).mkdir()
            _save_text(encoder.text_encoder(), folder / TEXT_FOLDER)
            save_document_vectors(encoder.document_tower, folder / VECTORS_FOLDER)
            write_json(folder / SETTINGS_FILE, _settings_with_vectors(encoder))
        else:
            _save_text(encoder, folder)
        (folder / "README.md").write_text(model_card(encoder, **facts), encoding="utf-8")
    return Path(path)


def _save_text(encoder: DualEncoder, folder: Path) -> None:
    """Write an encoder of texts alone, as others open it too."""
    query, document = encoder.text_towers()[0], encoder.text_towers()[-1]
    if query is document:
        chain = _save_tower(encoder, query, folder)
        write_json(folder / "modules.json", _modules_json(chain))
    else:
        _save_router(encoder, query, document, folder)
    write_json(folder / SETTINGS_FILE, _settings(encoder, query, shared=query is document))
    write_json(folder / "config_sentence_transformers.json", _sentence_transformers_config(encoder))


def _settings_with_vectors(encoder: DualEncoder) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "kind": "dual_encoder",
        "document_side": encoder.document_side,
        **({} if encoder.temperature is None else {"temperature": encoder.temperature}),
        "similarity": encoder.similarity,
        "versions": library_versions(),
    }


def _settings(encoder: DualEncoder, tower: TextTower, *, shared: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"format_version": _TEXT_FORMAT_VERSION, "kind": "dual_encoder", "shared": shared}
    if shared:
        of_tower = tower.settings()
        settings["tower"] = of_tower.pop("kind")
        # Only a real truncation is recorded: a number equal to the full dimension says nothing.
        of_tower["dim"] = tower.dim if tower.dim != tower.full_dim else None
        settings.update(of_tower)
        if isinstance(tower, TransformerTower):
            settings["pad_token"] = tower.tokenizer.pad_token
    return {
        **settings,
        "prompts": dict(encoder.prompts),
        "query_max_length": encoder.query_max_length,
        "doc_max_length": encoder.doc_max_length,
        "template": encoder.template,
        "similarity": encoder.similarity,
        **({} if encoder.temperature is None else {"temperature": encoder.temperature}),
        "base_model": encoder.base_model,
        "versions": library_versions(),
    }


def _sentence_transformers_config(encoder: DualEncoder) -> dict[str, Any]:
    return {
        "model_type": "SentenceTransformer",
        "prompts": dict(encoder.prompts),
        "default_prompt_name": None,
        "similarity_fn_name": encoder.similarity,
    }


def _modules_json(chain: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"idx": number, "name": str(number), "path": path, "type": _MODULES + name}
        for number, (name, path) in enumerate(chain)
    ]


def _save_router(encoder: DualEncoder, query: TextTower, document: TextTower, folder: Path) -> None:
    """Two towers: a whole model in query/ and in document/, and a Router over both at the top."""
    types, structure = {}, {}
    for side, tower in (("query", query), ("document", document)):
        inner = folder / side
        inner.mkdir()
        chain = _save_tower(encoder, tower, inner)
        write_json(inner / "modules.json", _modules_json(chain))
        write_json(inner / SETTINGS_FILE, _settings(encoder, tower, shared=True))
        write_json(inner / "config_sentence_transformers.json", _sentence_transformers_config(encoder))
        names = [(name, f"{side}/{path}" if path else side) for name, path in chain]
        types.update({path: _MODULES + name for name, path in names})
        structure[side] = [path for _, path in names]
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    write_json(folder / "modules.json", _modules_json([("Router", "")]))


def _save_tower(encoder: DualEncoder, tower: TextTower, folder: Path) -> list[tuple[str, str]]:
    """Write the weights and module configs of one tower; returns its sentence-transformers modules."""
    if isinstance(tower, StaticTower):
        save_file({"embedding.weight": tower.embedding.weight.detach().float().cpu().contiguous()},
                  folder / "model.safetensors")  # fmt: skip
        _truncating(tower.tokenizer, encoder).save(str(folder / "tokenizer.json"))
        chain, dense = [("StaticEmbedding", "")], []
    else:
        _save_transformer(encoder, tower, folder)
        chain, dense = [("Transformer", ""), ("Pooling", "1_Pooling")], tower.dense()
    if tower.dim != tower.full_dim:
        # sentence-transformers truncates after its Normalize; a projection that cuts comes before it.
        dense.append(_cutting(tower.full_dim, tower.dim))
    for projection in dense:
        name = f"{len(chain)}_Dense"
        _save_dense(projection, folder / name)
        chain.append(("Dense", name))
    if tower.normalise:
        name = f"{len(chain)}_Normalize"
        (folder / name).mkdir()
        write_json(folder / name / "config.json", {"module_input_name": "sentence_embedding"})
        chain.append(("Normalize", name))
    return chain


def _truncating(tokenizer: Tokenizer, encoder: DualEncoder) -> Tokenizer:
    """A copy that cuts texts at the encoder's longer length: other readers know no length of a static model."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    if encoder.query_max_length and encoder.doc_max_length:
        copy.enable_truncation(max(encoder.query_max_length, encoder.doc_max_length))
    return copy


def _save_transformer(encoder: DualEncoder, tower: TransformerTower, folder: Path) -> None:
    from shortlist.retrieval.backbone import quiet

    with quiet():
        tower.backbone.save_pretrained(folder)  # type: ignore[operator]
    tower.tokenizer.save_pretrained(folder)
    lengths = (encoder.query_max_length, encoder.doc_max_length)
    # One length serves both sides there; the longer loses nothing.
    longest = None if None in lengths else max(length for length in lengths if length is not None)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": tower.lower_case})
    pooling = {"mean": "mean", "cls": "cls", "last": "lasttoken"}[tower.pooling]
    (folder / "1_Pooling").mkdir()
    flags = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    write_json(
        folder / "1_Pooling" / "config.json",
        {
            # The old form, which every release reads.
            "word_embedding_dimension": _width(tower),
            **{f"pooling_mode_{flag}": mode == pooling for mode, flag in flags.items()},
            "include_prompt": True,
        },
    )
    if tower.projections:
        tensors = {
            f"projections.{number}.{name}": tensor.detach().float().cpu().contiguous()
            for number, projection in enumerate(tower.dense())
            for name, tensor in projection.state_dict().items()
        }
        save_file(tensors, folder / HEAD_FILE)


def _width(tower: TransformerTower) -> int:
    return tower.dense()[0].linear.in_features if tower.projections else tower.full_dim


def _cutting(full: int, dim: int) -> Projection:
    projection = Projection(full, dim, bias=False)
    with torch.no_grad():
        projection.linear.weight.copy_(torch.eye(full)[:dim])
    return projection


def _save_dense(projection: Any, folder: Path) -> None:
    folder.mkdir()
    settings = projection.settings()
    activation = type(projection.activation)
    settings["activation_function"] = f"{activation.__module__}.{activation.__qualname__}"
    del settings["activation"]
    write_json(folder / "config.json", settings)
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in projection.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")

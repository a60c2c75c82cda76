"""Opening dual encoders: our folders, sentence-transformers checkpoints, plain Hugging Face ones, adapters."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.retrieval.device import DTYPES
from shortlist.retrieval.document_vectors import TextTower, read_document_vectors
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DEFAULT_TEMPLATE, DualEncoder
from shortlist.retrieval.static import StaticTower, dequantise
from shortlist.retrieval.transformer import ACTIVATIONS, Projection, TransformerTower

if TYPE_CHECKING:
    import os

# Models with document vectors are of version 2: older releases would take them for their text encoder.
FORMAT_VERSION = 2
SETTINGS_FILE = "shortlist.json"
HEAD_FILE = "head.safetensors"
# Of a model with document vectors: the text encoder, a model by itself, and the vectors with their ids.
TEXT_FOLDER = "text"
VECTORS_FOLDER = "document_vectors"
# What a checkpoint without any limit of its own gets.
DEFAULT_MAX_LENGTH = 512


@dataclass
class Plan:
    """What a folder says about one tower, before any weight is read."""

    folder: Path
    kind: str = "transformer"
    pooling: str | None = None
    normalise: bool = True
    dim: int | None = None
    lower_case: bool = False
    max_length: int | None = None
    projections: list[dict[str, Any]] = field(default_factory=list)
    # Where the weights of each projection are: (file, prefix of its tensors).
    projection_files: list[tuple[Path, str]] = field(default_factory=list)


def load_encoder(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: str,
    pooling: str | None,
    normalise: bool | None,
    query_max_length: int | None,
    doc_max_length: int | None,
    prompts: Mapping[str, str] | None,
    dim: int | None,
    projection_dim: int | None,
    template: str | None,
    shared: bool | None,
) -> DualEncoder:
    """Open `path_or_name`; see `DualEncoder.from_pretrained`."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is unknown; expected auto, {', '.join(DTYPES)}.")
    folder = find_folder(path_or_name)
    settings = read_settings(folder)
    if settings.get("document_side") is not None:
        text = load_encoder(
            folder / TEXT_FOLDER, dtype=dtype, pooling=pooling, normalise=normalise, query_max_length=query_max_length,
            doc_max_length=doc_max_length, prompts=prompts, dim=dim, projection_dim=projection_dim, template=template,
            shared=shared,
        )  # fmt: skip
        return _with_vectors(text, folder, settings)
    plans = _plans(folder, settings)
    for plan in plans:
        plan.pooling = pooling or plan.pooling
        plan.normalise = plan.normalise if normalise is None else normalise
        plan.dim = dim or plan.dim
    weights_dtype = DTYPES.get(dtype, torch.float32)
    towers = [load_tower(plan, weights_dtype, projection_dim) for plan in plans]
    for tower in towers:
        if not 1 <= tower.dim <= tower.full_dim:
            raise ConfigError(f"dim is {tower.dim}; expected 1 to {tower.full_dim}, the dimension of {path_or_name}.")
    if shared is False and len(towers) == 1:
        towers.append(copy.deepcopy(towers[0]))
    if shared is True and len(towers) == 2:
        raise ConfigError(f"{path_or_name} holds two towers; shared: true would drop one of them.")
    limits = {"query": plans[0].max_length, "document": plans[-1].max_length}
    encoder = DualEncoder(
        *towers,
        prompts={**(settings.get("prompts") or {}), **(prompts or {})},
        query_max_length=query_max_length or settings.get("query_max_length", limits["query"]),
        doc_max_length=doc_max_length or settings.get("doc_max_length", limits["document"]),
        template=template or settings.get("template") or DEFAULT_TEMPLATE,
        dtype=dtype,
        base_model=settings.get("base_model") or str(path_or_name),
    )
    encoder.source, encoder.temperature = str(folder), settings.get("temperature")
    return encoder


def _with_vectors(text: DualEncoder, folder: Path, settings: Mapping[str, Any]) -> DualEncoder:
    """The model in `folder`, whose text encoder is `text`."""
    side = settings["document_side"]
    if side not in ("vectors", "text_and_vectors"):
        raise DataError(f"{folder / SETTINGS_FILE}: document_side is {side!r}; expected vectors or text_and_vectors.")
    ids, vectors, biases = read_document_vectors(folder / VECTORS_FOLDER)
    if (side == "vectors") != (biases is not None):
        raise DataError(
            f"{folder / VECTORS_FOLDER} holds {'no ' if biases is None else ''}biases, but {SETTINGS_FILE} says that "
            f"the document side is {side!r}; the files are not of one model."
        )
    encoder = text.with_document_vectors(ids, side, vectors=vectors, biases=biases)
    encoder.source, encoder.temperature = str(folder), settings.get("temperature")
    return encoder


def find_folder(path_or_name: str | os.PathLike[str]) -> Path:
    """The folder of a path, of the embedded model, or of a hub name (downloaded if it can be)."""
    path = Path(path_or_name)
    if path.is_dir():
        return path
    if path.exists():
        raise DataError(f"{path} is a file; a model is a folder with config.json or {SETTINGS_FILE}.")
    if str(path_or_name) == DEFAULT_MODEL:
        asset = Path(str(resources.files("shortlist"))) / "assets" / "static-en"
        if not (asset / "model.safetensors").exists():
            raise MissingInputError(
                f"the embedded model {DEFAULT_MODEL} is missing from this installation (expected at {asset}); "
                "reinstall the package, or name another model."
            )
        return asset
    from shortlist.retrieval.hub import download

    return download(str(path_or_name))


_SETTINGS: dict[str, tuple[Any, str]] = {
    "prompts": (dict, 'an object, {"query": …, "document": …}'),
    "query_max_length": (int, "a number of tokens"),
    "doc_max_length": (int, "a number of tokens"),
    "dim": (int, "a number of dimensions"),
    "projections": (list, "a list of dense layers"),
    "template": (str, 'a text such as "{title} {text}"'),
    "temperature": (int | float, "a number above 0"),
    "document_side": (str, "vectors or text_and_vectors"),
}


def read_settings(folder: Path) -> dict[str, Any]:
    """`shortlist.json`, or what the sentence-transformers files say in its place; {} where there is neither."""
    ours = folder / SETTINGS_FILE
    if ours.exists():
        settings = read_json(ours)
        version = settings.get("format_version", 1)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise DataError(
                f"{ours}: format version {version}, but this release reads up to {FORMAT_VERSION}; "
                "install a newer shortlist to open this model."
            )
        if settings.get("kind", "dual_encoder") not in ("dual_encoder", "static"):
            raise DataError(f"{ours}: this is a {settings['kind']!r} model; expected a dual encoder.")
        for key, (kind, expected) in _SETTINGS.items():
            value = settings.get(key)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise DataError(f"{ours}: {key} is {value!r:.60}; expected {expected}.")
        return settings
    theirs = folder / "config_sentence_transformers.json"
    if not theirs.exists():
        return {}
    config = read_json(theirs)
    named = config.get("prompts") or {}
    default = named.get(config.get("default_prompt_name") or "", "")
    document = next((named[name] for name in ("document", "passage", "corpus") if name in named), default)
    settings = {"prompts": {"query": named.get("query", default), "document": document}}
    if config.get("similarity_fn_name"):
        settings["similarity"] = config["similarity_fn_name"]
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; DataError names the file and the line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingInputError(f"{path} is missing.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def _plans(folder: Path, settings: dict[str, Any]) -> list[Plan]:
    """One plan a tower."""
    if settings.get("shared") is False:
        sides = [folder / "query", folder / "document"]
        for side in sides:
            if not side.is_dir():
                raise DataError(f"{folder} says that it has two towers, but {side} is missing; copy the whole folder.")
        return [_plans(side, read_settings(side))[0] for side in sides]
    if (folder / SETTINGS_FILE).exists():
        return [_own_plan(folder, settings)]
    if (folder / "modules.json").exists():
        chains = _chains(folder)
        return [_chain_plan(folder, chain, settings) for chain in chains]
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        # A plain adapter: how to pool is what its base model says.
        base = find_folder(adapter_base(folder))
        plan = _plans(base, read_settings(base))[0]
        plan.folder = folder
        return [plan]
    if (folder / "config.json").exists():
        return [Plan(folder)]
    if (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists():
        return [Plan(folder, kind="static")]
    raise DataError(
        f"{folder} is not a model: expected {SETTINGS_FILE}, modules.json (sentence-transformers), config.json "
        "(Hugging Face) or adapter_config.json in it."
    )


def adapter_base(folder: Path) -> str:
    """The name or path of the base model that an adapter folder was trained on."""
    name = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not name:
        raise DataError(f"{folder / 'adapter_config.json'} names no base model (base_model_name_or_path); add it.")
    return str(name)


def _own_plan(folder: Path, settings: dict[str, Any]) -> Plan:
    static = settings.get("kind") == "static" or settings.get("tower") == "static"
    projections = settings.get("projections") or []
    return Plan(
        folder,
        kind="static" if static else "transformer",
        pooling=settings.get("pooling"),
        normalise=settings.get("normalise", True),
        dim=settings.get("dim"),
        lower_case=settings.get("lower_case", False),
        max_length=None,
        projections=projections,
        projection_files=[(folder / HEAD_FILE, f"projections.{number}.") for number in range(len(projections))],
    )


def _chains(folder: Path) -> list[list[tuple[str, Path]]]:
    """The modules of a sentence-transformers checkpoint as (class name, folder): one chain, or two behind a Router."""
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    chain = [(module["type"].rsplit(".", 1)[-1], folder / module["path"]) for module in modules]
    if chain[0][0] not in ("Router", "Asym"):
        return [chain]
    router = read_json(chain[0][1] / "router_config.json")
    chains = []
    for side in ("query", "document"):
        if side not in router["structure"]:
            raise DataError(f"{folder}: its Router has no {side!r} route (it has {', '.join(router['structure'])}).")
        route = [(router["types"][name].rsplit(".", 1)[-1], chain[0][1] / name) for name in router["structure"][side]]
        chains.append(route + chain[1:])
    return chains


def _chain_plan(folder: Path, chain: list[tuple[str, Path]], settings: dict[str, Any]) -> Plan:
    """Read the module configs of one sentence-transformers chain."""
    names = [name for name, _ in chain]
    plan = Plan(chain[0][1])
    # Without a similarity of its own a checkpoint is compared by cosine there.
    plan.normalise = settings.get("similarity", "cosine") != "dot"
    if names[0] == "StaticEmbedding":
        plan.kind = "static"
    elif names[0] == "Transformer":
        _read_transformer_config(plan)
    for name, path in chain[1:]:
        if name == "Pooling" and plan.kind == "transformer":
            plan.pooling = _pooling(path / "config.json", settings)
        elif name == "Dense" and "Normalize" not in names[: chain.index((name, path))]:
            plan.projections.append(_dense(path / "config.json"))
            plan.projection_files.append((path / "model.safetensors", ""))
        elif name == "Normalize":
            plan.normalise = True
        elif name != "Dropout":
            break
    else:
        if names[0] in ("StaticEmbedding", "Transformer"):
            return plan
    raise DataError(
        f"{folder / 'modules.json'}: the modules {' + '.join(names)} are not supported; expected Transformer + "
        "Pooling [+ Dense] [+ Normalize], or StaticEmbedding [+ Dense] [+ Normalize]."
    )


def _read_transformer_config(plan: Plan) -> None:
    for file in sorted(plan.folder.glob("sentence_*_config.json")):
        config = read_json(file)
        plan.max_length = config.get("max_seq_length")
        plan.lower_case = bool(config.get("do_lower_case"))


def _pooling(path: Path, settings: dict[str, Any]) -> str:
    """Our name for a sentence-transformers pooling config, of the old form or the new."""
    config = read_json(path)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True]
    modes = [modes] if isinstance(modes, str) else list(modes)
    known = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last"}
    modes = [mode for mode in modes if mode != "include_prompt"] or ["mean"]
    if len(modes) != 1 or modes[0] not in known:
        raise DataError(f"{path}: pooling {' + '.join(modes)} is not supported; expected mean, cls or lasttoken.")
    if config.get("include_prompt") is False and any(settings.get("prompts", {}).values()):
        raise DataError(f"{path}: pooling without the tokens of the prompt is not supported.")
    return known[modes[0]]


def _dense(path: Path) -> dict[str, Any]:
    config = read_json(path)
    wanted = config.get("activation_function", "torch.nn.modules.activation.Tanh").rsplit(".", 1)[-1]
    activation = next((name for name, cls in ACTIVATIONS.items() if cls.__name__ == wanted), None)
    if activation is None or config.get("use_residual"):
        what = "a residual connection" if activation else f"the activation {wanted}"
        raise DataError(f"{path}: a Dense module with {what} is not supported.")
    return {
        "in_features": config["in_features"],
        "out_features": config["out_features"],
        "bias": config.get("bias", True),
        "activation": activation,
    }


def load_tower(plan: Plan, dtype: torch.dtype, projection_dim: int | None) -> TextTower:
    """Read the weights of one tower; DataError names tensors that are missing or left over."""
    if plan.kind == "static":
        if plan.projections:
            raise DataError(f"{plan.folder}: a static model with a dense layer is not supported.")
        return _load_static(plan)
    # Not at the top: transformers takes seconds to import, and a static model does without.
    from shortlist.retrieval.backbone import load_adapter, load_backbone, load_tokenizer

    if (plan.folder / "adapter_config.json").exists():
        base = find_folder(adapter_base(plan.folder))
        backbone = load_adapter(load_backbone(base, dtype), plan.folder)
        has_tokenizer = (plan.folder / "tokenizer_config.json").exists()
        tokenizer = load_tokenizer(plan.folder if has_tokenizer else base)
    else:
        backbone, tokenizer = load_backbone(plan.folder, dtype), load_tokenizer(plan.folder)
    projections = [Projection(**settings) for settings in plan.projections]
    _fill(projections, plan.projection_files)
    causal = any("CausalLM" in name for name in getattr(backbone.config, "architectures", None) or [])
    tower = TransformerTower(
        backbone, tokenizer, pooling=plan.pooling or ("last" if causal else "mean"), projections=projections,
        normalise=plan.normalise, lower_case=plan.lower_case,
    )  # fmt: skip
    if projection_dim is not None:
        tower.projections.append(Projection(tower.full_dim, projection_dim))
        tower.full_dim = tower.dim = projection_dim
    tower.dim = plan.dim or tower.full_dim
    if plan.max_length is None:
        plan.max_length = _length_limit(tower)
    return tower


def _length_limit(tower: TransformerTower) -> int:
    """Tokens that model and tokenizer take, at most the default: a decoder's own limit can be 131,072."""
    limits = [tower.longest, getattr(tower.tokenizer, "model_max_length", None)]
    return min([DEFAULT_MAX_LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _fill(projections: list[Projection], files: list[tuple[Path, str]]) -> None:
    """Read the weights of `projections`; every tensor of every file must find its place."""
    for file in dict.fromkeys(file for file, _ in files):
        inside = {prefix: p for p, (where, prefix) in zip(projections, files, strict=True) if where == file}
        found = read_tensors(file)
        account(file, {prefix + name: t for prefix, p in inside.items() for name, t in p.state_dict().items()}, found)
        for prefix, projection in inside.items():
            own = {name.removeprefix(prefix): t.float() for name, t in found.items() if name.startswith(prefix)}
            projection.load_state_dict(own)


def account(file: Path, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise DataError unless `found` has exactly the names and shapes of `expected`."""
    missing, left_over = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or left_over:
        parts = [
            f"{what} {', '.join(names[:3])}" for what, names in (("missing:", missing), ("unused:", left_over)) if names
        ]
        raise DataError(f"{file}: the tensors do not fit the model ({'; '.join(parts)}).")
    for name, tensor in expected.items():
        if tuple(tensor.shape) != tuple(found[name].shape):
            raise DataError(
                f"{file}: tensor {name} has the shape {tuple(found[name].shape)}; expected {tuple(tensor.shape)}."
            )


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; a sentence where it is missing, broken, or only a pickle is there."""
    if not file.exists():
        pickle = file.with_name("pytorch_model.bin")
        hint = f"; {pickle.name} is there, but pickle is never opened: save the model as safetensors"
        hint = hint if pickle.exists() else ""
        raise MissingInputError(f"{file} is missing{hint}.")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DataError(f"{file} is not a whole safetensors file ({error}); copy or download it again.") from None


def _load_static(plan: Plan) -> StaticTower:
    file = plan.folder / "model.safetensors"
    tensors = read_tensors(file)
    if set(tensors) == {"embedding", "scale"}:
        embedding = torch.from_numpy(dequantise(tensors["embedding"].numpy(), tensors["scale"].float().numpy()))
    elif set(tensors) == {"embedding.weight"}:
        embedding = tensors["embedding.weight"].float()
    else:
        raise DataError(
            f"{file}: a static model holds 'embedding.weight', or 'embedding' (int8) with 'scale'; "
            f"found {', '.join(sorted(tensors)[:5])}."
        )
    try:
        tokenizer = Tokenizer.from_file(str(plan.folder / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise DataError(f"{plan.folder / 'tokenizer.json'} cannot be read ({error}).") from None
    if tokenizer.get_vocab_size() > len(embedding):
        raise DataError(
            f"{plan.folder}: the tokenizer knows {tokenizer.get_vocab_size()} tokens, but there are "
            f"{len(embedding)} vectors; the two files are not of one model."
        )
    if tokenizer.truncation:
        plan.max_length = tokenizer.truncation["max_length"]
    return StaticTower(tokenizer, embedding, normalise=plan.normalise, dim=plan.dim)

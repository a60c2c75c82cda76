"""Hugging Face backbones and adapters from a local folder, every tensor accounted for."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer

from shortlist.errors import DataError

# The heads of pre-training and classification, which an encoder has no use for.
_HEADS = (
    "lm_head", "cls", "classifier", "score", "head", "decoder", "vocab_transform", "vocab_layer_norm",
    "vocab_projector", "generator_lm_head", "generator_predictions", "discriminator_predictions", "qa_outputs",
    "pre_classifier", "pooler",
)  # fmt: skip


def load_backbone(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The encoder (or decoder without its head) in `folder`, on the CPU, in `dtype`; never from the network.

    Raises:
        DataError: weights are missing, left over (heads excepted), of another shape, or only pickled.
    """
    if not (folder / "config.json").exists():
        raise DataError(f"{folder / 'config.json'} is missing; a backbone is a Hugging Face folder.")
    if not list(folder.glob("*.safetensors")):
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
        hint = f" ({found} is there, but pickle is never opened: save the model as safetensors)" if found else ""
        raise DataError(f"{folder} has no *.safetensors weights{hint}.")
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            # Of an encoder-decoder only the encoder makes vectors.
            auto = AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel
            model, report = auto.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise DataError(f"the model in {folder} cannot be opened: {error}") from error
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
    left_over = sorted(name for name in report["unexpected_keys"] if name.split(".")[0] not in _HEADS)
    wrong = sorted(str(name) for name in report["mismatched_keys"])
    for problem, names in (("missing", missing), ("left over", left_over), ("of another shape", wrong)):
        if names:
            raise DataError(
                f"the weights in {folder} do not fit {type(model).__name__}: {len(names)} tensors are {problem}, "
                f"such as {', '.join(names[:3])}; the checkpoint is incomplete or of another architecture."
            )
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        if any(name.startswith("pooler.") for name in report["missing_keys"]):
            # Random numbers that nothing reads would make every load a different model.
            model.pooler = None
        else:
            pooler.requires_grad_(False)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`; never from the network."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the libraries beneath raise anything, bare Exception included
        raise DataError(f"the tokenizer in {folder} cannot be opened: {error}") from error
    # Without its vocabulary file transformers makes an empty tokenizer, to which every word is unknown.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise DataError(
            f"the tokenizer in {folder} knows only its {len(tokenizer)} special tokens: its vocabulary (tokenizer.json "
            "or vocab.txt) is missing; copy the whole folder."
        )
    return tokenizer


def load_adapter(backbone: nn.Module, folder: Path) -> nn.Module:
    """Put the peft adapter in `folder` on `backbone`, trainable; DataError if a tensor does not find its place."""
    from peft import PeftModel
    from safetensors.torch import load_file

    try:
        with warnings.catch_warnings():
            # What it warns of, missing tensors, is an error below.
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(backbone, str(folder), is_trainable=True, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"the adapter in {folder} cannot be opened: {error}") from error
    from peft import get_peft_model_state_dict

    file = folder / "adapter_model.safetensors"
    if not file.exists():
        raise DataError(f"{file} is missing; an adapter without safetensors weights is not opened.")
    saved, loaded = load_file(file), get_peft_model_state_dict(model)
    lost = sorted(set(saved) ^ set(loaded))
    if lost:
        raise DataError(
            f"the adapter in {folder} does not fit its base model: {', '.join(lost[:3])} has no counterpart."
        )
    return model.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back the bars and load reports of transformers: what is wrong is raised here as an error."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()

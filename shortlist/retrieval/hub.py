"""The Hugging Face hub: fetch a named model, upload one. The only network access of the encoders."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.errors import MissingInputError, ShortlistError

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder

_WANTED = ["*.json", "*.txt", "*.model", "*.safetensors", "*.tiktoken", "*.jinja"]


def download(name: str) -> Path:
    """The local folder of hub model `name`, from the cache or the network; MissingInputError if it is in neither."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:  # every kind of network and name error ends in the same sentence
        raise MissingInputError(
            f"no folder {name!r} here, and it could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}); give the path of a model folder, or connect to the network "
            "(and unset HF_HUB_OFFLINE) once to fill the cache."
        ) from error


def push(encoder: DualEncoder, repository: str, *, private: bool = True, **facts: Any) -> str:
    """Save `encoder` to a temporary folder and upload it; returns the address of the commit."""
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as temporary:
        folder = encoder.save_pretrained(Path(temporary) / "model", **facts)
        try:
            api = HfApi()
            api.create_repo(repository, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repository, folder_path=folder))
        except Exception as error:  # as above
            raise ShortlistError(
                f"could not upload to {repository!r} on the Hugging Face hub ({type(error).__name__}: {error}); "
                "check the network, HF_HUB_OFFLINE and your login. Nothing local was changed."
            ) from error

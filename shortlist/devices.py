"""Which torch device a name means on this machine; one rule for encoders and indexes."""

from __future__ import annotations

import torch

from shortlist.errors import ConfigError


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device for `device`; "auto" is the first GPU if there is one, else Apple's, else the CPU.

    Raises ConfigError for a name that torch does not know or a device that cannot hold a number here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {device!r} is unknown; expected auto, cpu, cuda, cuda:N or mps.") from None
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices.")
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used here ({reason}); pass cpu or auto.") from None
    return wanted

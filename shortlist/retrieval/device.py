"""Which numerical type "auto" means on a device."""

from __future__ import annotations

import torch

from shortlist.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch type for `dtype`; "auto" is bfloat16 where `device` computes it in hardware, else float32."""
    if dtype == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; expected auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 matrices in hardware: emulation is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    # Present in some releases of torch and absent in others.
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_arm_bf16_supported")
    return any(bool(getattr(torch.cpu, probe)()) for probe in probes if hasattr(torch.cpu, probe))

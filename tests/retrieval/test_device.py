"""What "auto" means: half precision only where the hardware computes it; a static model opens without transformers."""

import subprocess
import sys

import pytest
import torch

from shortlist.devices import resolve_device
from shortlist.errors import ConfigError
from shortlist.retrieval.device import has_fast_bfloat16, resolve_dtype

CPU = torch.device("cpu")


def test_bfloat16_on_a_cpu_only_with_instructions_for_it(monkeypatch):
    for probe in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False, raising=False)
    assert not has_fast_bfloat16(CPU) and resolve_dtype("auto", CPU) == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    assert resolve_dtype("float32", CPU) == torch.float32


def test_emulated_bfloat16_of_a_gpu_does_not_count(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert resolve_dtype("auto", torch.device("cuda")) == torch.float32


def test_a_device_that_is_not_there_is_refused():
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"torch sees {count} CUDA devices"):
        resolve_device(f"cuda:{count + 3}")
    assert resolve_device("cpu") == CPU


def test_a_static_model_opens_without_transformers(static_folder):
    script = (
        "import sys; from shortlist import DualEncoder; e = DualEncoder.from_pretrained(sys.argv[1]);"
        "e.encode_queries('cat'); e.fingerprint; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(static_folder)]).returncode == 0

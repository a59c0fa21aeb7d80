"""Memory of a conversion at the shapes of a model of 8 billion parameters: a piece of a tensor, not a layer."""

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
}
MEASURED = """
import sys
from pathlib import Path
import transformers.models.llama.modeling_llama
from nsa_transformers.conversion import ConversionOptions, plan_conversion, write_converted

def memory_kib(name):
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

before = memory_kib("VmRSS")
write_converted(plan_conversion(Path(sys.argv[1]), ConversionOptions()), Path(sys.argv[2]))
print(memory_kib("VmHWM") - before)
"""
"""Prints KiB: the peak above what the process held after its imports. getrusage would count the peak of the process that started it."""


def shards():
    """Yield the tensors of each file, drawn one file at a time."""
    hidden, width, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 1024
    layer = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    names = {f"self_attn.{name}": shape for name, shape in layer.items()} | {f"mlp.{name}": shape for name, shape in mlp.items()}
    norms = {name: torch.ones(hidden, dtype=torch.bfloat16) for name in ("input_layernorm", "post_attention_layernorm")}
    for name in ("model.embed_tokens", "lm_head"):
        yield {f"{name}.weight": drawn(CONFIG["vocab_size"], hidden)}
    yield {f"model.layers.0.{name}.weight": drawn(*shape) for name, shape in names.items()} | {
        **{f"model.layers.0.{name}.weight": norm for name, norm in norms.items()},
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }


def drawn(rows, columns):
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=0.02)


@pytest.mark.slow
def test_the_peak_is_below_the_largest_tensor(tmp_path):
    source = tmp_path / "dense"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for place, tensors in enumerate(shards()):
        name = f"model-{place}.safetensors"
        safetensors.torch.save_file(tensors, source / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "converted")]
    peak_mb = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024 / 1e6
    largest_mb = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 2 / 1e6
    # 1.5 times the largest tensor and 500 MB are promised
    assert peak_mb < largest_mb

"""Names of weights are part of the format: files written today are read tomorrow, and by others."""

import re
from pathlib import Path

import pytest

from nsa_train.model.decoder import build_model
from nsa_train.settings.recipe import load_config

OF_BOTH = """embedding.weight norm.weight blocks.0.attention_norm.weight blocks.0.mlp_norm.weight
blocks.0.attention.q_proj.weight blocks.0.attention.o_proj.weight
blocks.0.mlp.gate.weight blocks.0.mlp.up.weight blocks.0.mlp.down.weight"""
OF = {
    "dense": "blocks.0.attention.k_proj.weight blocks.0.attention.v_proj.weight",
    "nsa": """blocks.0.attention.k_proj.cmp.weight blocks.0.attention.k_proj.slc.weight blocks.0.attention.k_proj.win.weight
blocks.0.attention.v_proj.cmp.weight blocks.0.attention.v_proj.slc.weight blocks.0.attention.v_proj.win.weight
blocks.0.attention.gate.up.weight blocks.0.attention.gate.up.bias blocks.0.attention.gate.down.weight
blocks.0.attention.gate.down.bias blocks.0.attention.compress_k.position blocks.0.attention.compress_k.up.weight
blocks.0.attention.compress_k.up.bias blocks.0.attention.compress_k.down.weight blocks.0.attention.compress_k.down.bias
blocks.0.attention.compress_v.position blocks.0.attention.compress_v.up.weight blocks.0.attention.compress_v.up.bias
blocks.0.attention.compress_v.down.weight blocks.0.attention.compress_v.down.bias""",
}
OF["shared"] = " ".join([OF["dense"], *(name for name in OF["nsa"].split() if "_proj" not in name)])


@pytest.mark.parametrize(
    ("kind", "override"), [("nsa", "nsa.kv=separate"), ("shared", "nsa.kv=shared"), ("dense", "model.attention=dense")]
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_keep_their_names(kind: str, override: str, recompute: str) -> None:
    config = load_config("demo", ["model.n_layers=1", override, f"train.activation_checkpointing={recompute}"])
    assert set(build_model(config).state_dict()) == set(f"{OF_BOTH} {OF[kind]}".split())


def test_the_page_of_the_format_names_every_weight() -> None:
    page = (Path(__file__).parents[4] / "docs/reference/checkpoints.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", page))
    missing = {part for name in f"{OF_BOTH} {OF['nsa']}".split() for part in name.split(".") if part not in words}
    assert missing == {"0"} - words

"""Recipes are refused with the key, the value, the rule and a value that works."""

import tomllib
from pathlib import Path

import attrs
import pytest

from nsa_core import BlockGeometry, NSAConfig
from nsa_train.errors import ConfigError
from nsa_train.settings.config import TABLES, DataTable, NSATable, RunConfig, TrainTable, structure, unstructure
from nsa_train.settings.recipe import load_config, to_toml

BAD = [
    # override, and what the message must say
    ("train.steps=0", ["train.steps=0", "an integer from 1 to ", "use 5"]),
    ("train.steps=many", ["train.steps='many'", "an integer from 1 to ", "use 5"]),
    ("train.steps=2.5", ["train.steps=2.5", "an integer from 1 to "]),
    ("train.steps=true", ["train.steps=True", "an integer from 1 to "]),
    ("train.eval_batches=0", ["train.eval_batches=0", "an integer from 1 to ", "use 2"]),
    ("train.eval_batches=1.5", ["train.eval_batches=1.5", "an integer from 1 to "]),
    ("train.eval_batch=1", ["train.eval_batch is unknown", "did you mean train.eval_batches?"]),
    ("train.lr=-1", ["train.lr=-1", "a number from 1e-12 to 100", "use 0.01"]),
    ("train.lr=inf", ["train.lr=inf", "a number from 1e-12 to 100"]),
    ("train.lr=nan", ["train.lr=nan", "a number from 1e-12 to 100"]),
    ("train.grad_clip=0", ["train.grad_clip=0", "a number from 1e-09 to"]),
    ("train.weight_decay=inf", ["train.weight_decay=inf", "0 or a number from 1e-12 to 100", "use 0.1"]),
    ("train.grad_clip=1e10", ["train.grad_clip=1", "from 1e-09 to 1,000,000,000, or inf (no limit)"]),
    ("train.weight_decay=-0.1", ["train.weight_decay=-0.1", "0 or a number from 1e-12 to 100"]),
    ("train.compile=yes", ["train.compile='yes'", "true or false", "use true"]),
    ("train.precision=bf61", ["train.precision='bf61'", "'fp32', 'bf16'", "use 'bf16'"]),
    ("train.strategy=DDP", ["train.strategy='DDP'", "use 'ddp'"]),
    ("train.activation_checkpointing=ful", ["activation_checkpointing='ful'", "use 'full'"]),
    ("train.warmup_steps=5", ["train.warmup_steps=5", "train.steps=5", "warmup_steps < steps"]),
    ("train.stepz=3", ["train.stepz is unknown", "did you mean train.steps?"]),
    ("train.dim=3", ["train.dim is unknown", "did you mean model.dim?"]),
    ("trian.steps=3", ["trian is unknown", "did you mean train?"]),
    ("model.attention=nas", ["model.attention='nas'", "'nsa', 'dense'", "use 'nsa'"]),
    ("model.n_kv_heads=3", ["model.n_kv_heads=3", "does not divide model.n_heads=2", "use 2"]),
    ("model.head_dim_qk=15", ["model.head_dim_qk=15 is odd", "use 16"]),
    ("model.dim=[32]", ["model.dim=[32]", "an integer from 1 to "]),
    ("data.source=stdlbi", ["data.source='stdlbi'", "use 'stdlib'"]),
    ("data.source=stdlib", ["data.path=", "would be ignored"]),
    ("data.path=", ["data.path=''", "--set data.path=FILE"]),
    ("data.tokenizer=bite", ["data.tokenizer='bite'", "use 'byte'"]),
    ("nsa.window_size=0", ["nsa.window_size=0", "integer >= 1"]),
    ("nsa.window_sise=8", ["nsa.window_sise is unknown", "did you mean nsa.window_size?"]),
    ("nsa.selection_block_size=5", ["nsa.selection_block_size=5", "compression_stride=2", "use"]),
    ("nsa.branches=cmp", ["nsa.branches='cmp'", "use"]),
    ("nsa.backends.cpm=sdpa", ["nsa.", "'cpm'"]),
    ("nsa.backends=sdpa", ["nsa.backends='sdpa'", "use {cmp = 'sdpa'}"]),
    ("nsa.branches=[]", ["nsa.branches=()", 'use ["cmp", "slc", "win"]']),
    ("nsa.rope_scaling={kind='yran', factor=2.0}", ["nsa.rope_scaling.kind='yran'", "use 'linear'"]),
    ("nsa.rope_scaling={kind='linear', factor=nan}", ["nsa.rope_scaling.factor=nan", "use 1.0"]),
    ("nsa.rope_scaling={kind='linear', factor=1e300}", ["nsa.rope_scaling.factor=1e+300", "more than 2,147,483,647", "factor = 2.0"]),
    (
        "nsa.rope_scaling={kind='yarn', factor=2.0, beta_slow=5e-324}",
        ["nsa.rope_scaling.beta_slow=5e-324 is less than 1e-06", "factor = 2.0"],
    ),
    (
        "nsa.rope_scaling={kind='yarn', factor=2.0, attention_factor=1e-40}",
        ["nsa.rope_scaling.attention_factor=1e-40 is less than 1e-06", "factor = 2.0"],
    ),
    ("nsa.rope_scaling={kind='yarn', factor=0}", ["nsa.rope_scaling.factor=0 is not a finite number above 0", "use 1.0"]),
    (
        "nsa.rope_scaling={kind='linear', factor=2.0, attention_factor=2.0}",
        ["nsa.rope_scaling.attention_factor=2.0", "leave it away, or use kind='yarn'"],
    ),
    (
        "nsa.rope_scaling={knd='linear', factor=2.0}",
        ["nsa.rope_scaling.knd is unknown (a scaling has kind, factor, original_max_position, ", "use {kind = 'linear', factor = 2.0}"],
    ),
    ("nsa.rope_scaling={factor=2.0}", ["nsa.rope_scaling={'factor': 2.0} has no kind; use {kind = 'linear', factor = 2.0}"]),
    ("nsa.rope_scaling={kind='linear'}", ["nsa.rope_scaling={'kind': 'linear'} has no factor; use {kind = 'linear', factor = 2.0}"]),
    ("nsa.rope_scaling=3", ["nsa.rope_scaling=3 is not a table", "use {kind = 'linear', factor = 2.0}, or leave it away"]),
]


@pytest.mark.parametrize(("override", "parts"), BAD, ids=[override for override, _ in BAD])
def test_a_bad_value_is_named_with_rule_and_mend(tiny_recipe: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(tiny_recipe), [override])
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_every_problem_is_listed_at_once(tiny_recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(tiny_recipe), ["train.steps=0", "train.lr=-1", "model.attention=nas", "modle.x=1"])
    assert [line.split("=")[0].split(" ")[0] for line in str(caught.value).splitlines()] == [
        "model.attention",
        "train.steps",
        "train.lr",
        "modle",
    ]


def test_missing_keys_and_tables_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        structure({"model": {"dim": 32}, "train": 5})
    assert str(caught.value) == "train=5 is not a table of keys; use a section [train]"
    with pytest.raises(ConfigError) as caught:
        structure({"model": {"dim": 32}})
    assert "model.n_layers is missing (it has no default); use n_layers = 4" in str(caught.value)
    assert "train is missing" in str(caught.value)


def test_the_resolved_toml_reads_back_equal(tiny_recipe: Path) -> None:
    config = load_config(
        str(tiny_recipe),
        [
            "nsa.backends.cmp=sdpa",
            "nsa.rope_scaling={kind = 'linear', factor = 2.0}",
            "nsa.branches=['cmp', 'win']",
            "train.grad_clip=inf",
            'data.path="quo\\"te\\u0007/ü.txt"',
        ],
    )
    assert structure(tomllib.loads(to_toml(config))) == config
    assert structure(unstructure(config)) == config


def test_the_defaults_of_table_nsa_are_those_of_core() -> None:
    config = NSAConfig(hidden_size=4, num_heads=1, num_kv_heads=1, head_dim_qk=2, head_dim_v=2)
    core = {**attrs.asdict(config, recurse=False), **attrs.asdict(BlockGeometry())}
    table = attrs.asdict(NSATable(), recurse=False)
    assert table == {name: core[name] for name in table}


def test_every_key_is_documented_by_the_contract() -> None:
    keys = {table: {item.name for item in attrs.fields(kind)} for table, kind in TABLES.items()}
    contract = {
        "model": "dim n_layers n_heads n_kv_heads head_dim_qk head_dim_v attention",
        "data": "source path tokenizer on_bad_record workers prefetch shuffle_seed",
        "train": "steps seq_len batch_size accumulate lr warmup_steps weight_decay grad_clip log_every eval_every save_every keep_last "
        "seed precision activation_checkpointing compile strategy deterministic",
    }
    for table, names in contract.items():
        assert set(names.split()) <= keys[table]


def test_tables_are_checked_when_built_in_code() -> None:
    with pytest.raises(ConfigError, match=r"train.lr='fast' is not a number from 1e-12 to 100; use 0.003"):
        TrainTable(steps=1, seq_len=2, batch_size=1, lr="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data.path=3 does not name a file"):
        DataTable(source="text", path=3)


def test_the_attention_layer_is_configured_by_both_tables(tiny_config) -> None:
    config: RunConfig = tiny_config("nsa.gate=softmax", "nsa.rope_theta=500")
    layer = config.nsa_config()
    assert (layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim_qk) == (32, 2, 1, 16)
    assert (layer.gate, layer.rope_theta, layer.geometry.window_size) == ("softmax", 500, 8)


def test_an_empty_string_removes_an_optional_value_of_a_recipe(tiny_config) -> None:
    words = ["train.selection_teacher='runs/dense'", "train.selection_loss=0.1"]
    assert tiny_config(*words).train.selection_teacher == "runs/dense"
    assert tiny_config(*words, "train.selection_teacher=").train.selection_teacher is None

"""Convert checkpoints of nsa-train to folders that Hugging Face Transformers loads through nsa-transformers, and back. Needs nsa-train[hf]."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_core.errors import InputError
from nsa_train.checkpoint.folders import (
    NAMES,
    ends_with,
    folder_config,
    folder_weights,
    model_tables,
    require_folder_weights,
    require_installed,
)
from nsa_train.checkpoint.layout import HF_CONFIG, MODEL
from nsa_train.checkpoint.publish import whole
from nsa_train.checkpoint.rng import seed_rng
from nsa_train.checkpoint.snapshot import capture
from nsa_train.checkpoint.store import Checkpoint
from nsa_train.checkpoint.tensors import write_tensors
from nsa_train.checkpoint.writer import CheckpointWriter
from nsa_train.data.stream import merge_states, open_training_stream
from nsa_train.data.tokenizer import GPT2_VOCAB_SIZE, build_tokenizer, ranks_of
from nsa_train.errors import ConfigError
from nsa_train.files import MOST_TOKENIZER, read_regular
from nsa_train.model.decoder import build_model
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig, structure, unstructure
from nsa_train.settings.data_table import IDS, DataTable
from nsa_train.settings.recipe import load_config, to_toml

OF_MODEL = ("model.", "nsa.")
"""Keys that an import takes from config.json."""


def write_folder(out: Path, checkpoint: Checkpoint, tensors: dict[str, Tensor], format: str) -> Path:  # noqa: A002 - the option's name
    """Write config.json, weights and tokenizer to the new folder `out`, and return it.

    "hf": for nsa-transformers, with the module for `trust_remote_code`. "llama": for Transformers' own classes.

    Raises:
        ConfigError: if nsa-transformers is not installed, or the model has a part that the format lacks; nothing is written.
        DataError: if the tokenizer is not available.
    """
    require_installed(f"--format {format}")
    from nsa_transformers.checksums import UNSEALED, seal
    from nsa_transformers.configuration import generation_config
    from nsa_transformers.conversion import dense_form

    ours = hugging_face_config(checkpoint, tensors)
    config, weights = dense_form(ours, tensors) if format == "llama" else (ours, tensors)
    tokenizer = hugging_face_tokenizer(checkpoint.config.data, max_length=ours.max_position_embeddings)

    with whole(out) as folder:
        folder.mkdir()
        config.save_pretrained(folder)
        write_tensors(folder / MODEL, weights, **UNSEALED)
        seal(folder / MODEL)
        tokenizer.save_pretrained(folder)
        generation_config(ours).save_pretrained(folder)
    return out


def hugging_face_config(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> Any:
    """Return the `NSAModelConfig` of a checkpoint: sizes under Hugging Face's names, table `nsa` of the recipe under "nsa"."""
    from nsa_transformers import NSAForCausalLM, NSAModelConfig
    from nsa_transformers.configuration import nsa_table

    model, run = checkpoint.config.model, checkpoint.config
    tokenizer = build_tokenizer(run.data)
    return NSAModelConfig(
        architectures=[NSAForCausalLM.__name__],
        dtype=str(tensors["embedding.weight"].dtype).removeprefix("torch."),
        vocab_size=len(tensors["embedding.weight"]),
        intermediate_size=len(tensors["blocks.0.mlp.gate.weight"]),
        **{name: getattr(model, key) for name, key in NAMES.items()},
        max_position_embeddings=model.max_position or run.train.seq_len,
        layers=unstructure(run)["model"]["layers"] or None,
        nsa=nsa_table(run.nsa_config()),
        bos_token_id=tokenizer.separator,
        eos_token_id=tokenizer.separator,
        pad_token_id=tokenizer.pad,
        trained_steps=checkpoint.step,
    )


def hugging_face_tokenizer(data: DataTable, *, max_length: int) -> Any:
    """Return the tokenizer of `data` for Transformers: the same ids for the same text.

    Raises:
        DataError: if its file is not available.
    """
    from nsa_transformers.tokenizer import byte_tokenizer, id_tokenizer, json_tokenizer, merges_tokenizer

    if data.tokenizer == "byte":
        return byte_tokenizer(max_length)
    tokenizer = build_tokenizer(data)
    options = {"separator": tokenizer.separator, "pad": tokenizer.pad, "max_length": max_length}
    if data.source in IDS and data.tokenizer_path is None:
        # random ids have no text
        return id_tokenizer(GPT2_VOCAB_SIZE, **options)
    path = None if data.tokenizer_path is None else Path(data.tokenizer_path)
    if path is not None and path.suffix == ".json" and path.name != "encoder.json":
        return json_tokenizer(read_regular(path, MOST_TOKENIZER).decode("utf-8"), **options)
    return merges_tokenizer(ranks_of(data.tokenizer_path), **options)


def import_run(source: Path, out: Path, recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Write to `out` a run without steps that has the weights of the folder `source`; return its configuration.

    Data and training come from `recipe` with `overrides`; the model comes from config.json.

    Raises:
        ConfigError: if `out` exists, nsa-transformers is not installed, an override changes the model, `source` describes no model or is damaged,
            or its tensors are missing, extra, of another shape, integers or not finite.
    """
    if out.exists():
        raise ConfigError(f"OUT={str(out)!r} exists already (an import never overwrites); use another name")
    require_installed("ckpt import")
    try:
        config = _imported_config(source, recipe, overrides)
        tensors = folder_weights(source, require_folder_weights(source, config, of="its config.json"))
    except InputError as error:
        raise ConfigError(str(error)) from None
    with whole(out) as aside:
        _write_run(aside, config, tensors)
    return config


def _imported_config(source: Path, recipe: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of `recipe` with the model of the folder `source`, whose ids must be those of the recipe's tokenizer."""
    if theirs := [line for line in overrides if line.startswith(OF_MODEL)]:
        raise ConfigError(f"--set {theirs[0]} is a key of the model (an import takes those from {source / HF_CONFIG}); leave it out")
    config = folder_config(source)
    tables = unstructure(load_config(recipe, overrides))
    tables["train"].pop("init_from", None)
    run = structure({**tables, **model_tables(config)})
    separator = build_tokenizer(run.data).separator
    if not ends_with(config, separator):
        raise ConfigError(
            f"{source / HF_CONFIG} has eos_token_id={config.eos_token_id}, data.tokenizer={run.data.tokenizer!r} ends documents with {separator} "
            "(the ids would mean other text); name the tokenizer that the model was trained with: --recipe, or --set data.tokenizer=..."
        )
    return run


def _write_run(folder: Path, config: RunConfig, tensors: dict[str, Tensor]) -> None:
    paths = RunDirectory(folder)
    folder.mkdir()
    with open_training_stream(config) as stream:
        position = merge_states([stream.state_dict()])
    with torch.random.fork_rng(devices=[]):
        seed_rng(config.train.seed)
        model = build_model(config)
        model.load_state_dict(tensors)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        # the two groups of a run: with weight decay and without
        optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:]}], lr=config.train.lr)
        pending = [name for name, weight in model.named_parameters() if weight.requires_grad]
        snapshot = capture(
            model=model,
            optimizer=optimizer,
            config=config,
            data=position,
            counters={
                "guard": {"num_skipped": 0, "recent_skips": [], "losses": []},
                "watch": {"num_observed": 0, "longest": 0, "pending": pending},
                "patience": {"best": None, "num_worse": 0},
            },
        )
    paths.config.write_text(to_toml(config), encoding="utf-8")
    with CheckpointWriter(paths.checkpoints) as writer:
        writer.save(0, snapshot)

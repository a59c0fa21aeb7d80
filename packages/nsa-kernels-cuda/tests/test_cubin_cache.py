"""Entries of the cache on disk: whole and of their key, or not used."""

import os
import time
from pathlib import Path

import pytest
import torch

from nsa_kernels_cuda import cubin_cache

KEY, OTHER = bytes(range(32)), bytes(32)
CUBIN = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    cubin_cache.write(tmp_path / "cache", KEY, CUBIN)
    return tmp_path / "cache"


def entry_of(folder, key=KEY):
    return folder / f"{key.hex()}.cubin"


def test_an_entry_is_read_back(folder):
    assert cubin_cache.read(folder, KEY) == CUBIN
    assert [path.name for path in folder.iterdir()] == [entry_of(folder).name]


def test_another_key_has_no_entry(folder):
    assert cubin_cache.read(folder, OTHER) is None


def test_a_missing_folder_has_no_entry(tmp_path):
    assert cubin_cache.read(tmp_path / "missing", KEY) is None


@pytest.mark.parametrize("position", [0, len(cubin_cache.MAGIC), len(cubin_cache.MAGIC) + 40, -1], ids=["magic", "key", "digest", "cubin"])
def test_one_flipped_bit_anywhere_refuses_the_entry(folder, position):
    damaged = bytearray(entry_of(folder).read_bytes())
    damaged[position] ^= 1
    entry_of(folder).write_bytes(damaged)
    assert cubin_cache.read(folder, KEY) is None


@pytest.mark.parametrize("size", [0, 10, 80, 5000])
def test_a_truncated_entry_is_refused(folder, size):
    entry_of(folder).write_bytes(entry_of(folder).read_bytes()[:size])
    assert cubin_cache.read(folder, KEY) is None


def test_an_entry_under_the_name_of_another_key_is_refused(folder):
    entry_of(folder).rename(entry_of(folder, OTHER))
    assert cubin_cache.read(folder, OTHER) is None


def test_an_interrupted_write_leaves_nothing(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cubin_cache.write(folder, OTHER, CUBIN)
    assert [path.name for path in folder.iterdir()] == [entry_of(folder).name]


def test_the_file_of_a_killed_process_is_removed_after_an_hour(folder):
    abandoned, running = folder / "killed.tmp", folder / "running.tmp"
    abandoned.write_bytes(b"half")
    running.write_bytes(b"half")
    an_hour_ago = time.time() - cubin_cache.ABANDONED_AFTER_S - 1
    os.utime(abandoned, (an_hour_ago, an_hour_ago))
    cubin_cache.write(folder, OTHER, CUBIN)
    assert sorted(path.name for path in folder.iterdir()) == sorted([entry_of(folder).name, entry_of(folder, OTHER).name, running.name])


def test_the_folder_lies_in_torchs_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    assert cubin_cache.default_folder() == tmp_path / "nsa_kernels_cuda"

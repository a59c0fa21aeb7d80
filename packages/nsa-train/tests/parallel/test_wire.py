"""The ranks exchange JSON: nothing that travels between them is unpickled."""

import math
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest
import torch

from nsa_train.parallel import world
from nsa_train.parallel.world import World

ROOT = Path(__file__).parents[4]
WORLD = World(device=torch.device("cpu"))


@pytest.mark.parametrize("share", [WORLD.gather, WORLD.from_main])
def test_what_json_cannot_spell_does_not_travel(share) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        share(object())


def test_a_rank_alone_gets_what_several_would_get() -> None:
    [told] = WORLD.gather((["a"], {"x": 0.1, "n": math.inf}, "\udcff"))
    assert told == [["a"], {"x": 0.1, "n": math.inf}, "\udcff"]
    assert WORLD.from_main("") == ""


def test_bytes_travel_whole_and_take_no_number_of_python_each() -> None:
    """A position in a large corpus holds megabytes of hashes, and every rank gathers those of all ranks."""
    payload = bytes(range(256)) * 2**12
    tracemalloc.start()
    try:
        assert world._bytes(world._tensor(payload)) == payload
        assert tracemalloc.get_traced_memory()[1] < 4 * len(payload)
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file() or shutil.which("ruff") is None, reason="needs the checkout and ruff")
@pytest.mark.parametrize("verb", ["all_gather", "gather", "broadcast", "scatter", "send", "recv"])
@pytest.mark.parametrize("form", ["import torch.distributed as dist\n\ndist.{0}(1)\n", "from torch.distributed import {0}\n\n{0}(1)\n"])
def test_lint_refuses_torchs_object_collectives_where_ranks_talk(verb: str, form: str) -> None:
    name = f"{verb}_object" if verb.endswith("gather") else f"{verb}_object_list"
    words = ["ruff", "check", "--quiet", "--select", "TID251", "--stdin-filename", "packages/nsa-train/src/nsa_train/parallel/x.py", "-"]
    done = subprocess.run(words, input=form.format(name), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert f"`torch.distributed.{name}` is banned" in done.stdout

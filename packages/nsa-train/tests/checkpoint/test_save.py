"""Saving: the files after it, old checkpoints, and the state after a disk error."""

import errno
import fcntl
import functools
import os
import platform
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nsa_train.checkpoint import CheckpointWriter, load_model, open_checkpoint, publish
from nsa_train.checkpoint.claim import HOLDER, claim, claimed_by_another, release
from nsa_train.checkpoint.commands import listing
from nsa_train.checkpoint.layout import FILES, MANIFEST
from nsa_train.checkpoint.publish import whole
from nsa_train.checkpoint.store import latest_valid
from nsa_train.errors import CheckpointError


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_leaves_the_documented_files_and_latest(tmp_path: Path, build_parts, is_async: bool) -> None:
    root = tmp_path / "new/checkpoints"
    with CheckpointWriter(root, is_async=is_async) as writer:
        path = writer.save(3, build_parts().snapshot())
    assert path == root / "step-3"
    assert _names(path) == sorted([*FILES, MANIFEST])
    assert _names(root) == ["latest", "step-3"]
    assert (root / "latest").readlink() == Path("step-3")
    assert open_checkpoint(root / "latest").step == 3


def test_all_is_on_the_disk_before_a_name_points_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine right after a rename must not find empty files, nor one after the save the old names."""
    events: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def flushed(descriptor: int) -> None:
        events.append(f"flush {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def moved(call: Callable[..., None], source: Path, target: Path) -> None:
        events.append(f"move {Path(target).name}")
        call(source, target)

    def fill(folder: Path) -> None:
        for name in FILES:
            (folder / name).write_text(name)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", functools.partial(moved, rename))
    monkeypatch.setattr(os, "replace", functools.partial(moved, replace))
    publish.publish(tmp_path / "checkpoints", 3, fill)
    names = [*FILES, MANIFEST]
    parent, files, rest = events[0], events[1 : 1 + len(names)], events[1 + len(names) :]
    assert parent == f"flush {tmp_path.name}"
    assert sorted(files) == sorted(f"flush {name}" for name in names)
    assert rest == ["flush .aside-step-3", "move step-3", "flush checkpoints", "move latest", "flush checkpoints"]


def test_everything_is_in_the_state(tmp_path: Path, build_parts) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    more = {"scaler": scaler, "data": {}, "routes": {"slc": "sdpa"}, "counters": {"skipped": 2, "losses": [0.1, float("inf")]}}
    with CheckpointWriter(tmp_path) as writer:
        writer.save(3, build_parts().snapshot(**more))
    state = open_checkpoint(tmp_path).state
    assert (state["data"], state["routes"], state["counters"]) == ({}, more["routes"], more["counters"])
    assert state["scaler"]["scale"] == 2.0**13
    assert state["schedule"] == {"lr": [0.001]}
    assert state["world_size"] == 1


def test_a_state_that_is_not_json_fails_at_once(build_parts) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        build_parts().snapshot(counters={"loss": torch.tensor(1.0)})


@pytest.mark.parametrize(
    ("keep_last", "left"), [(0, ["step-1", "step-2", "step-3", "step-4"]), (1, ["step-4"]), (3, ["step-2", "step-3", "step-4"])]
)
def test_keep_last_leaves_so_many(tmp_path: Path, build_parts, keep_last: int, left: list[str]) -> None:
    with CheckpointWriter(tmp_path, keep_last=keep_last) as writer:
        for step in range(1, 5):
            writer.save(step, build_parts().snapshot())
    assert _names(tmp_path) == ["latest", *left]


def test_checkpoints_of_a_branch_that_was_left_go_first(tmp_path: Path, build_parts) -> None:
    with CheckpointWriter(tmp_path) as writer:
        for step in (10, 20, 30):
            writer.save(step, build_parts().snapshot())
    with CheckpointWriter(tmp_path, keep_last=2) as writer:
        # resumed from step 10
        writer.save(15, build_parts().snapshot())
    assert _names(tmp_path) == ["latest", "step-10", "step-15"]


def test_where_all_are_kept_a_branch_that_was_left_stays_too(root: Path, build_parts) -> None:
    shutil.rmtree(root / "step-1")
    shutil.copytree(root / "step-2", root / "step-9")
    with CheckpointWriter(root) as writer:
        writer.save(3, build_parts().snapshot())
    assert _names(root) == ["latest", "step-2", "step-3", "step-9"]


def test_saving_a_step_again_replaces_it(root: Path, build_parts) -> None:
    with CheckpointWriter(root) as writer:
        writer.save(2, build_parts(9).snapshot(counters={"again": 1}))
    assert _names(root) == ["latest", "step-1", "step-2"]
    assert open_checkpoint(root).state["counters"] == {"again": 1}
    assert torch.equal(load_model(open_checkpoint(root)).embedding.weight, build_parts(9).model.embedding.weight)


def test_saving_a_step_again_works_where_names_cannot_be_exchanged(root: Path, build_parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    (root / "step-2/state.json").write_text("{}")
    test_saving_a_step_again_replaces_it(root, build_parts)


def test_what_a_killed_writer_left_is_removed(root: Path) -> None:
    (root / ".aside-step-7").mkdir()
    (root / ".aside-step-7/model.safetensors").write_bytes(b"half")
    (root / ".aside-latest").symlink_to("step-7")
    (root / ".hidden").write_text("not ours")
    CheckpointWriter(root).close()
    assert _names(root) == [".hidden", "latest", "step-1", "step-2"]


def test_an_async_save_writes_what_was_captured_not_what_came_after(tmp_path: Path, build_parts, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, original = threading.Event(), publish.make_root

    def late(root: Path) -> None:
        gate.wait(30)
        original(root)

    monkeypatch.setattr(publish, "make_root", late)
    parts = build_parts()
    before = parts.model.embedding.weight.detach().clone()
    with CheckpointWriter(tmp_path, is_async=True) as writer:
        writer.save(1, parts.snapshot())
        # training goes on, and no reader sees anything yet
        parts.model.embedding.weight.data.add_(1)
        assert latest_valid(tmp_path) is None
        gate.set()
    assert torch.equal(load_model(open_checkpoint(tmp_path)).embedding.weight, before)


def test_an_async_failure_shows_at_the_next_save_and_only_there(tmp_path: Path, build_parts, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = build_parts().snapshot()
    with CheckpointWriter(tmp_path, is_async=True) as writer:
        writer.save(1, snapshot)
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(publish, "write_manifest", _raises(errno.ENOSPC))
            writer.save(2, snapshot)
            with pytest.raises(CheckpointError, match=r"step-2 was not written .*No space left.*step-1 is still there"):
                writer.save(3, snapshot)
        writer.save(4, snapshot)
    assert _names(tmp_path) == ["latest", "step-1", "step-4"]


def test_an_async_failure_of_the_last_save_shows_when_the_writer_closes(
    tmp_path: Path, build_parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "write_manifest", _raises(errno.EIO))
    with (
        pytest.raises(CheckpointError, match="step-1 was not written .*there is no checkpoint yet"),
        CheckpointWriter(tmp_path, is_async=True) as writer,
    ):
        writer.save(1, build_parts().snapshot())


def test_an_unforeseen_error_in_the_background_is_not_lost(tmp_path: Path, build_parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "write_manifest", lambda folder, step: 1 / 0)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"), CheckpointWriter(tmp_path, is_async=True) as writer:
        writer.save(1, build_parts().snapshot())


def test_another_error_leaves_the_writer_without_hiding_it(tmp_path: Path, build_parts) -> None:
    threads = threading.active_count()

    def run() -> None:
        with CheckpointWriter(tmp_path, is_async=True) as writer:
            writer.save(1, build_parts().snapshot())
            raise KeyError("the run's own")

    with pytest.raises(KeyError, match="the run's own"):
        run()
    assert open_checkpoint(tmp_path).step == 1
    assert threading.active_count() == threads


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path, build_parts) -> None:
    first = CheckpointWriter(tmp_path)
    (tmp_path / ".aside-step-7").mkdir()
    holder = f"still runs: pid {os.getpid()} on host {re.escape(platform.node())} "
    with pytest.raises(CheckpointError, match=rf"{holder}.*; end that one \(kill {os.getpid()}, which saves\), or use another --out"):
        CheckpointWriter(tmp_path)
    # the files that the first process is writing are untouched
    assert _names(tmp_path) == [".aside-step-7", HOLDER]
    first.close()
    CheckpointWriter(tmp_path).close()
    assert _names(tmp_path) == []


@pytest.mark.parametrize("text", ["", "pid 1 on host", "pid 1 on host a\x1b[2J\n", None], ids=repr)
def test_a_holder_that_cannot_be_read_is_not_named(tmp_path: Path, text: str | None) -> None:
    """None: a pipe, on which a reader would wait."""
    descriptor = claim(tmp_path)
    (tmp_path / HOLDER).unlink()
    if text is None:
        os.mkfifo(tmp_path / HOLDER)
    else:
        (tmp_path / HOLDER).write_text(text)
    assert claimed_by_another(tmp_path) == (
        f"{tmp_path} belongs to another process that still runs (two would overwrite each other's files); end that one, or use another --out"
    )
    release(tmp_path, descriptor)
    assert _names(tmp_path) == []


def test_a_claim_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "root" / HOLDER).symlink_to(tmp_path / "kept")
    release(tmp_path / "root", claim(tmp_path / "root"))
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_look_at_the_claim_stops_nobody_from_taking_it(tmp_path: Path) -> None:
    """Preflight beside a start: its look locks the directory for a moment."""
    looks = [os.open(tmp_path, os.O_RDONLY) for _ in range(2)]
    for descriptor in looks:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert claimed_by_another(tmp_path) is None
    ending = threading.Timer(0.03, lambda: [os.close(descriptor) for descriptor in looks])
    ending.start()
    release(tmp_path, claim(tmp_path))
    ending.join()


def test_a_run_that_was_copied_without_its_links_saves_again(root: Path, build_parts) -> None:
    (root / "latest").unlink()
    shutil.copytree(root / "step-2", root / "latest")
    with CheckpointWriter(root) as writer:
        writer.save(3, build_parts().snapshot())
    assert _names(root) == ["latest", "step-1", "step-2", "step-3"]
    assert (root / "latest").readlink() == Path("step-3")


def test_a_step_that_was_moved_to_another_disk_is_replaced_and_let_go(root: Path, tmp_path: Path, build_parts) -> None:
    for step in (1, 2):
        (root / f"step-{step}").rename(tmp_path / f"step-{step}")
        (root / f"step-{step}").symlink_to(tmp_path / f"step-{step}")
    with CheckpointWriter(root, keep_last=1) as writer:
        writer.save(2, build_parts(9).snapshot(counters={"again": 1}))
        assert open_checkpoint(root).state["counters"] == {"again": 1}
        writer.save(3, build_parts().snapshot())
    assert _names(root) == ["latest", "step-3"]
    assert open_checkpoint(tmp_path / "step-1").step == 1


def _raises(code: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


CALLS = [(publish, "write_manifest"), (publish, "_flush"), (os, "mkdir"), (os, "rename"), (os, "symlink"), (os, "replace"), (os, "fsync")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize(("module", "name"), CALLS)
def test_a_call_that_fails_leaves_the_checkpoint_before_and_no_debris(
    root: Path, build_parts, monkeypatch: pytest.MonkeyPatch, module: object, name: str, code: int
) -> None:
    with CheckpointWriter(root) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, _raises(code))
            with pytest.raises(CheckpointError, match=f"step-5 was not written .*{os.strerror(code)}") as caught:
                writer.save(5, build_parts().snapshot())
        assert str(caught.value).count("\n") <= 2
        assert not [entry for entry in _names(root) if entry.startswith(".aside")]
        assert latest_valid(root).step == 2
        # and the run may go on
        writer.save(5, build_parts().snapshot())
        assert open_checkpoint(root).step == 5


def test_a_file_system_that_is_full_leaves_the_checkpoint_before(small_disk: Path, build_parts) -> None:
    snapshot = build_parts().snapshot()
    root, saved = small_disk / "checkpoints", []

    def save_on_and_on() -> None:
        with CheckpointWriter(root) as writer:
            for step in range(1, 50):
                writer.save(step, snapshot)
                saved.append(step)

    with pytest.raises(CheckpointError, match=r"was not written .*No space left on device.*step-\d+ is still there"):
        save_on_and_on()
    assert saved
    assert _names(root) == ["latest", *sorted(f"step-{step}" for step in saved)]
    assert all(not entry.is_damaged for entry in listing(root))
    assert latest_valid(root).step == saved[-1]


def test_a_read_only_file_system_leaves_the_checkpoint_before(small_disk: Path, build_parts) -> None:
    root = small_disk / "checkpoints"
    with CheckpointWriter(root) as writer:
        writer.save(1, build_parts().snapshot())
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with pytest.raises(CheckpointError, match=r"step-2 was not written .*Read-only file system.*step-1 is still there"):
            writer.save(2, build_parts().snapshot())
    assert _names(root) == [HOLDER, "latest", "step-1"]
    assert latest_valid(root).step == 1
    with pytest.raises(CheckpointError, match="Read-only file system"):
        CheckpointWriter(small_disk / "others").save(1, build_parts().snapshot())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB. The same faults are injected call by call above, where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_file_that_may_not_grow_leaves_the_checkpoint_before(root: Path, build_parts) -> None:
    snapshot, limits = build_parts().snapshot(), resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointWriter(root) as writer:
        # large enough for the generators' file, too small for the weights'
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="step-5 was not written .*File too large"):
                writer.save(5, snapshot)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _names(root) == ["latest", "step-1", "step-2"]
    assert latest_valid(root).step == 2


def test_a_checkpoint_is_as_readable_as_the_users_other_files(tmp_path: Path, good_root: Path) -> None:
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in (good_root / "step-1").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


def test_a_folder_is_written_where_a_killed_process_of_the_same_number_left_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole(tmp_path / "out") as left:
        raise KeyboardInterrupt
    left.mkdir()
    (left / "config.json").touch()
    with whole(tmp_path / "out") as aside:
        assert aside == left
        aside.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("name", ["n" * 255, "\u00e4" * 127])
def test_a_folder_has_the_longest_name_that_a_file_system_holds(tmp_path: Path, name: str) -> None:
    with whole(tmp_path / name) as aside:
        aside.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [name]

"""An untrusted file is read only if it is regular and small; a written file replaces the one at its path."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_train.checkpoint.publish import whole
from nsa_train.files import IrregularFileError, open_regular, parse_json, read_regular, refusal, written_whole

pytestmark = pytest.mark.timeout(30)


def test_a_regular_file_is_read_up_to_its_limit_through_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(IrregularFileError, match="it has 5 bytes, and only a regular file of at most 4 bytes is read"):
        read_regular(tmp_path / "a", 4)


def test_whatever_is_no_regular_file_is_refused_at_once_and_said(tmp_path: Path, put_irregular) -> None:
    for kind, words in put_irregular.kinds.items():
        put_irregular(kind, tmp_path / kind)
        with pytest.raises(IrregularFileError, match=re.escape(words)):
            read_regular(tmp_path / kind, 2**20)
        assert words in refusal(tmp_path / kind, 2**20)
    assert refusal(tmp_path / "absent", 2**20) == ""


def test_a_file_that_is_replaced_by_a_pipe_after_the_look_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regular, pipe = tmp_path / "regular", tmp_path / "pipe"
    regular.write_text("")
    os.mkfifo(pipe)
    found = regular.stat()
    monkeypatch.setattr(Path, "stat", lambda path, **_: found)
    with pytest.raises(IrregularFileError, match="a named pipe"), open_regular(pipe, 2**20):
        pass


def test_json_that_nests_without_end_is_an_error_of_one_line() -> None:
    for text in (b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(ValueError, match="its values are nested too deep"):
            parse_json(text)


def test_what_is_written_replaces_a_pipe_and_a_link_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "link").symlink_to("theirs")
    for name in ("pipe", "link"):
        with written_whole(tmp_path / name) as aside:
            aside.write_text("ours")
        assert (tmp_path / name).is_file()
        assert (tmp_path / name).read_text() == "ours"
    assert (tmp_path / "theirs").read_text() == "theirs"
    with pytest.raises(UnicodeEncodeError), written_whole(tmp_path / "link") as aside:
        aside.write_text("half \ud800", encoding="utf-8")
    assert (tmp_path / "link").read_text() == "ours"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "theirs"]


def test_of_two_writers_the_last_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with written_whole(tmp_path / "curves.png") as first:
        first.write_text("half of A")
        # as if another process wrote it meanwhile
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with written_whole(tmp_path / "curves.png") as second:
            second.write_text("B")
        assert second.suffix == ".png"
        assert (tmp_path / "curves.png").read_text() == "B"
        first.write_text("A")
    assert (tmp_path / "curves.png").read_text() == "A"
    assert len([*tmp_path.iterdir()]) == 1


def test_a_name_of_many_bytes_is_written(tmp_path: Path) -> None:
    path = tmp_path / f"{'é' * 120}.png"
    with written_whole(path) as aside:
        aside.write_text("ours")
        assert aside.suffix == ".png"
    assert path.read_text() == "ours"


def test_the_socket_of_a_process_that_listens_is_refused_too(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        assert "it is a socket" in refusal(tmp_path / "socket", 2**20)


def _in_rust(aside: Path) -> Exception:
    return RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "full",
    [lambda aside: OSError(28, "No space left on device"), lambda aside: OSError(28, "No space left on device", str(aside)), _in_rust],
    ids=["no name", "the temporary name", "a library in Rust"],
)
@pytest.mark.parametrize("writing", [written_whole, whole])
def test_a_full_disk_names_the_file_that_was_asked_for(writing: Any, full: Callable[[Path], Exception], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught, writing(tmp_path / "out") as aside:
        raise full(aside)
    assert (caught.value.errno, caught.value.filename, caught.value.filename2) == (28, str(tmp_path / "out"), None)
    assert list(tmp_path.iterdir()) == []


def test_the_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, written_whole(tmp_path / "out"):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other")

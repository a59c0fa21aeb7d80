"""Bytes to ids and back; byte-pair encoding from a local file, lossless, with special tokens that text cannot produce."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from nsa_train.cli import run_command
from nsa_train.data.dataset import open_dataset
from nsa_train.data.stream import open_training_stream
from nsa_train.data.tokenizer import PAD, SEPARATOR, BytePairTokenizer, ByteTokenizer, build_tokenizer, num_ids_of, open_bpe
from nsa_train.errors import DataError
from nsa_train.model.decoder import count_parameters, vocab_size_of
from nsa_train.settings.config import RunConfig
from nsa_train.settings.data_table import DataTable
from nsa_train.telemetry.flops import model_flops


@given(st.binary(max_size=200))
def test_any_bytes_are_one_id_each(text: bytes) -> None:
    ids = ByteTokenizer().encode(text)
    assert bytes(ids.tolist()) == text
    assert ids.dtype == torch.int32
    assert ByteTokenizer().encode_batch([text, b"x"])[0].tolist() == [*text, SEPARATOR]


@given(st.text(max_size=100))
def test_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_specials_are_left_out_of_text_and_stand_above_the_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (SEPARATOR, PAD, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.decode(torch.tensor([72, SEPARATOR, 105, PAD])) == "Hi"


def test_bytes_that_are_not_utf8_show_as_replacement() -> None:
    assert ByteTokenizer().decode(torch.tensor([72, 255])) == "H\ufffd"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small byte-level vocabulary in both forms: tokenizer.json, and vocab.bpe with encoder.json."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["the cat and the dog and the end of the text, more or less"] * 9, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    # the order of GPT-2's file: bytes in the order of its alphabet, then a token per merge
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    codes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in codes]
    letters = [*map(chr, codes), *(chr(256 + number) for number in range(len(others)))]
    encoder = {token: number for number, token in enumerate([*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"])}
    (folder / "encoder.json").write_text(json.dumps(encoder))
    return folder


@pytest.fixture(params=["tokenizer.json", "vocab.bpe", "encoder.json"])
def bpe(request: pytest.FixtureRequest, vocabulary: Path) -> BytePairTokenizer:
    return open_bpe(str(vocabulary / request.param))


@given(text=st.text(max_size=60))
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.bpe"])
def test_bpe_is_lossless(vocabulary: Path, name: str, text: str) -> None:
    tokenizer = open_bpe(str(vocabulary / name))
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text.encode()])[0].tolist() == [*ids.tolist(), tokenizer.separator]


def test_text_cannot_spell_the_separator(bpe: BytePairTokenizer) -> None:
    text = "before <|endoftext|> after"
    ids = bpe.encode(text.encode())
    assert bpe.separator not in ids.tolist()
    assert bpe.decode(ids) == text
    assert len(bpe.encode(b"the the the")) < 11


def test_specials_stand_at_the_end(bpe: BytePairTokenizer) -> None:
    assert (bpe.pad, bpe.vocab_size) == (bpe.separator + 1, bpe.separator + 2)
    assert bpe.decode(torch.tensor([*bpe.encode(b"cat").tolist(), bpe.separator, bpe.pad])) == "cat"


@pytest.mark.parametrize(
    ("name", "special", "is_pad"),
    [("<|pad|>", True, True), ("<|pad-{}|>", True, True), ("<|pad-7|>", True, False), ("<|pad|>", False, False), ("<|fill|>", True, False)],
)
def test_the_pad_of_an_export_is_the_pad(vocabulary: Path, tmp_path: Path, name: str, special: bool, is_pad: bool) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    last = tokenizer.get_vocab_size()
    tokenizer.add_tokens([tokenizers.AddedToken(name.format(last), special=special, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = open_bpe(str(tmp_path / "tokenizer.json"))
    assert (found.pad, found.vocab_size) == (last, last + 1) if is_pad else (last + 1, last + 2)
    text = f"cat{name.format(last)}dog"
    assert found.decode(found.encode(text.encode())) == text
    assert found.pad not in found.encode(text.encode()).tolist()


def test_both_files_give_equal_pieces(vocabulary: Path) -> None:
    text = "the cat, and 123 dogs' ends\n\n  of the text"
    one, other = (open_bpe(str(vocabulary / name)) for name in ("tokenizer.json", "vocab.bpe"))
    pieces = [[tokenizer.decode(index[None]) for index in tokenizer.encode(text.encode())] for tokenizer in (one, other)]
    assert pieces[0] == pieces[1]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["vocab.bpe", "encoder.json"])
def test_a_pipe_beside_the_named_file_is_not_waited_for(vocabulary: Path, tmp_path: Path, name: str) -> None:
    """Either file may be named, and both are read."""
    [other] = {"vocab.bpe", "encoder.json"} - {name}
    (tmp_path / name).write_bytes((vocabulary / name).read_bytes())
    os.mkfifo(tmp_path / other)
    with pytest.raises(
        DataError, match=rf"{other} cannot be read \(it is a named pipe \(FIFO\), and only a regular file of at most 128 MiB"
    ):
        open_bpe(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.json", None, "is not a file"),
        ("broken.json", "{", "is no tokenizer"),
        ("vocab.bpe", "#version: 0.2\n", "cannot be read as GPT-2's merges"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        open_bpe(str(tmp_path / name))
    assert name in str(caught.value)


def test_a_tokenizer_that_changes_text_is_refused(tmp_path: Path, vocabulary: Path) -> None:
    lossy = tokenizers.Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    lossy.normalizer = tokenizers.normalizers.Lowercase()
    lossy.save(str(tmp_path / "lossy.json"))
    with pytest.raises(DataError, match=r"lossy\.json' changes text"):
        open_bpe(str(tmp_path / "lossy.json"))
    nameless = tokenizers.Tokenizer(BPE())
    nameless.save(str(tmp_path / "nameless.json"))
    with pytest.raises(DataError, match="has no token '<|endoftext|>'"):
        open_bpe(str(tmp_path / "nameless.json"))


def test_gpt2_without_a_file_offline_says_what_would_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(
        DataError, match=r"data\.tokenizer='gpt2' is neither cached nor to be downloaded .*data\.tokenizer_path=tokenizer\.json"
    ):
        build_tokenizer(DataTable(source="stdlib", tokenizer="gpt2"))


@pytest.mark.parametrize(("name", "package"), [(None, "tiktoken"), ("vocab.bpe", "tiktoken"), ("tokenizer.json", "tokenizers")])
def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    vocabulary: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"needs {package}, which is not installed; use pip install {package}, or --set"):
        open_bpe(name and str(vocabulary / name))


def test_the_number_of_ids_needs_no_file_but_an_own_one(vocabulary: Path) -> None:
    assert num_ids_of(DataTable(source="synthetic", tokenizer="gpt2")) == 50_258
    assert num_ids_of(DataTable(source="stdlib")) == 258
    own = DataTable(source="stdlib", tokenizer="gpt2", tokenizer_path=str(vocabulary / "tokenizer.json"))
    assert num_ids_of(own) == build_tokenizer(own).vocab_size < 500
    missing = evolve(own, tokenizer_path="nosuch.json")
    assert num_ids_of(missing) == 50_258
    for data in (missing, evolve(missing, source="synthetic")):
        with pytest.raises(DataError, match=r"data\.tokenizer_path='nosuch\.json' is not a file"):
            build_tokenizer(data)


def test_a_model_is_sized_by_a_local_file_without_weights(vocabulary: Path, data_config: Callable[..., RunConfig]) -> None:
    """Sizes are counted of models on the meta device, where a tokenizer must not make its tensors."""
    words = ["data.source=stdlib", "data.tokenizer=gpt2", f"data.tokenizer_path={vocabulary}/tokenizer.json"]
    own, bytes_alone = data_config(*words), data_config("data.source=stdlib")
    more = num_ids_of(own.data) - num_ids_of(bytes_alone.data)
    assert more > 0
    assert count_parameters(own).nsa - count_parameters(bytes_alone).nsa == more * own.model.dim
    assert model_flops(own).of_sequence(48) > model_flops(bytes_alone).of_sequence(48)


def test_a_run_goes_on_after_its_vocabulary_has_moved_and_names_it_while_it_is_missing(
    vocabulary: Path, tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, first, moved = tmp_path / "run", tmp_path / "first.json", tmp_path / "moved.json"
    shutil.copy(vocabulary / "tokenizer.json", first)
    settings = _sets("data.tokenizer=gpt2", f"data.tokenizer_path={first}", "train.steps=2")
    assert run_command(["run", str(tiny_recipe), "--out", str(run), *settings]) == 0
    larger = tokenizers.Tokenizer.from_file(str(first))
    larger.add_tokens(["zzzz"])
    larger.save(str(moved))
    assert run_command(["resume", str(run), *_sets(f"data.tokenizer_path={moved}", "train.steps=3")]) != 0
    assert "is complete" not in capsys.readouterr().err
    first.rename(moved)
    assert run_command(["resume", str(run), *_sets(f"data.tokenizer_path={moved}", "train.steps=3")]) == 0
    moved.unlink()
    for words in (["eval", str(run), "--tasks", "copy"], ["ckpt", "export", str(run), str(tmp_path / "out"), "--format", "hf"]):
        capsys.readouterr()
        assert run_command(words) == 2
        assert f"data.tokenizer_path='{moved}'" in " ".join(capsys.readouterr().err.split())


def _sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_rows_that_a_recipe_states_need_no_vocabulary(data_config: Callable[..., RunConfig]) -> None:
    words = ["data.source=stdlib", "data.tokenizer=gpt2", "data.tokenizer_path=none.json"]
    assert vocab_size_of(data_config(*words, "model.vocab_size=320")) == 320


def test_documents_come_back_from_a_stream_of_bpe_tokens(vocabulary: Path, corpora, data_config: Callable[..., RunConfig]) -> None:
    for walk in ("rows", "blocks"):
        overrides = ["data.tokenizer=gpt2", f"data.tokenizer_path={vocabulary}/tokenizer.json"]
        dataset = open_dataset(data_config(*corpora.walks[walk], *overrides))
        with open_training_stream(dataset.config, dataset=dataset) as stream:
            pieces = [piece for _ in range(4) for batch in [next(stream)] for piece in batch.input_ids[0].split(batch.lengths.tolist())]
        everything = "".join(corpora.texts_of(1))
        # a row may begin or end inside a character
        texts = [dataset.tokenizer.decode(piece).strip("\ufffd") for piece in pieces]
        assert all(text in everything for text in texts)
        assert int(max(piece.max() for piece in pieces)) == dataset.tokenizer.separator

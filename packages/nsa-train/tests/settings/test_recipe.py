"""Recipes are found by name or path; `--set` takes TOML values and bare words."""

import time
from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.errors import ConfigError
from nsa_train.settings.recipe import apply_override, find_recipe, load_config, parse_value, settled, shipped_recipes


def test_shipped_recipes_are_valid(tiny_text: Path) -> None:
    assert set(shipped_recipes()) == {"demo", "showcase", "125m", "350m-64k", "a100"}
    assert load_config("demo").data.source == "stdlib"
    assert load_config("showcase", [f"data.path={tiny_text}"]).data.path == str(tiny_text)


def test_showcase_names_the_path_that_it_needs() -> None:
    assert load_config("showcase").data.missing_path.startswith("data.path=None does not name a file ")
    assert load_config("showcase", ["data.path=a.txt"]).data.missing_path == ""


@pytest.mark.parametrize("name", ["demo", "showcase", "125m", "350m-64k", "a100"])
def test_every_recipe_has_a_dense_twin_by_one_key(name: str, tiny_text: Path) -> None:
    paths = [f"data.path={tiny_text}"] if name == "showcase" else []
    assert load_config(name, [*paths, "model.attention=dense"]).model.attention == "dense"


def test_an_unknown_recipe_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"RECIPE='dmeo' .* did you mean demo\?"):
        find_recipe("dmeo")
    with pytest.raises(ConfigError, match=r"RECIPE='zzz' .* use one of 125m, 350m-64k, a100, demo, showcase"):
        find_recipe("zzz")


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(b"[train\nsteps = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read as TOML .*line 1"):
        load_config(str(path))
    for content in (b"\xff\xfe", b"[train]\nsteps = " + b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"broken\.toml cannot be read as TOML"):
            load_config(str(path))


HOSTILE = {
    "lists": ("[nsa]\nx = " + "[" * 30_000, "values nested more than 8 deep at line 2"),
    "closed lists": ("[nsa]\nx = " + "[" * 30_000 + "]" * 30_000, "values nested more than 8 deep at line 2"),
    "tables": ("nsa = " + "{a = " * 12_000, "values nested more than 8 deep at line 1"),
    "key": (".".join("a" * 32_000) + " = 1", "a key of more than 8 parts at line 1"),
    "header": ("[" + ".".join("a" * 32_000) + "]", "a key of more than 8 parts at line 1"),
    "quoted key": (" . ".join(['"a.b"', "'['"] * 4_000) + " = 1", "a key of more than 8 parts at line 1"),
    "number": ("\n[train]\nsteps = 0x" + "f" * 5_000, "a number of more than 64 digits at line 3"),
    "integer": ("\n[train]\nsteps = " + "9" * 60_000, "an integer of more than 4,000 digits at line 3"),
    "integers": ("[nsa]\nx = [1, -" + "9_9" * 2000 + "]", "an integer of more than 4,000 digits at line 2"),
    "zero": ("a = \0", "Invalid value"),
    "large": ("#" * 65_537, "it has 65,537 bytes, and only a regular file of at most 64 KiB is read"),
}
"""Text of a recipe, and why it is refused."""


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["run", "preflight", "loader-check"])
def test_a_recipe_that_keeps_a_parser_busy_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str) -> None:
    text, reason = HOSTILE[name]
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    started = time.perf_counter()
    assert run_command([command, str(path)]) == 2
    assert time.perf_counter() - started < 2
    told = capsys.readouterr().err
    assert told.startswith(f"{'FAIL ' if command == 'preflight' else 'nsa-train:'} {path} cannot be read as TOML ({reason}")
    assert told.endswith("); fix the file or use a shipped recipe\n")
    assert told.count("\n") == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory", "holes"])
def test_a_recipe_that_is_no_small_regular_file_is_one_line(
    tmp_path: Path, put_irregular, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    put_irregular(kind, tmp_path / "recipe.toml")
    for command in ("run", "preflight", "loader-check"):
        assert run_command([command, str(tmp_path / "recipe.toml")]) == 2
        told = capsys.readouterr().err
        assert (
            f"recipe.toml cannot be read as TOML ({put_irregular.kinds[kind]}, and only a regular file of at most 64 KiB is read)" in told
        )
        assert told.count("\n") == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nsa.x=" + "[" * 30_000, "holds values nested more than 8 deep"),
        ("nsa.x=" + "{a = " * 12_000, "holds values nested more than 8 deep"),
        ("train.steps=" + "9" * 60_000, "holds an integer of more than 4,000 digits at line 1; use fewer brackets and digits"),
        ("train.steps=-" + "9" * 4001, "holds an integer of more than 4,000 digits"),
        ("train.steps=0x" + "f" * 60_000, "holds a number of more than 64 digits"),
        ("model.layers=[" + "9" * 60_000 + "]", "holds an integer of more than 4,000 digits"),
        ("nsa.x={" + ".".join("a" * 30_000) + " = 1}", "holds a key of more than 8 parts"),
        (".".join("a" * 30_000) + "=1", "is not of the form table.key=value"),
        (".".join("a" * 50_000) + "=1", "takes 100,001 bytes (config.toml holds 65,536)"),
        ("data.path=['" + "a" * 65_000 + "', '" + "b" * 500 + "']", "with its overrides it takes"),
    ],
    ids=["lists", "tables", "integer", "negative", "hexadecimal", "integers", "keys of a table", "key", "large", "large together"],
)
def test_an_override_that_keeps_a_parser_busy_is_one_line(
    tiny_recipe: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    started = time.perf_counter()
    assert run_command(["run", str(tiny_recipe), "--set", override, "--print-config"]) == 2
    assert time.perf_counter() - started < 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert len(told) < 500


TEXT = f"'{'a' * 60_000}'"
SHORT = f"'{'a' * 37}...{'a' * 38}'"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (f"train.steps={TEXT}", f"train.steps={SHORT} is not an integer from 1 to 1,000,000,000; use 5"),
        (f"model.layers=[{TEXT}]", f"model.layers[0]={SHORT} is neither 'nsa', 'dense' nor a table; use 'nsa'"),
        (f"model.layers=[{{attention={TEXT}}}]", f"model.layers[0].attention={SHORT} is neither 'nsa' nor 'dense'; use 'nsa'"),
        (f"nsa.kv={TEXT}", f"nsa.kv={SHORT} is unknown (the rule: one of 'separate', 'shared'); use 'separate'"),
        (f"nsa.window_size={TEXT}", f"nsa.window_size={SHORT} is a str (the rule: an integer >= 1); use 8"),
        (f"nsa.backends={{{TEXT}='sdpa'}}", f"nsa.backends names the operation {SHORT} (the rule: one of "),
        (f"nsa.rope_scaling={{kind={TEXT}, factor=2}}", f"nsa.rope_scaling.kind={SHORT} is unknown (the rule: one of "),
        (f"nsa.rope_scaling={TEXT}", f"nsa.rope_scaling={SHORT} is not a table"),
        (f"data.subset={TEXT}", f"data.subset={SHORT} would be ignored"),
        (f"train.selection_teacher={TEXT}", f"train.selection_teacher={SHORT} teaches nothing"),
        (f"train.{'a' * 60_000}=1", f"train.{SHORT} is unknown"),
        (f"steps={TEXT}", "is not of the form table.key=value; did you mean --set train.steps=VALUE?"),
    ],
    ids=range(12),
)
def test_a_long_value_is_shown_in_short(tiny_recipe: Path, override: str, line: str) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError) as refused:
        load_config(str(tiny_recipe), settled([override] * 2, say=said.append))
    assert line in str(refused.value)
    assert len(str(refused.value)) < 550
    assert len(said[0]) < 250


@pytest.mark.parametrize(
    "override",
    [
        "data.mix={'a': 1, 'b': 2, 'c': 3, 'd': 4, 'e': 5000}",
        "train.steps=datetime.datetime(2026, 11, 28, 16, 0)",
        "nsa.branches=('cmp', 'slc', 'win', 'cmp', 'slc', 'win', 'x', 'y')",
    ],
    ids=["table", "time", "list"],
)
def test_a_value_of_at_most_80_characters_is_shown_whole(tiny_recipe: Path, override: str) -> None:
    key, _, shown = override.partition("=")
    written = {"train.steps": "2026-11-28T16:00:00", "nsa.branches": f"[{shown[1:-1]}]"}.get(key, shown.replace(": ", " = "))
    with pytest.raises(ConfigError) as refused:
        load_config(str(tiny_recipe), [f"{key}={written}"])
    assert f"{key}={shown}" in str(refused.value)


@pytest.mark.parametrize("words", [["preflight"], ["run"], ["run", "--dry-run"], ["run", "--out", "x"], ["loader-check"]], ids=" ".join)
def test_a_recipe_name_that_is_too_long_for_a_file_is_shown_in_short(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run_command([words[0], "a" * 300, *words[1:]]) == 2
    told = capsys.readouterr().err
    assert "is neither a shipped recipe nor a file" in told
    assert len(told) < 250


def test_a_byte_order_mark_before_the_recipe_is_passed_over(tmp_path: Path, tiny_recipe: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf" + tiny_recipe.read_bytes())
    assert load_config(str(path)) == load_config(str(tiny_recipe))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3e-3", 3e-3),
        ("true", True),
        ("['a', 'b']", ["a", "b"]),
        ('"3"', "3"),
        ("dense", "dense"),
        ("some/path with space.txt", "some/path with space.txt"),
        ("1\nb = 2", "1\nb = 2"),
        ("1\n" + "b." * 20 + "b = 2", "1\n" + "b." * 20 + "b = 2"),
        ("a.b.c.d.e.f.g.h.i.j.txt", "a.b.c.d.e.f.g.h.i.j.txt"),
        ("x[[[[[[[[[[", "x[[[[[[[[[["),
        ("['[[[[[[[[[[[', \"a.b.c.d.e.f.g.h.i.j\"]", ["[[[[[[[[[[[", "a.b.c.d.e.f.g.h.i.j"]),
        ("", ""),
    ],
)
def test_a_value_is_toml_or_a_bare_word(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_an_override_reaches_nested_tables() -> None:
    tables: dict[str, object] = {"nsa": {"backends": {"win": "sdpa"}}}
    apply_override(tables, "nsa.backends.cmp = sdpa")
    assert tables == {"nsa": {"backends": {"win": "sdpa", "cmp": "sdpa"}}}


@pytest.mark.parametrize("override", ["zzz", "zzz=3", "train.=3", "model=3"])
def test_a_malformed_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match=f"--set '{override}' is not of the form table.key=value; use --set train.steps=100"):
        apply_override({}, override)


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("lr=3", "train.lr=3"),
        ("lrr = 3", "train.lr=3"),
        ("window_size=64", "nsa.window_size=64"),
        ("n_layer=2", "model.n_layers=2"),
        (".path=a.txt", "data.path=a.txt"),
        ("steps", "train.steps=VALUE"),
        ("train.steps", "train.steps=VALUE"),
    ],
)
def test_a_key_without_its_table_is_offered_with_it(override: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({}, override)
    assert str(caught.value) == f"--set {override!r} is not of the form table.key=value; did you mean --set {advice}?"


@pytest.mark.parametrize(("override", "key"), [("train.dimm=3", "model.dim"), ("train.window_size=3", "nsa.window_size")])
def test_a_key_of_another_table_is_offered(tiny_recipe: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"is unknown \(every key is read or refused\); did you mean {key}\?"):
        load_config(str(tiny_recipe), [override])


@pytest.mark.parametrize(
    ("override", "own"),
    [
        ("train.steps=abc", "5"),
        ("train.steps=0", "5"),
        ("train.lr=abc", "0.01"),
        # what the recipe does not say has a default
        ("train.grad_clip=abc", "1.0"),
        ("train.compile=maybe", "true"),
        ("data.source=qqq", "'text'"),
        ("nsa.window_size=abc", "8"),
        ("nsa.num_initial_blocks=-1", "1"),
        ("nsa.gate=qqq", "'sigmoid'"),
    ],
)
def test_a_value_that_breaks_a_rule_is_answered_with_the_recipes_own(tiny_recipe: Path, override: str, own: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(tiny_recipe), ["train.seq_len=64", override])
    [line] = str(caught.value).splitlines()
    assert line.endswith(f"; use {own}")


def test_each_of_several_values_is_answered_with_the_recipes_own(tiny_recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(tiny_recipe), ["train.steps=abc", "train.batch_size=-1", "model.dim=x"])
    assert sorted(line.rpartition("; use ")[2] for line in str(caught.value).splitlines()) == ["2", "32", "5"]


def test_a_value_that_the_recipe_itself_has_wrong_is_not_offered(tmp_path: Path, tiny_recipe: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(tiny_recipe.read_text().replace("steps = 5", "steps = -5", 1))
    with pytest.raises(ConfigError, match="train.steps='abc' is not an integer from 1 to 1,000,000,000; use 600"):
        load_config(str(path), ["train.steps=abc"])


def test_an_override_cannot_enter_a_value() -> None:
    with pytest.raises(ConfigError, match="lr is a value, not a table"):
        apply_override({"train": {"lr": 1.0}}, "train.lr.x=1")

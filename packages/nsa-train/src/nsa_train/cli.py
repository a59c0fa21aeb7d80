"""The command `nsa-train`. Exit codes: 0 done, 1 error, 2 configuration or preflight.

Torch is imported after the configuration was read, so that a mistyped key is reported at once.
"""

import os
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from nsa_train.__about__ import __version__
from nsa_train.errors import ConfigError, TrainError
from nsa_train.recipe import load_config, to_toml

if TYPE_CHECKING:
    from nsa_train.config import RunConfig

app = App(
    name="nsa-train",
    help="Train, sample and inspect language models built on Native Sparse Attention.",
    help_epilogue="Exit codes: 0 done, 1 error, 2 configuration or preflight.",
    version=__version__,
)
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative="", help="table.key=value; the value is TOML. Repeatable.")]


@app.command
def run(
    recipe: str,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Directory of the results; runs/RECIPE-TIME by default.")] = None,
    set_: Overrides = None,
    print_config: Annotated[bool, Parameter(negative="", help="Print the resolved recipe as TOML and stop.")] = False,
) -> int:
    """Train what RECIPE describes: a shipped name (demo, showcase) or the path of a TOML file."""
    config = load_config(recipe, set_ or ())
    if print_config:
        print(to_toml(config), end="")
        return 0
    _train(config, out or _default_out(recipe))
    return 0


@app.command
def preflight(
    recipe: str,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The directory that the run would write to.")] = None,
    set_: Overrides = None,
) -> int:
    """Judge every rule that a run of RECIPE must meet, without running it."""
    from nsa_train.preflight import run_preflight

    findings = run_preflight(load_config(recipe, set_ or ()), out or _default_out(recipe))
    for line in findings.passed:
        print(f"ok    {line}")
    for line in findings.failed:
        print(f"FAIL  {line}", file=sys.stderr)
    return ConfigError.exit_code if findings.failed else 0


@app.command
def sample(
    ckpt: Path,
    /,
    *,
    prompt: Annotated[str, Parameter(help="What the text begins with; at least one character.")],
    tokens: Annotated[int, Parameter(help="Tokens to add, at most.")] = 200,
    temperature: Annotated[float, Parameter(help="0 takes the likeliest token.")] = 0.8,
    seed: int = 0,
) -> int:
    """Print PROMPT and what the model of CKPT writes after it: a run's directory or a checkpoints/step-N."""
    _check_sampling(prompt, tokens, temperature)
    from nsa_train.checkpoint import load_model, open_checkpoint
    from nsa_train.data.tokenizer import TOKENIZERS
    from nsa_train.model.generate import generate

    checkpoint = open_checkpoint(ckpt)
    tokenizer = TOKENIZERS[checkpoint.config.data.tokenizer]()
    ids = tokenizer.encode(prompt.encode())
    [drawn] = generate(load_model(checkpoint), [ids], tokenizer=tokenizer, num_tokens=tokens, temperature=temperature, seed=seed)
    print(prompt + tokenizer.decode(drawn))
    return 0


@app.command
def report(directory: Annotated[Path, Parameter(name="DIR")], /) -> int:
    """Draw curves.png and report.html of the run in DIR anew, from its records."""
    from nsa_train.run_dir import RunDirectory
    from nsa_train.telemetry.report import write_report

    paths = RunDirectory(directory)
    write_report(paths)
    print(paths.report)
    return 0


def main(tokens: Iterable[str] | None = None) -> NoReturn:
    """Run the command line `tokens` (default: this process's) and exit with its code."""
    sys.exit(run_command(sys.argv[1:] if tokens is None else tokens))


def run_command(tokens: Iterable[str]) -> int:
    """Return the exit code of the command line `tokens`; errors that we foresee end in a message, not a traceback."""
    try:
        result: int | None = app(list(tokens), exit_on_error=False, result_action="return_value")
    except CycloptsError:
        # cyclopts has printed what is wrong
        return ConfigError.exit_code
    except TrainError as error:
        print(f"nsa-train: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"nsa-train: {error}; mend it and start again", file=sys.stderr)
        return TrainError.exit_code
    except KeyboardInterrupt:
        print("nsa-train: interrupted", file=sys.stderr)
        return TrainError.exit_code
    return result or 0


def _train(config: "RunConfig", out: Path) -> None:
    if config.train.deterministic:
        # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from nsa_train.model.decoder import count_parameters
    from nsa_train.preflight import run_preflight
    from nsa_train.telemetry.progress import ProgressDisplay
    from nsa_train.trainer import Trainer

    corpus = run_preflight(config, out).require()
    counts = count_parameters(config)
    with ProgressDisplay(Console(), config.train.steps) as display:
        display.note(f"out: {out}")
        display.note(f"model: {config.model.attention} attention; {counts.nsa:,} parameters with nsa, {counts.dense:,} with dense")
        metrics = Trainer(config, corpus, out, display).run()
        display.note(
            f"done: val_loss {metrics['first_val_loss']:.3f} -> {metrics['val_loss']:.3f} nats per token, "
            f"{metrics['toks_per_s_median']:.0f} toks/s, {metrics['seconds']:.0f} s; see {out / 'report.html'}"
        )


def _check_sampling(prompt: str, tokens: int, temperature: float) -> None:
    problems = []
    if not prompt:
        problems.append("--prompt='' is empty (the model needs a first token); use --prompt 'def '")
    if tokens < 1:
        problems.append(f"--tokens={tokens} is not an integer >= 1; use 200")
    if not 0 <= temperature < float("inf"):
        problems.append(f"--temperature={temperature} is not a finite number >= 0; use 0.8")
    if problems:
        raise ConfigError.of(problems)


def _default_out(recipe: str) -> Path:
    return Path("runs") / f"{Path(recipe).stem}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"

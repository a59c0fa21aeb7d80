"""Rules that options of the command line obey, where no key of a recipe stands behind them. Imports no torch."""

from nsa_train.errors import ConfigError
from nsa_train.rules import LEAST_SECONDS, MOST_SECONDS, MOST_SEED, is_number, is_utf_8

MOST_SAMPLED = 100_000
"""Tokens of one sample: each takes a step of the model, and the cache is made for all."""
COLDEST, HOTTEST = 1e-3, 1e3
"""Temperatures but 0; beyond them the draw is the likeliest token, or uniform."""


def check_seconds(option: str, seconds: float, *, example: float) -> None:
    """Let a time pass that can be waited for.

    Raises:
        ConfigError: naming `option`.
    """
    if not is_number(seconds, at_least=LEAST_SECONDS, at_most=MOST_SECONDS):
        raise ConfigError(f"{option}={seconds} is not a number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:,}; use {example:g}")


def check_sampling(prompt: str, *, tokens: int, temperature: float, seed: int) -> None:
    """Let the options of `nsa-train sample` pass.

    Raises:
        ConfigError: a line for each that breaks its rule.
    """
    problems = []
    if not prompt:
        problems.append("--prompt='' is empty (the model needs a first token); use --prompt 'def '")
    if not is_utf_8(prompt):
        problems.append(f"--prompt={prompt!r} is not UTF-8 (the tokenizer reads that); use --prompt 'def '")
    if not 1 <= tokens <= MOST_SAMPLED:
        problems.append(f"--tokens={tokens} is not an integer from 1 to {MOST_SAMPLED:,}; use 200")
    if not (temperature == 0 or is_number(temperature, at_least=COLDEST, at_most=HOTTEST)):
        problems.append(f"--temperature={temperature} is neither 0 nor a number from {COLDEST:g} to {HOTTEST:g}; use 0.8")
    if not 0 <= seed <= MOST_SEED:
        problems.append(f"--seed={seed} is not an integer from 0 to {MOST_SEED:,}; use 0")
    if problems:
        raise ConfigError.of(problems)

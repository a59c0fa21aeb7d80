"""Options of the command line that no key of a recipe stands behind: refused before anything is opened."""

import time

import pytest

from nsa_train.cli import run_command
from nsa_train.errors import ConfigError
from nsa_train.options import check_sampling, check_seconds


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--tokens=100000000000", "--tokens=100000000000 is not an integer from 1 to 100,000; use 200"),
        ("--tokens=0", "--tokens=0 is not an integer from 1 to 100,000; use 200"),
        ("--temperature=1e-300", "--temperature=1e-300 is neither 0 nor a number from 0.001 to 1000; use 0.8"),
        ("--temperature=nan", "--temperature=nan is neither 0 nor"),
        ("--temperature=inf", "--temperature=inf is neither 0 nor"),
        ("--temperature=-1", "--temperature=-1.0 is neither 0 nor"),
        (f"--seed={2**63}", f"--seed={2**63} is not an integer from 0 to 9,223,372,036,854,775,807; use 0"),
        ("--seed=-1", "--seed=-1 is not an integer from 0 to"),
    ],
)
def test_sample_refuses_numbers_without_measure(capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    started = time.perf_counter()
    assert run_command(["sample", "no/such/run", "--prompt", "x", option]) == 2
    assert time.perf_counter() - started < 1
    assert capsys.readouterr().err.startswith(f"nsa-train: {message}")


def test_all_that_is_wrong_with_a_sample_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_sampling("", tokens=0, temperature=-1, seed=-1)
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["--prompt", "--tokens", "--temperature", "--seed"]
    check_sampling("x", tokens=100_000, temperature=0, seed=2**63 - 1)
    check_sampling("x", tokens=1, temperature=1e-3, seed=0)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300, 86_401, 1e-300, 5e-324])
def test_a_time_that_cannot_be_waited_for_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"--interval=\S+ is not a number of seconds from 0.001 to 86,400; use 5"):
        check_seconds("--interval", seconds, example=5)
    for fitting in (0.001, 86_400):
        check_seconds("--interval", fitting, example=5)

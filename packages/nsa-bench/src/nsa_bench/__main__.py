"""The start of the command `nsa-bench`, also as `python -m nsa_bench`."""

from typing import NoReturn

from nsa_core.environment import end_quietly_while_loading


def main() -> NoReturn:
    """Load the command line and run it; Ctrl-C while it or torch loads ends the process without a traceback."""
    end_quietly_while_loading("nsa_bench.cli", "torch")
    from nsa_bench import cli

    cli.main()


if __name__ == "__main__":
    main()

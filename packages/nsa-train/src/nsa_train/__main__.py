"""The start of the command `nsa-train`, also as `python -m nsa_train`."""

from typing import NoReturn

from nsa_core.environment import end_quietly_while_loading


def main() -> NoReturn:
    """Load the command line and run it; Ctrl-C while it or torch loads ends the process without a traceback."""
    end_quietly_while_loading("nsa_train.cli", "torch")
    from nsa_train import cli

    cli.main()


if __name__ == "__main__":
    main()

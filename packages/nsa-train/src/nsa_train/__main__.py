"""The start of the command `nsa-train`, also as `python -m nsa_train`. It imports only `os` and `signal` before it handles Ctrl-C."""

import os
import signal


def main() -> None:
    """Load the command line and run it; Ctrl-C while it or torch loads ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # as INTERRUPTED of nsa_core.environment, which is not imported yet
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        from nsa_core.environment import end_quietly_while_loading

        end_quietly_while_loading("nsa_train.cli", "torch")
    from nsa_train import cli

    cli.main()


if __name__ == "__main__":
    main()

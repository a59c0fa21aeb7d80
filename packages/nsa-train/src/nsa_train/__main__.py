"""Let `python -m nsa_train` be the command `nsa-train`."""

from nsa_train.cli import main

if __name__ == "__main__":
    main()

"""Let `python -m nsa_bench` be the command `nsa-bench`."""

from nsa_bench.cli import main

if __name__ == "__main__":
    main()

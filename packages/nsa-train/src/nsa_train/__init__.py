"""Train, sample and inspect language models built on Native Sparse Attention; `nsa-train --help` lists the commands."""

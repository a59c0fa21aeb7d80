"""Train, sample and inspect language models built on Native Sparse Attention; `nsa-train --help` shows the verbs."""

"""CUDA C++ kernels for Native Sparse Attention. Do not import from here: `nsa_core` finds `plugin` by its entry point."""

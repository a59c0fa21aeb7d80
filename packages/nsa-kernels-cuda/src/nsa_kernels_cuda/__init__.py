"""CUDA C++ kernels for Native Sparse Attention. Nothing here is called directly: `nsa_core` finds `plugin` by its entry point."""

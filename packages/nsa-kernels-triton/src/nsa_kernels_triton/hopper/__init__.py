"""Kernels for compute capability 9.0, in Gluon: some warps load, others compute, and matrix products run asynchronously."""

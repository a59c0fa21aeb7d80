"""Warp-specialised kernels for compute capability 9.0, in Gluon: producer warps load, consumer warps compute, products run asynchronously."""

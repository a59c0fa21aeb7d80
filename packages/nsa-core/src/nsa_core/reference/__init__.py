"""The oracle (`naive`), and the reference backend (`sdpa`), which runs on any device."""

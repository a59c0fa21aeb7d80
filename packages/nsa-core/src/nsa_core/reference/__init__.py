"""The oracle (`naive`) and the default backend (`sdpa`), which runs on any device."""

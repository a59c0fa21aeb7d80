"""`nsa-bench attention`: the operations, timed and compared with the reference."""

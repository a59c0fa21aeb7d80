"""`nsa-bench attention`: time the operations, and compare them with the reference."""

"""The records of a run: tables, heartbeats, figures, samples, report, and the progress line."""

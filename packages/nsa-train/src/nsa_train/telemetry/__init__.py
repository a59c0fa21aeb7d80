"""What a run leaves behind: records, figures, samples' frame, report, and the progress line."""

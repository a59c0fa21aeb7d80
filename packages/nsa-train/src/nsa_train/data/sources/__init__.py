"""Where documents come from: each source is a number of blocks of records, and which records are held out."""

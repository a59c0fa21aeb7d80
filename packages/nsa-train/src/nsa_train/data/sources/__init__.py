"""Sources of documents: each source has blocks of records, and decides which records are held out."""

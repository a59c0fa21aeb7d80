"""`nsa-bench needle`: train a model on rows that grow longer, then let it decode answers about pairs hidden at every depth."""

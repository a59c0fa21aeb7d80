"""The selection explorer: which blocks each token of a text chose, as a page for a browser and as JSON."""

"""The tables of a recipe: the keys of a run, and how they are read and checked. Imports no torch."""

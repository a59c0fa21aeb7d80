"""The tables of a recipe: the keys of a run, with the code that reads and checks them. Imports no torch."""

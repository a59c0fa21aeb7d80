"""The tables of a recipe: what a run may be told, and how it is read and checked. Imports no torch."""

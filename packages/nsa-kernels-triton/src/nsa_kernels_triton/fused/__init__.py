"""All of Eq. 5 in one: the branches' kernels, with the gates in their epilogues and one preprocess for the backward pass."""

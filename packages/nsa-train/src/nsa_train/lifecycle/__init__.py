"""How the processes of a run begin, speak, are asked to stop, and end."""

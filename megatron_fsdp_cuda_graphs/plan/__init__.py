"""Checks flags without a GPU, and shows the graphs that they capture and the memory of one rank."""

"""Check flags without a GPU, and show the graphs that they capture and the memory of one rank."""

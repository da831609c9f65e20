"""Define the tolerance for numbers that differ only in summation order."""

# Relative tolerance per step. Up to about 2**14 consecutive float32 additions precede a number: all layers of a small
# model in both directions, then the squares of a weight's gradient. Each rounds by at most 2**-24 in either direction;
# together, by 2**-24 times the square root of their number. Errors of earlier steps persist in the parameters.
ROUNDING = 2**-17

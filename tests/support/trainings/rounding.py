"""How far numbers may be from each other that differ in the order of their sums alone."""

# Relatively, of numbers that have up to about 2**14 additions in float32 behind them, one after the other: those of all
# layers of a small model, forward and backward, then of the squares of a weight's gradient. Each rounds by at most
# 2**-24, up or down: together by 2**-24 times the root of their number. A step of a training starts from parameters
# that carry what the steps before it rounded, so that this is for each step.
ROUNDING = 2**-17

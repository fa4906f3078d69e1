"""Codes times codes, scaled in the same pass.

adapter.py            from a Matmul to a plan, or why not
grouped_adapter.py    the same where rows come in groups, each with its own matrix
hopper.py             a scale for each row and column
hopper_tiled.py       scales that vary within the sum, in tiles of 128
hopper_grouped.py     rows in groups
tuned.py              block sizes, from <device>.json
"""

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")  # what wgmma multiplies besides int8

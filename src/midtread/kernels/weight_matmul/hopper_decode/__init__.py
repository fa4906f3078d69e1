"""Few rows against a stored weight on Hopper.

kernel.py      how the work is divided; the call
pipeline.py    what a warpgroup does with its blocks: fetch, decode, add up
exchange.py    how sums become rows of the result
grouped.py     the same for rows in groups, each with its own weight
tuned.py       block sizes, from <device>.json
"""

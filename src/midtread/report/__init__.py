"""Report: what a run did, for people to read.

terminal.py   what a run prints while it works
run.py        the page of one run, or of several side by side
quantized.py  what quantizing a checkpoint cost, as parts of a page
html.py       a page that holds all it shows
plot.py       loss curves as a picture
tflite.py     what is in a LiteRT file, and how far it is from the model in JAX
"""

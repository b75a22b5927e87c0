"""Predictions: how long a step takes on machines that are not at hand.

Each model is held against what others have measured. Read in this order:

    transformers the step and the memory of a transformer, one closed form for all ways
    frozen       the constants, fitted at development time
    runs         tables, config.json and presets as runs
    answers      the answer in numbers, words and a picture
    plans        which way of training suits which model and machine
    one_host     rings along the wires of one host
    scoreboard   each published table beside its predictions
    figures      the scoreboard as a picture
"""

"""Predictions: how long a step takes on machines that are not at hand.

Each model is held against what others have measured. Read in this order:

    transformers the step and the memory of a transformer: one closed form for all ways to share it
    frozen       the constants, fitted at development time
    runs         what people write, a table's line, a config.json or a preset, becomes a `Run`
    answers      what is predicted of a `Run`, in numbers, words and a picture
    plans        which way of training suits which model and machine
    one_host     how fast an all-reduce is whose ring runs along the wires of one host
    scoreboard   each published table beside its predictions
    figures      the scoreboard as a picture
"""

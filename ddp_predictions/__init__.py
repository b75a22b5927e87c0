"""Predicts how long a step takes on machines that are not at hand.

Each model is compared with what others have measured. Read in this order:

    transformers the step and the memory of a transformer: one closed form for all ways to share it
    frozen       the constants, fitted at development time
    runs         a table's line, a config.json or a preset becomes a `Run`
    answers      predictions for a `Run`, in numbers, words and a picture
    plans        the way of training that suits a model and a machine
    one_host     the time of an all-reduce whose ring runs along the wires of one host
    scoreboard   each published table beside its predictions
    figures      the scoreboard as a picture
"""

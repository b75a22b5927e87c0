"""Predictions: how long a step takes on machines that are not at hand.

Each model is held against what others have measured. Read in this order:

    transformers one step of a GPT by tensor, data and pipeline parallelism, in closed form
    one_host     rings along the wires of one host
    published    the models, fitted to tables that others have published
    predict      the scoreboard: each table beside its predictions
    plans        which way of training suits which model and machine
    figures      all of this as pictures
"""

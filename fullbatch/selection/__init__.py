"""Which samples meet in a batch.

spectral.py, ordered.py   pure functions of embeddings, a temperature and a seed: pairs that are hard for each other
                          share a batch; the hardest of many random batches are kept
planning.py               from a snapshot of the embeddings to a plan, piece by piece, in processes of its own
periods.py                the stretches of a run that have a plan each, and the plans' files
selector.py               ``Selector``, which a trainer is handed: the one thing it knows of all this
"""

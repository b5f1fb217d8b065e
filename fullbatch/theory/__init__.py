"""Which batches lead to the full batch's optimum, where it can be watched: free embeddings that descend.

"Mini-Batch Optimization of Contrastive Loss" (Cho et al. 2023).  ``embeddings.py`` has the loss, the step and
what must come out, ``minimizers.py`` what does come out and how fast by which batches, ``toy.py`` four points in the
plane and the loss along one angle; ``study.py`` puts them together.
"""

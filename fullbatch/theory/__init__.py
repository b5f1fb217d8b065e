"""Which batches lead to the full batch's optimum, where it can be watched: free embeddings that descend.

"Mini-Batch Optimization of Contrastive Loss" (Cho et al. 2023).  ``embeddings.py`` has the loss and the step,
``optimum.py`` what must come out, ``minimizers.py`` what does come out, ``racing.py`` how fast by which batches,
``toy.py`` four points in the plane, ``angle.py`` the loss along one angle; ``study.py`` puts them together.
"""

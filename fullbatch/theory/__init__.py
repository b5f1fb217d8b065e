"""Which batches lead to the full batch's optimum, where it can be watched: free embeddings that descend."""

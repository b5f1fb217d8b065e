"""Which samples meet in a batch: pure functions of tables of embeddings, of a temperature and of a seed.

``spectral.py`` rearranges an epoch so that pairs that are hard for each other share a batch, ``assignment.py`` makes
its clusters equal in size, ``ordered.py`` keeps the hardest of many random batches.  Nothing here knows of a model, a
loader or a process, and nothing is remembered: a plan can be made again, anywhere, from the same table.
"""

from fullbatch.selection.assignment import even_assignment as even_assignment
from fullbatch.selection.ordered import batch_losses as batch_losses
from fullbatch.selection.ordered import batches_of_partition as batches_of_partition
from fullbatch.selection.ordered import drawn_batches as drawn_batches
from fullbatch.selection.ordered import hardest as hardest
from fullbatch.selection.ordered import losses_at as losses_at
from fullbatch.selection.ordered import ordered_batches as ordered_batches
from fullbatch.selection.spectral import blocks as blocks
from fullbatch.selection.spectral import even_clusters as even_clusters
from fullbatch.selection.spectral import order_of_block as order_of_block
from fullbatch.selection.spectral import spectral_order as spectral_order

"""The ranks (``ranks.py``) and towers spread over them (``towers.py``); no other room imports torch.distributed.

On one rank every function is the identity, so no caller has to ask how many ranks there are.
"""

from fullbatch.distributed.ranks import World as World
from fullbatch.distributed.ranks import any_rank as any_rank
from fullbatch.distributed.ranks import average_gradient as average_gradient
from fullbatch.distributed.ranks import check_equal_rows as check_equal_rows
from fullbatch.distributed.ranks import from_first_rank as from_first_rank
from fullbatch.distributed.ranks import gather_objects as gather_objects
from fullbatch.distributed.ranks import gather_rows as gather_rows
from fullbatch.distributed.ranks import gather_uneven as gather_uneven
from fullbatch.distributed.ranks import host_barrier as host_barrier
from fullbatch.distributed.ranks import is_node_leader as is_node_leader
from fullbatch.distributed.ranks import local_rank as local_rank
from fullbatch.distributed.ranks import mean_over_ranks as mean_over_ranks
from fullbatch.distributed.ranks import ranks as ranks
from fullbatch.distributed.ranks import share_from_leader as share_from_leader
from fullbatch.distributed.ranks import together as together
from fullbatch.distributed.ranks import world as world

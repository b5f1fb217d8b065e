"""How wrong are the normalizers that a run divides by?

exact.py          the true value over a whole data set, and what one random batch says of it
beliefs.py        what a method remembers or predicts
errors.py         the one beside the other: ``normalizer_audit``
probe.py          the same in training, on a fixed part of the data
finished_run.py   the same of a run folder's checkpoints: ``audit_run``
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullbatch.audit.errors import normalizer_audit as normalizer_audit
    from fullbatch.audit.exact import exact_log_normalizers as exact_log_normalizers
    from fullbatch.audit.finished_run import Audit as Audit
    from fullbatch.audit.finished_run import Options as Options
    from fullbatch.audit.finished_run import audit_run as audit_run

_DOOR = {
    "Audit": "finished_run",
    "Options": "finished_run",
    "audit_run": "finished_run",
    "exact_log_normalizers": "exact",
    "normalizer_audit": "errors",
}


def __getattr__(name: str) -> Any:
    """Exact values need no model: who only wants them need not wait for its libraries."""
    if name in _DOOR:
        return getattr(import_module(f"fullbatch.audit.{_DOOR[name]}"), name)
    raise AttributeError(f"module 'fullbatch.audit' has no attribute {name!r}")

"""The command line, in which the run TRIAL comes to its first checkpoint and no further, so that whoever kills it need
not be fast: python -m tests.trials.halting TRIAL ARGUMENTS ...  Its workers import this file as well.
"""

import sys
import threading

from fullbatch.cli import main
from fullbatch.training import checkpoint


def halting(root, *args, write=checkpoint.write, **more):
    written = write(root, *args, **more)
    if root.parent.name == sys.argv[1]:
        threading.Event().wait()
    return written


checkpoint.write = halting

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))

"""``python -m fullbatch`` is ``fullbatch``."""

from fullbatch.cli import run

if __name__ == "__main__":
    run()

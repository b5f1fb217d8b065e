"""A PostgreSQL server for the tests, from the programs that are installed here; as root, another user runs it."""

import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import HANG


def programs():
    """The folder with initdb and pg_ctl; None: there is none."""
    places = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").is_file() and (place / "pg_ctl").is_file()), None)


def why_not():
    """Why there can be no server; empty: there can."""
    if programs() is None:
        return "PostgreSQL's programs (initdb, pg_ctl) are not installed: apt-get install postgresql"
    try:
        import psycopg2  # noqa: F401
    except ImportError:
        return "psycopg2 is not installed: pip install 'fullbatch[postgresql]'"
    return ""


@contextmanager
def server():
    """Its URL, over a socket of its own: it has no port that another could have."""
    place = programs()
    assert place is not None
    user = _other_user() if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="fb-pg-", ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "data"
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)

        def run(*command):
            as_other = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            log = Path(folder) / "said.txt"
            with log.open("ab") as said:  # not a pipe: the server would keep it open
                done = subprocess.run(
                    command, stdout=said, stderr=said, cwd=folder, timeout=2 * HANG, check=False, **as_other
                )
            assert done.returncode == 0, log.read_text()

        run(place / "initdb", "-D", data, "-U", "tester", "--auth=trust", "--no-sync", "--encoding=UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        patiently = ("-w", "-t", f"{HANG:g}")
        run(place / "pg_ctl", "-D", data, "-o", options, "-l", f"{folder}/server.txt", *patiently, "start")
        try:
            yield f"postgresql://tester@/postgres?host={folder}"
        finally:
            run(place / "pg_ctl", "-D", data, "-m", "immediate", *patiently, "stop")


def _other_user():
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise AssertionError("root cannot run PostgreSQL, and there is neither a user postgres nor nobody")

"""A database whose rows are a chain of digests: each holds that of the one before, so that a lost or a torn commit shows.

    chain.py write DATABASE STOP    writes until the file STOP is there
    chain.py check DATABASE         reads it, checks it whole, and prints its last row's number
"""
import hashlib
import os
import sqlite3
import sys


def write(place, stop):
    db = sqlite3.connect(place, isolation_level=None)
    db.execute("pragma journal_mode=wal")
    db.execute("pragma synchronous=normal")
    db.execute("create table if not exists chain (n integer primary key, filler blob, digest text)")
    last, n = "begin", 0
    while not os.path.exists(stop):
        db.execute("begin immediate")
        for _ in range(20):
            n += 1
            filler = os.urandom(700)
            last = hashlib.sha256(last.encode() + filler).hexdigest()
            db.execute("insert into chain values (?, ?, ?)", (n, filler, last))
        db.execute("commit")
        if n == 20:
            print("the first commit is done", flush=True)
        if n % 400 == 0:
            db.execute("delete from chain where n < ?", (n - 4000,))


def check(place):
    db = sqlite3.connect(place)
    assert db.execute("pragma integrity_check").fetchone()[0] == "ok", "integrity"
    last, before = None, None
    for n, filler, digest in db.execute("select n, filler, digest from chain order by n"):
        if last is not None:
            assert n == before + 1, "a gap after row %d" % before
            assert digest == hashlib.sha256(last.encode() + filler).hexdigest(), "row %d" % n
        last, before = digest, n
    assert (before or 0) % 20 == 0, "half a commit: up to row %d" % before
    print(before or 0)


{"write": write, "check": check}[sys.argv[1]](*sys.argv[2:])

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the peers do, run by their own Python: peer.py NAME ARGUMENT... prints a JSON line a round.

A peer's time begins when its modules are imported, which takes seconds: that is in the peers' favour.
"""
import json
import pathlib
import resource
import sys
import time


def tell(work):
    """Runs it once: {"seconds", "cpu", "rss"}."""
    begin, cpu = time.monotonic(), time.process_time()
    work()
    print(json.dumps({"seconds": time.monotonic() - begin, "cpu": time.process_time() - cpu,
                      "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), flush=True)


def tensorstore(array, rounds):
    import tensorstore as ts
    for _ in range(int(rounds)):
        store = ts.open({"driver": "zarr", "kvstore": {"driver": "file", "path": array}}).result()
        tell(lambda store=store: store.read().result())


PEERS = {f.__name__: f for f in (tensorstore,)}

if __name__ == "__main__":
    PEERS[sys.argv[1]](*sys.argv[2:])

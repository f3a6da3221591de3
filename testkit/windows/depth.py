"""Prints how many reads of so many bytes a thread had in flight at most: `depth.py BYTES TRACE...`, a trace a thread.

Wine reads within the call that starts a read, and queues its end. A thread takes ends from the queue by a request to
Wine's server, of which the first two bytes are the number: 263, `remove_completion` of Wine 10.
"""

import re
import sys
from pathlib import Path

length, *traces = sys.argv[1:]
READ = re.compile(rf"pread64\(.* {length}, \d+\) += {length}$")
TAKE = re.compile(r'write\(\d+, "\\x07\\x01')
TAKEN = re.compile(r'read\(\d+, "\\x00\\x00\\x00\\x00')


def depth(calls: list[str]) -> int:
    """Counts the calls of one thread."""
    in_flight = most = 0
    is_asking = False
    for call in calls:
        if READ.match(call):
            in_flight += 1
            most = max(most, in_flight)
        elif TAKE.match(call):
            is_asking = True
        elif is_asking and call.startswith("read("):
            is_asking = False
            # One that is told that there is none has another answer.
            in_flight -= bool(TAKEN.match(call))
    return most


print(max(depth(Path(trace).read_text().splitlines()) for trace in traces))

#!/usr/bin/env python3
"""A viewer that comes back from another device: shows what an exec has printed, from where the last device stopped.

    viewer.py SESSION-ID EXEC-ID [OFFSET]

Prints new output as it comes and, at its end or when it is interrupted, the offset to go on from on standard error.
Whoever has session, exec and offset (in a link, in a cookie) can go on anywhere, without a byte twice or missing.
Nothing but the standard library. DORMOUSE_URL and DORMOUSE_TOKEN name the server.
"""
import base64
import json
import os
import sys
import time
import urllib.request

URL = os.environ.get("DORMOUSE_URL", "http://127.0.0.1:7420")


def follow(session, exec, offset):
    """Yields (offset, bytes) from `offset` on, through restarts of the server, until the exec has ended."""
    while True:
        path = f"/v1/sessions/{session}/execs/{exec}/output?stdout_from={offset}&follow=true"
        request = urllib.request.Request(URL + path, headers={"Authorization": "Bearer " + os.environ["DORMOUSE_TOKEN"]})
        try:
            with urllib.request.urlopen(request) as lines:
                for line in filter(bytes.strip, lines):
                    item = json.loads(line)
                    if item["stream"] == "exit":
                        return
                    if item["stream"] == "gap" and item["of"] == "stdout":
                        print(f"[bytes {item['from']} to {item['to']} are no longer kept]", file=sys.stderr)
                        offset = item["to"]
                    if item["stream"] == "stdout":
                        data = base64.b64decode(item["data_b64"])
                        offset = item["offset"] + len(data)
                        yield offset, data
        except (OSError, ValueError):
            # The link or the server went away; the exec did not.
            time.sleep(0.5)
        else:
            time.sleep(0.1)


def main(session, exec, offset="0"):
    last = int(offset)
    try:
        for last, data in follow(session, exec, last):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        pass
    print(last, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])

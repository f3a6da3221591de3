"""A web server on threads of Python's, in the process of the test."""

from __future__ import annotations

import re
import socket
import threading
import time


class Server:
    """Serves one file by ranges, until it is told to be of no use."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.trouble = ""
        # Set once a request has met the trouble.
        self.met = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            request = b""
            while b"\r\n\r\n" not in request:
                more = connection.recv(65536)
                if not more:
                    return
                request += more
            found = re.search(rb"(?i)range: bytes=(\d+)-(\d+)", request)
            assert found is not None
            first, last = int(found[1]), min(int(found[2]), len(self.body) - 1)
            part = self.body[first : last + 1]
            head = (
                f'HTTP/1.1 206 Partial Content\r\nETag: "one"\r\nConnection: close\r\n'
                f"Content-Length: {len(part)}\r\nContent-Range: bytes {first}-{last}/{len(self.body)}\r\n\r\n"
            )
            try:
                if self.trouble == "no address":
                    # Without an answer: another connection is made.
                    return
                if self.trouble == "silent":
                    self.met.set()
                    connection.recv(1)
                    return
                connection.sendall(head.encode())
                if self.trouble == "trickling":
                    self.met.set()
                    for byte in part:
                        connection.sendall(bytes([byte]))
                        time.sleep(0.05)
                connection.sendall(part)
            except OSError:
                pass

    def close(self) -> None:
        self.listener.close()

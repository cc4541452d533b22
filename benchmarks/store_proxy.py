"""Proxies in front of a TCPStore that count the requests of each rank, by what they ask for.

The protocol is that of torch 2.11 (TCPStoreBackend.hpp): a byte that says what is asked for, then
its arguments; a text or a value is its length, as a uint64, and its bytes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter

MARK = "store_proxy/phase/"  # a rank that sets this key with a name begins a phase of that name

# What is asked for, and its arguments: t a text, v a value, i an int64, u a uint32, * a count and
# that many of what follows.
_REQUESTS = {
    0: ("validate", "u"),
    1: ("set", "tv"),
    2: ("compare_set", "tvv"),
    3: ("get", "t"),
    4: ("add", "ti"),
    5: ("check", "*t"),
    6: ("wait", "*t"),
    7: ("num_keys", ""),
    8: ("delete_key", "t"),
    9: ("append", "tv"),
    10: ("multi_get", "*t"),
    11: ("multi_set", "*tv"),
    12: ("cancel_wait", ""),
    13: ("ping", "u"),
}


class StoreProxy:
    """Passes the requests of one rank to the store at ``port``, and counts them.

    Attributes:
        port: Where the rank connects.
        requests: The requests so far, by phase and by what they ask for.
        num_connections: The connections so far, by phase.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests: dict[str, Counter[str]] = {}
        self.num_connections: Counter[str] = Counter()
        self._phase = "start"
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            store = socket.create_connection(("127.0.0.1", self._store_port))
            self.num_connections[self._phase] += 1
            for run, args in ((self._requests, (client, store)), (_pass_on, (store, client))):
                threading.Thread(target=run, args=args, daemon=True).start()

    def _requests(self, client: socket.socket, store: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            reader = _Reader(client)
            while True:
                name, first = reader.request()
                with self._lock:
                    if name == "set" and first.endswith(MARK + first.rpartition("/")[2]):
                        self._phase = first.rpartition("/")[2]
                    else:
                        self.requests.setdefault(self._phase, Counter())[name] += 1
                store.sendall(reader.taken())
        store.close()


class _Reader:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._taken = bytearray()

    def request(self) -> tuple[str, str]:
        """Read one request: what it asks for, and the first text in it."""
        name, arguments = _REQUESTS[self._read(1)[0]]
        texts: list[str] = []
        if arguments.startswith("*"):
            arguments = arguments[1:] * self._number("<Q")
        for argument in arguments:
            if argument in "tv":
                data = self._read(self._number("<Q"))
                if argument == "t" and not texts:
                    texts.append(data.decode())
            else:
                self._read({"i": 8, "u": 4}[argument])
        return name, texts[0] if texts else ""

    def taken(self) -> bytes:
        """The bytes of the requests read since the last call."""
        taken, self._taken = bytes(self._taken), bytearray()
        return taken

    def _number(self, of: str) -> int:
        return int(struct.unpack(of, self._read(struct.calcsize(of)))[0])

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self._connection.recv(num_bytes - len(data))
            if not part:
                raise EOFError
            data += part
        self._taken += data
        return data


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    target.close()

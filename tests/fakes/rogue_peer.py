"""A process of another account that has taken a replica's port."""

import asyncio
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


class RoguePeer:
    """Keeps what each connection sends, and answers with a pickle that creates `file`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.received: list[bytearray] = []
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port. Raises OSError while another process holds it."""
        self._server = await asyncio.start_server(self._connected, host, port)
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self.received.append(kept)
        self._writers.append(writer)
        # A frame as version 1 of the protocol had them.
        payload = pickle.dumps(_Touch(self.file))
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                kept += data
                writer.write(struct.pack(">I", len(payload)) + payload)
        writer.close()

"""A TCP proxy on loopback that tests put between two workers: it passes bytes at a given rate, or none, or cuts."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

PIECE = 32 * 1024


class Proxy:
    """Forwards to `target`; the rates, down (from the target) and up, may be changed at any time (0 is a stall, None no limit)."""

    def __init__(self) -> None:
        self.port = 0
        self.target = 0
        self.bytes_per_s: float | None = None
        self.up_bytes_per_s: float | None = None
        self.num_bytes = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()

    def cut(self) -> None:
        """Every connection is reset."""
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in self._writers])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(self._pump(reader, back, is_down=False)),
                    asyncio.ensure_future(self._pump(onward, writer, is_down=True)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._writers -= {writer, back}
            for one in (writer, back):
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_down: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE):
                while self._rate(is_down) == 0:
                    await asyncio.sleep(0.01)
                if rate := self._rate(is_down):
                    await asyncio.sleep(len(piece) / rate)
                self.num_bytes += len(piece)
                writer.write(piece)
                await writer.drain()

    def _rate(self, is_down: bool) -> float | None:
        return self.bytes_per_s if is_down else self.up_bytes_per_s

    @contextlib.contextmanager
    def running(self) -> Iterator["Proxy"]:
        started = threading.Event()

        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                await server.serve_forever()

        async def end_all() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for one in rest:
                one.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        def run() -> None:
            self._loop.run_until_complete(task)
            self._loop.run_until_complete(end_all())
            self._loop.close()

        task = self._loop.create_task(main())
        thread = threading.Thread(target=run)
        thread.start()
        started.wait()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(task.cancel)
            thread.join()

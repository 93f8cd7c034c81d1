"""Who holds which blocks, as far as the workers have told. A hint: a wrong entry costs a miss, never a wrong token.

Pure. Sets of block ids by worker, fed by the workers' progress.
"""

from collections.abc import Iterable, Sequence


class PrefixIndex:
    def __init__(self) -> None:
        self._ids: dict[str, set[bytes]] = {}

    def update(self, worker_id: str, sealed: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        ids = self._ids.setdefault(worker_id, set())
        ids.update(sealed)
        ids.difference_update(evicted)

    def forget(self, worker_id: str) -> None:
        self._ids.pop(worker_id, None)

    def num_held(self, worker_id: str, block_ids: Sequence[bytes]) -> int:
        """How many of a chain's first blocks the worker holds."""
        ids = self._ids.get(worker_id)
        if not ids:
            return 0
        for count, block_id in enumerate(block_ids):
            if block_id not in ids:
                return count
        return len(block_ids)

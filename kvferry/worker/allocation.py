"""How the C library keeps memory: messages of some megabytes come and go all the time, and must not be new pages each time.

By default glibc returns such memory to the system and takes it again, a page fault for every 4 KiB, which cost more than half of a
gRPC transfer here. No effect where there is no such library.
"""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MAX_KEPT_BYTES = 64 * 1024 * 1024
MAX_HEAP_PIECE_BYTES = 32 * 1024 * 1024


def keep_freed_memory() -> None:
    """Pieces up to 32 MiB come from the heap, and up to 64 MiB of what is free at its end stays there. For the whole process."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, MAX_HEAP_PIECE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)
        library.mallopt(M_TOP_PAD, MAX_KEPT_BYTES // 4)

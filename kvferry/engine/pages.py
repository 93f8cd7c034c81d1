"""Anonymous memory for what steps read at large: pages are taken when they are first touched, large ones where the system has them."""

import contextlib
import mmap


def map_pages(num_bytes: int) -> mmap.mmap:
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped

"""Keeps freed buffers in the process, so that large temporaries are not faulted in anew.

XLA on the CPU allocates a computation's temporaries on every call. Beyond 32 MB, glibc maps and
unmaps them each time, and the kernel zeroes every page again: a training step or a batched prefill
can spend more time on page faults than on arithmetic.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1


def keep_freed_buffers() -> bool:
    """Tells glibc's malloc to reuse large blocks; False where there is no such malloc.

    For programs, not for libraries: it holds for the whole process, which then keeps its peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))

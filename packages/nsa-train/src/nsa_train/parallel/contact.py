"""One line for a rank whose peer is gone, in place of the message of the library that carried the exchange."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from nsa_train.errors import LostContactError

SIGNS = ("gloo/transport/", "ncclRemoteError", "remote process exited")
"""Parts of gloo's and NCCL's messages when a connection breaks off, or nothing comes over it in time."""


@contextmanager
def contact_kept(rank: int) -> Iterator[None]:
    """Run a block of `rank` that exchanges with others; any other error of it comes out as it is.

    Raises:
        LostContactError: in place of what a collective raises when another rank is gone.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_broken_off(error):
            raise
        raise LostContactError(
            f"rank {rank}: lost contact with another rank ({_cause(error)}); its message, or the launcher's, says why; go on with --resume"
        ) from None


def _is_broken_off(error: RuntimeError) -> bool:
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    # a failed requirement of gloo on this machine, such as a network interface, has nothing to do with another rank
    return "enforce fail" not in str(error) and any(sign in str(error) for sign in SIGNS)


def _cause(error: RuntimeError) -> str:
    """Return the first sentence of `error`, without the line of the library's source that it may begin with."""
    text = re.sub(r"^\[\S+\]\s*", "", str(error)).splitlines()[0]
    return text.partition(". ")[0][:200]

"""A broken exchange becomes one line; any other error is unchanged."""

import pytest
from torch.distributed import DistStoreError

from nsa_train.errors import LostContactError
from nsa_train.parallel.world import contact_kept

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48559. This is typically caused by"
NCCL = "NCCL error in: /pytorch/NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call"
NO_INTERFACE = (
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth9"
)
LATE = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (GLOO, "Connection closed by peer [127.0.0.1]:48559"),
        (LATE, "Timed out waiting 1800000ms for recv operation to complete"),
        (NCCL, "NCCL error in: /pytorch/NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.5"),
    ],
    ids=["gloo", "late", "nccl"],
)
def test_a_broken_exchange_is_one_line(message: str, cause: str) -> None:
    with pytest.raises(LostContactError) as caught, contact_kept(3):
        raise RuntimeError(message)
    assert str(caught.value) == (
        f"rank 3: lost contact with another rank ({cause}); its message, or the launcher's, says why; go on with --resume"
    )
    assert caught.value.exit_code == 1


def test_a_store_that_nobody_answers_is_one_line() -> None:
    with pytest.raises(LostContactError, match="rank 0: lost contact with another rank .wait timeout"), contact_kept(0):
        raise DistStoreError("wait timeout after 1800000ms, keys: /run/0")


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), RuntimeError(""), ValueError("gloo/transport/"), RuntimeError(NO_INTERFACE)]
)
def test_another_error_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, contact_kept(0):
        raise error
    assert caught.value is error

from __future__ import annotations

import errno
import inspect
import pickle

import pytest

import transfer_engine as te
from transfer_engine import _native, errors

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, te.TransferEngineError)]


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        (te.PeerUnreachable, te.PeerError),
        (te.PeerLost, te.PeerError),
        (te.PeerRestarted, te.PeerError),
        (te.RegionClosed, te.RemoteAccessError),
        (te.TransferTimeout, TimeoutError),
        (te.ArgumentError, ValueError),
        (te.ArgumentTypeError, TypeError),
        (te.RangeError, IndexError),
        (te.DescriptorError, te.ArgumentError),
    ],
)
def test_errors_can_be_caught_by_what_they_are(child: type[Exception], parent: type[Exception]) -> None:
    assert issubclass(child, parent)


def test_every_error_is_exported_at_top_level() -> None:
    assert sorted(cls.__name__ for cls in ALL) == sorted(errors.__all__)
    assert all(getattr(te, cls.__name__) is cls for cls in ALL)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_survives_pickling_whole(cls: type[te.TransferEngineError]) -> None:
    error = cls("it broke", operation="write", peer="te1:x", nic="eth0", status="EIO", elapsed_s=1.5, hint="mend it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_shows_a_remedy_of_its_own(cls: type[te.TransferEngineError]) -> None:
    error = cls("it broke")
    assert error.hint
    assert error.hint in str(error)
    assert cls is te.TransferEngineError or "default_hint" in vars(cls)


def test_text_names_operation_peer_nic_status_and_time() -> None:
    text = str(te.PeerLost("fell silent", operation="write", peer="te1:abc", nic="eth0", status="EIO", elapsed_s=2.5))
    for part in ("write: fell silent", "te1:abc", "eth0", "EIO", "2.5 s"):
        assert part in text


def test_long_addresses_are_shortened_in_the_text_only() -> None:
    peer = "te1:" + "x" * 2000
    error = te.PeerLost("gone", peer=peer)
    assert error.peer == peer
    assert len(str(error)) < 400


def test_every_status_of_the_core_has_a_class() -> None:
    names = [name for name in dir(_native.lib) if name.startswith("TE_ERR_")]
    assert len(names) >= 17
    for name in names:
        error = _native.ffi.new("te_error *", {"nic": -1, "peer": -1})
        assert type(_native.failure("x", getattr(_native.lib, name), error)) is not te.TransferEngineError


def test_provider_status_is_given_by_name() -> None:
    error = _native.ffi.new("te_error *", {"nic": 0, "peer": -1, "provider_status": -110, "message": b"no answer"})
    failure = _native.failure("write", _native.TIMEOUT, error, nics=["eth0"])
    assert failure.status == "ETIMEDOUT"
    assert failure.nic == "eth0"
    assert failure.message == "no answer"


@pytest.mark.parametrize("bad", [-1, -0.001, float("nan")])
def test_impossible_timeouts_are_refused(bad: float) -> None:
    with pytest.raises(te.ArgumentError):
        _native.nanoseconds(bad)


def test_timeouts_convert_to_nanoseconds() -> None:
    assert _native.nanoseconds(None) == -1
    assert _native.nanoseconds(0) == 0
    assert _native.nanoseconds(1.5) == 1_500_000_000
    assert _native.nanoseconds(float("inf")) == _native.FOREVER_NS
    with pytest.raises(TypeError):
        _native.nanoseconds("5")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (errno.ENOMEM, "ENOMEM"),
        (-errno.ENOTCONN, "ENOTCONN"),
        (4711, "4711"),
        (0x10000 + 12, "IBV_WC_RETRY_EXC_ERR"),
        (0x10000 + 23, "IBV_WC_TM_RNDV_INCOMPLETE"),
        (0x10000 + 99, "IBV_WC_99"),
        (0x20000 + 13, "EFA_IO_COMP_STATUS_LOCAL_ERROR_UNRESP_REMOTE"),
        (0x20000 + 4711, "EFA_IO_COMP_STATUS_4711"),
    ],
)
def test_what_a_provider_reports_has_the_name_that_its_documentation_uses(number: int, name: str) -> None:
    assert _native.provider_status_name(number) == name

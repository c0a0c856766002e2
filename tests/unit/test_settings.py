from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import transfer_engine as te
from transfer_engine import _native
from transfer_engine.settings import to_native, variable_of


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in te.Settings.table():
        monkeypatch.delenv(row["variable"], raising=False)


def test_defaults_are_those_of_the_core() -> None:
    core = _native.ffi.new("te_settings *")
    _native.lib.te_settings_defaults(core)
    ours, _ = to_native(te.Settings())
    for name, _ in _native.ffi.typeof("te_settings").fields:
        theirs, mine = getattr(core, name), getattr(ours, name)
        if isinstance(theirs, int):
            assert mine == theirs, name
    for name, _ in _native.ffi.typeof("te_rdma_settings").fields:
        assert getattr(ours.rdma, name) == getattr(core.rdma, name), name


def test_every_setting_reaches_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "transport": "sim", "nics": ("x", "y"), "nic_count": 7,
        "timeout_s": 1.25, "connect_timeout_s": 2.25, "peer_timeout_s": 3.25,
        "close_timeout_s": 4.25, "polling": "busy", "spin_s": 0.25, "core": 3, "operations": 64,
        "operations_per_peer": 17, "nic_depth": 18, "peer_depth": 19, "peer_window_bytes": 4097,
        "nic_window_bytes": 4098, "immediate_window": 20, "assembly_slots": 21,
        "message_window": 22, "max_message_bytes": 23, "message_queue_bytes": 4142, "chunk_bytes": 25,
        "shard_bytes": 26, "page_immediates": "last", "max_peers": 27, "max_regions": 28, "max_counters": 29,
        "staging_slots": 35, "staging_slot_bytes": 4099,
        "ports": (30, 31), "bursts": 32, "gdr": "require", "gid_index": 33, "pkey_index": 34, "path_mtu": 2048,
        "service_level": 5, "traffic_class": 106, "ack_timeout": 20, "retry_count": 6, "rnr_retry": 3, "rnr_timer": 14,
        "identity": bytes(range(16)), "sim": "seed=2",
    }  # fmt: skip
    assert set(values) == {field.name for field in dataclasses.fields(te.Settings)}
    native, _alive = to_native(te.Settings(**values))
    text = _native.text
    assert (text(native.transport), text(native.nics), text(native.sim)) == ("sim", "x,y", "seed=2")
    assert bytes(_native.ffi.buffer(native.identity)) == bytes(range(16))
    assert [native.default_timeout_ns, native.connect_timeout_ns, native.peer_timeout_ns, native.close_timeout_ns] == [
        1_250_000_000, 2_250_000_000, 3_250_000_000, 4_250_000_000,
    ]  # fmt: skip
    assert (native.spin_ns, native.core) == (250_000_000, 3)
    assert (native.polling, native.page_immediates) == (_native.lib.TE_POLL_BUSY, _native.lib.TE_PAGES_LAST)
    assert native.gdr == _native.lib.TE_GDR_REQUIRE
    assert (native.port_low, native.port_high) == (30, 31)
    for name, value in values.items():
        if isinstance(value, int) and name != "core":
            assert getattr(native if hasattr(native, name) else native.rdma, name) == value, name


def test_argument_wins_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    default = te.Settings().operations
    monkeypatch.setenv("TE_OPERATIONS", str(default * 2))
    assert te.Settings().operations == default * 2
    assert te.Settings(operations=default * 4).operations == default * 4


def test_environment_is_read_when_the_object_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = te.Settings()
    monkeypatch.setenv("TE_TIMEOUT_S", "7")
    assert settings.timeout_s == 30
    assert dataclasses.replace(settings, operations=64).timeout_s == 30
    assert te.Settings().timeout_s == 7


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("shard_bytes", "64K", 65536),
        ("chunk_bytes", "0x1000", 4096),
        ("nics", "eth0, eth1", ("eth0", "eth1")),
        ("nic_count", "2", 2),
        ("nics", "", None),
        ("ports", "4000-4010", (4000, 4010)),
        ("ports", "4000", (4000, 4000)),
        ("core", "none", "none"),
        ("core", "2", 2),
        ("identity", "00112233445566778899aabbccddeeff", bytes.fromhex("00112233445566778899aabbccddeeff")),
        ("spin_s", "1e-4", 1e-4),
        ("gid_index", "3", 3),
        ("gid_index", "", None),
        ("path_mtu", "4K", 4096),
    ],
)
def test_environment_text_is_understood(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(variable_of(name), text)
    assert getattr(te.Settings(), name) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("operations", "1000", "power of two"),
        ("operations", "many", "integer"),
        ("timeout_s", "nan", "seconds"),
        ("timeout_s", "-1", "seconds"),
        ("polling", "sometimes", "adaptive"),
        ("transport", "carrier-pigeon", "efa"),
        ("ports", "90000", "65535"),
        ("ports", "20-10", "LOW-HIGH"),
        ("core", "first", "auto"),
        ("identity", "00", "16 bytes"),
        ("nic_count", "0", "16"),
        ("nics", "a,,b", "empty"),
        ("nics", "a,a", "distinct"),
        ("gid_index", "-1", "0 to 65535"),
        ("pkey_index", "x", "integer"),
        ("path_mtu", "1500", "256, 512, 1024, 2048, 4096, or 0"),
        ("service_level", "16", "0 to 15"),
        ("traffic_class", "256", "0 to 255"),
        ("ack_timeout", "0", "1 to 31"),
        ("retry_count", "8", "0 to 7"),
        ("rnr_retry", "8", "0 to 7"),
        ("rnr_timer", "32", "0 to 31"),
    ],
)
def test_a_bad_variable_is_named_with_value_and_allowed_range(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(variable_of(name), text)
    with pytest.raises(te.ConfigError) as caught:
        te.Settings()
    assert variable_of(name) in str(caught.value)
    assert repr(text) in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("operations", 1.5), ("operations", True), ("timeout_s", None), ("polling", 3)]
)
def test_a_value_of_the_wrong_type_raises_a_type_error(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^Settings: {name}: "):
        te.Settings(**{name: value})  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        te.Settings().operations = 1  # type: ignore[misc]


def test_the_table_documents_every_setting() -> None:
    rows = te.Settings.table()
    assert [row["name"] for row in rows] == [field.name for field in dataclasses.fields(te.Settings)]
    assert all(row["meaning"] and row["variable"] == f"TE_{row['name'].upper()}" for row in rows)


def test_a_message_queue_that_is_too_short_is_refused_with_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_MAX_MESSAGE_BYTES", "16M")
    with pytest.raises(te.ConfigError, match=r"message_queue_bytes is 8388608.*max_message_bytes 16777216") as caught:
        te.Settings()
    assert "lower max_message_bytes" in caught.value.hint
    least = (32 << 20) + 4096
    with pytest.raises(te.ConfigError, match=str(least)):
        te.Settings(message_queue_bytes=least - 1)
    with te.Engine("sim", settings=te.Settings(message_queue_bytes=least)) as engine:  # the core thinks so, too
        assert engine.settings.max_message_bytes == 16 << 20


def test_names_of_nics_are_kept_as_a_tuple_in_whatever_form_they_come() -> None:
    for given in ("lo", ["lo"], ("lo",)):
        assert te.Settings(nics=given).nics == ("lo",)
    assert te.Settings(ports="5000-6000").ports == (5000, 6000)

"""Flags, watchers, triggers and bindings: what is refused, and how they live and die."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import transfer_engine as te

SOON_S = 20.0

without_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


@pytest.fixture
def prepared(pair: Any) -> te.Prepared:
    prepared: te.Prepared = pair.a.prepare(te.Write(pair.region[:64], pair.remote[:64], pair.notify))
    return prepared


def test_what_is_of_the_host_has_no_device_pointer(engine: te.Engine) -> None:
    for device in (None, "cpu"):
        flag, watcher = engine.flag(device), engine.watcher(device)
        assert flag.kind == watcher.kind == "host"
        assert flag.device_pointer == flag.control_pointer == watcher.device_pointer == 0
        assert flag.value == watcher.value == 0


@without_gpu
def test_a_device_without_a_driver_is_unavailable_with_the_reason(engine: te.Engine) -> None:
    for make in (engine.flag, engine.watcher):
        with pytest.raises(te.TransportUnavailable, match="libcuda") as caught:
            make("cuda:0")
        assert "device=None" in caught.value.hint


def test_devices_that_are_none_are_refused(engine: te.Engine) -> None:
    for make in (engine.flag, engine.watcher):
        with pytest.raises(te.ArgumentError):
            make("tpu:0")
        with pytest.raises(te.ArgumentTypeError):
            make(3.5)


def test_numbers_that_cannot_be_are_refused(pair: Any, prepared: te.Prepared) -> None:
    flag, watcher = pair.b.flag(), pair.a.watcher()
    calls: list[Callable[[Any], Any]] = [
        lambda bad: flag.raise_(bad),
        lambda bad: flag.wait(advance=bad, timeout_s=0),
        lambda bad: flag.wait_value(bad, timeout_s=0),
        lambda bad: pair.counter.bind(flag, bad),
        lambda bad: watcher.add(None, bad),
        lambda bad: watcher.trigger(prepared, every=bad),
        lambda bad: watcher.trigger(prepared, first=bad),
    ]
    for call in calls:
        for bad in (-1, 1 << 64):
            with pytest.raises(te.ArgumentError):
                call(bad)
        with pytest.raises(te.ArgumentTypeError):
            call("1")
    for call in (calls[1], calls[3], calls[5], calls[6]):
        with pytest.raises(te.ArgumentError, match="from 1"):
            call(0)
    with pytest.raises(te.ArgumentError):
        flag.wait(object(), timeout_s=0)
    with pytest.raises(te.ArgumentTypeError):
        watcher.add(object())
    with pytest.raises(te.ArgumentTypeError):
        watcher.on_change(3)  # type: ignore[arg-type]


def test_what_is_of_other_types_or_engines_is_refused(pair: Any, prepared: te.Prepared) -> None:
    watcher = pair.a.watcher()
    with pytest.raises(te.ArgumentTypeError, match=r"te\.Flag"):
        pair.counter.bind(watcher)
    with pytest.raises(te.ArgumentTypeError, match="prepare"):
        watcher.trigger(watcher)
    with pytest.raises(te.ArgumentTypeError, match=r"te\.Flag"):
        watcher.trigger(prepared, posted=watcher)
    with pytest.raises(te.ArgumentError, match="flag belongs to another engine"):
        pair.counter.bind(pair.a.flag())
    with pytest.raises(te.ArgumentError, match="flag belongs to another engine"):
        watcher.trigger(prepared, completed=pair.b.flag())
    with pytest.raises(te.ArgumentError, match="prepared belongs to another engine"):
        pair.b.watcher().trigger(prepared)


def test_what_is_closed_is_refused_by_name(pair: Any, prepared: te.Prepared) -> None:
    watcher, flag, open_watcher = pair.a.watcher(), pair.a.flag(), pair.a.watcher()
    for each in (watcher, flag):
        each.close()
        each.close()
        assert each.closed
        assert "closed" in repr(each)
    for call in (flag.raise_, flag.check, flag.clear, flag.wait, lambda: flag.value, lambda: flag.wait_value(1)):
        with pytest.raises(te.EngineClosed, match="flag is closed") as caught:
            call()
        assert "engine.flag()" in caught.value.hint
    for call in (
        watcher.add,
        lambda: watcher.value,
        lambda: watcher.trigger(prepared),
        lambda: watcher.on_change(print),
    ):
        with pytest.raises(te.EngineClosed, match="watcher is closed"):
            call()
    with pytest.raises(te.EngineClosed, match="flag is closed"):
        open_watcher.trigger(prepared, posted=flag)
    prepared.close()
    with pytest.raises(te.EngineClosed, match="prepared transfer is closed"):
        open_watcher.trigger(prepared)
    pair.counter.close()
    with pytest.raises(te.EngineClosed):
        pair.counter.bind(pair.b.flag())


def test_after_the_engine_closed_everything_says_so_and_closing_is_harmless(pair: Any, prepared: te.Prepared) -> None:
    watcher, flag = pair.a.watcher(), pair.a.flag()
    trigger = watcher.trigger(prepared, completed=flag)
    watcher.on_change(print)
    pair.a.close()
    calls: list[Callable[[], Any]] = [
        flag.raise_, flag.check, flag.wait, watcher.add, lambda: watcher.value, lambda: trigger.transfers,
        lambda: trigger.wait(1), lambda: trigger.error, pair.a.flag, pair.a.watcher,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(te.EngineClosed):
            call()
    trigger.cancel()
    watcher.close()
    flag.close()
    assert watcher.closed
    assert flag.closed


def test_they_are_of_their_process(pair: Any, prepared: te.Prepared) -> None:
    watcher, flag = pair.a.watcher(), pair.b.flag()
    for each in (watcher, flag, watcher.trigger(prepared), pair.counter.bind(flag)):
        with pytest.raises(te.ArgumentTypeError, match="own process only"):
            pickle.dumps(each)
        with pytest.raises(te.ArgumentTypeError):
            copy.copy(each)


def test_a_forked_child_leaves_them_alone(run_python: Callable[[str], Any]) -> None:
    program = """
import os, sys
import transfer_engine as te
engine = te.Engine(transport="sim")
flag, watcher = engine.flag(), engine.watcher()
counter = engine.counter()
binding = counter.bind(flag)
child = os.fork()
if child == 0:
    wrong = 0
    for call in (flag.raise_, flag.check, flag.wait, watcher.add, flag.close, watcher.close, binding.close,
                 engine.flag, lambda: counter.bind(flag), lambda: watcher.on_change(print)):
        try:
            call()
            wrong += 1
        except te.ForkedEngine:
            pass
    del flag, watcher, binding
    sys.stdout.flush()
    os._exit(wrong)
_, status = os.waitpid(child, 0)
flag.raise_()
assert flag.value == 1
engine.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def test_dropping_closes_and_a_trigger_keeps_what_it_needs(pair: Any) -> None:
    def make() -> te.Trigger:
        watcher = pair.a.watcher()
        flag = pair.a.flag()
        write = pair.a.prepare(te.Write(pair.region[:64], pair.remote[:64], pair.notify))
        trigger: te.Trigger = watcher.trigger(write, completed=flag)
        return trigger

    trigger = make()
    gc.collect()
    trigger._watcher.add(n=3)
    trigger.wait(3, SOON_S)
    assert pair.counter.wait(3, timeout_s=SOON_S) == 3
    watcher = trigger._watcher
    del trigger
    gc.collect()
    watcher.add(n=3)
    with pytest.raises(te.TransferTimeout):
        pair.counter.wait(4, timeout_s=0.05)
    for _ in range(100):
        make()
    gc.collect()


def test_dropped_ones_make_room(engine: te.Engine) -> None:
    most = 1 << 14  # of each at a time
    for _ in range(most + 100):
        engine.flag()


def test_a_binding_lasts_as_long_as_its_flag(pair: Any) -> None:
    flag = pair.b.flag()
    pair.counter.bind(flag)
    gc.collect()
    pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify).wait(SOON_S)
    flag.wait(timeout_s=SOON_S)
    with pair.counter.bind(flag) as second:
        flag.wait(timeout_s=SOON_S)  # the early one
    second.close()
    pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify).wait(SOON_S)
    flag.wait(timeout_s=SOON_S)
    assert flag.value == 3
    flag.close()


def test_results_of_a_trigger_are_frozen(pair: Any, prepared: te.Prepared) -> None:
    counts = pair.a.watcher().trigger(prepared).transfers
    assert counts == te.TriggeredTransfers(fired=0, posted=0, completed=0, failed=0, owed=0)
    with pytest.raises(AttributeError):
        counts.posted = 1  # type: ignore[misc]


def test_a_wait_for_more_than_there_will_be_times_out_with_the_count(pair: Any, prepared: te.Prepared) -> None:
    watcher = pair.a.watcher()
    trigger = watcher.trigger(prepared)
    watcher.add(n=2)
    trigger.wait(2, SOON_S)
    with pytest.raises(te.TransferTimeout, match="2/3"):
        trigger.wait(3, 0.02)


def test_gdr_can_be_required(make_engine: Callable[..., te.Engine]) -> None:
    engine = make_engine(gdr="require")
    assert engine.flag().kind == "host"  # the host needs none
    with pytest.raises(te.ConfigError, match="gdr"):
        te.Settings(gdr="perhaps")
